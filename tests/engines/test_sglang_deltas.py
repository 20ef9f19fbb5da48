"""Weight updates as deltas: the wire, servers with another base, and a chain of deltas to a real server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_oracle import make_requests
from sglang_oracle import CLOSE, logprob_gap, noisy, oracle_of, same_sets

from megarl.config.tables.rollout import SGLangConfig
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.plugin.deltas import Bases, encode
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.weights import Bucket, WeightForm
from megarl.errors import WeightSyncError

N = 3 * 65536 + 11
"""Items of a tensor of several blocks, and not of whole bytes of a bitmap."""


def forms_of(message: bytes) -> list[str]:
    return [entry[6] for entry in json.loads(message[4 : 4 + int.from_bytes(message[:4], "little")])]


def bucket_of(seed: int, form: WeightForm) -> Bucket:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.q_proj.weight": (256, 130), "b.gate.weight": (N,), "c.e_score_correction_bias": (7,)}
    return Bucket([(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()], form=form)


@pytest.mark.parametrize("form", [WeightForm(torch.bfloat16), WeightForm(torch.float32), WeightForm(fp8="blocks")])
@pytest.mark.parametrize(("share", "name"), [(0.0, "same"), (0.001, "places"), (0.1, "bitmap"), (1.0, "whole")])
def test_a_server_holds_the_bytes_that_were_sent_and_no_form_is_longer(form: WeightForm, share: float, name: str):
    first = bucket_of(0, form)
    flat = first.flat.clone()
    generator = np.random.default_rng(0)
    for _, dtype, _, begin, end in first.places:
        items = flat[begin:end].numpy().view(f"u{dtype.itemsize}")
        items[generator.random(len(items)) < share] ^= 1
    bases = Bases()
    whole, _ = encode(first.places, first.flat.numpy())
    bases.expand(whole)
    delta, receipt = encode(first.places, flat.numpy(), first.flat.numpy())
    assert forms_of(delta)[first.names.index("b.gate.weight")] == name
    assert len(delta) <= len(whole) + 10 * len(first.places)  # checksums
    entries, expanded, said = bases.expand(delta)
    assert np.array_equal(expanded, flat.numpy())
    assert [entry.name for entry in entries] == first.names
    assert said == receipt
    if 0 < share < 1:
        with pytest.raises(WeightSyncError, match="send everything"):  # a second time: another base
            bases.expand(delta)


TARGET = "q_proj"
"""Of the chain: the matrices that change, the rest is frozen."""


@pytest.mark.sglang
def test_after_a_chain_of_fifty_deltas_a_server_computes_with_the_weights(
    updated_server: Server, hostile_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also over a lost bucket, a base with another byte, and a server that has forgotten all."""
    told: list[str] = []
    settings = SGLangConfig(checksums=True, deltas=True)
    fleet = Fleet(urls=[updated_server.url], source=hostile_model, settings=settings, tell=told.append)
    config = json.loads((hostile_model / "config.json").read_text())
    form = WeightForm(torch.float32)
    engine = SGLangEngine(fleet.start(), config, fleet=fleet, form=form)
    sent: list[int] = []
    offer = WeightSender.offer
    monkeypatch.setattr(
        WeightSender, "offer", lambda sender, message: (sent.append(len(message.text)), offer(sender, message))[1]
    )
    weights = noisy(hostile_model, 1)
    generator = torch.Generator().manual_seed(0)
    for version in range(1, 52):
        if version > 1:
            for name, tensor in weights.items():
                if TARGET in name:
                    tensor += 0.05 * torch.randn(tensor.shape, generator=generator) * (
                        torch.rand(tensor.shape, generator=generator) < 0.02
                    )
        sent.clear()
        engine.update_weights(weights.items(), version)
        if version == 1:
            whole = sum(sent)
        else:
            assert sum(sent) < whole / 20
    deltas = fleet.last.checksums
    rollouts = engine.generate(make_requests(4, copies=2, seed=3), SamplingParams(max_response_tokens=8))
    assert logprob_gap(rollouts, oracle_of(hostile_model, weights)) < CLOSE
    assert same_sets(rollouts, oracle_of(hostile_model, weights)) == 1.0
    assert not engine.prove_weights()
    assert told == []
    Fleet(urls=[updated_server.url], source=hostile_model, settings=SGLangConfig())
    plain = Fleet(urls=[updated_server.url], source=hostile_model, tell=told.append)
    plain.start()
    plain.update(weights.items(), 99, form)
    assert plain.last.checksums == deltas
