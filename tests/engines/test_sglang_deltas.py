"""Weight updates as deltas: the wire, servers with another base, and a chain of deltas to a real server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_oracle import make_requests
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, Weights, logprob_gap, noisy, oracle_of, same_sets

from megarl.config.tables.rollout import SGLangConfig
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.plugin.deltas import Bases, encode
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
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
    assert [place[0] for place in entries] == first.names
    assert said == receipt
    if 0 < share < 1:
        with pytest.raises(WeightSyncError, match="send everything"):  # a second time: another base
            bases.expand(delta)


FORM = WeightForm(torch.float32)
PARAMS = SamplingParams(max_response_tokens=8)
NO_KEY = "no API key"
"""Of a warning: the servers are the tests' own."""


def assert_computes_with(engine: SGLangEngine, weights: Weights, model: Path) -> None:
    rollouts = engine.generate(make_requests(4, copies=2, seed=3), PARAMS)
    assert logprob_gap(rollouts, oracle_of(model, weights)) < CLOSE
    assert same_sets(rollouts, oracle_of(model, weights)) == 1.0


@pytest.mark.sglang
def test_after_a_chain_of_fifty_deltas_a_server_computes_with_the_weights(
    updated_server: Server, hostile_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """The checksums are those after a whole update by a fleet without deltas."""
    told: list[str] = []
    fleet = Fleet(urls=[updated_server.url], source=hostile_model, settings=SGLangConfig(deltas=True), tell=told.append)
    config = json.loads((hostile_model / "config.json").read_text())
    engine = SGLangEngine(fleet.start(), config, fleet=fleet, form=FORM)
    sent, offer = list[int](), WeightSender.offer
    monkeypatch.setattr(
        WeightSender, "offer", lambda sender, message: (sent.append(len(message.text)), offer(sender, message))[1]
    )
    generator, weights = torch.Generator().manual_seed(0), noisy(hostile_model, 1)
    engine.update_weights(weights.items(), 1)
    whole = sum(sent)
    for version in range(2, 52):
        sent.clear()
        for name, tensor in weights.items():
            if "q_proj" in name:  # all others are frozen
                noise, moves = (
                    torch.randn(tensor.shape, generator=generator),
                    torch.rand(tensor.shape, generator=generator) < 0.02,
                )
                tensor += 0.05 * noise * moves
        engine.update_weights(weights.items(), version)
        assert sum(sent) < whole / 20
    assert_computes_with(engine, weights, hostile_model)
    assert not engine.prove_weights()
    assert [line for line in told if NO_KEY not in line] == []
    by_deltas = fleet.last.checksums
    fleet.close()
    plain = Fleet(urls=[updated_server.url], source=hostile_model)
    plain.start()
    plain.update(weights.items(), 52, FORM)
    assert by_deltas == plain.last.checksums


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("plugins", "arguments"),
    [
        (None, ("--init-expert-location", '{"physical_to_logical_map": LAYERS}', "--ep-num-redundant-experts", "2")),
        ("another", ()),
    ],
    ids=["copied experts", "no plugin"],
)
def test_updates_reach_every_copy_of_an_expert_and_servers_without_the_plugin(
    plugins: str | None,
    arguments: tuple[str, ...],
    sglang_spec: ServerSpec,
    sglang_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """With copies of experts in other places, routes are ids of the model's experts. The wrong plugin is told once."""
    config = json.loads((sglang_model / "config.json").read_text())
    layers = str([[3, 1, 0, 2, 7, 5, 6, 4, 3, 0]] * config["num_hidden_layers"])
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    arguments = tuple(argument.replace("LAYERS", layers) for argument in arguments)
    told: list[str] = []
    with Server(replace(sglang_spec, log_file=tmp_path / "log", extra_args=arguments)) as server:
        server.wait_ready(START_DEADLINE_S)
        settings = SGLangConfig(deltas=True)
        fleet = Fleet(urls=[server.url], source=sglang_model, settings=settings, tell=told.append)
        engine = SGLangEngine(fleet.start(), config, fleet=fleet, form=FORM)
        for version in (1, 2):  # whole, and a delta
            weights = noisy(sglang_model, version)
            engine.update_weights(weights.items(), version)
            assert_computes_with(engine, weights, sglang_model)
        assert fleet.members[0].sender.takes_deltas == (plugins is None)
        lines = [line for line in told if NO_KEY not in line]
        assert ["gets whole updates in spite of sglang.deltas" in line for line in lines] == [True] * bool(plugins)
        engine.close()
