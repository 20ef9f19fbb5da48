"""Keys of a sparse indexer: every rank gets those of its indexers, and attends to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engines import local_engine
from ranks import Case, case
from tiny_families import write_family
from tiny_world import MODELS, config, gather_sequences, micro_batches, own_share, pack_own, policy_of, rollouts

from megarl.core.packing import drop_routes
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.protocol import SamplingParams
from megarl.errors import RolloutError, TraceError
from megarl.megatron import distributed
from megarl.megatron.passes.forward import run
from megarl.megatron.rollout_routes import check_rollouts, deliver_keys
from megarl.stand_ins.sparse_attention import find_indexers

MODEL, KEYS = "glm_moe_dsa", "test_megatron_replayed_keys:logprobs"
"""Its layers 0 and 2 have an indexer; k is 3."""


def with_keys(made: Sequence[Rollout]) -> list[Rollout]:
    """Random keys, so that no indexer would select them; missing rows have those of no token."""
    rng, filled = np.random.default_rng(5), []
    for rollout in made:
        keys = rng.random((rollout.num_tokens, 2, rollout.num_tokens)) + 1
        visible = np.tri(rollout.num_tokens, dtype=bool)[:, None]
        order = np.where(visible, -keys, 1.0).argsort(-1)[..., :3].astype(np.int32)
        keys = np.where(order <= np.arange(rollout.num_tokens)[:, None, None], order, -1)
        keys[~rollout.routed_mask] = 99  # type: ignore[operator]
        filled.append(replace(rollout, indexer_topk=keys))
    return filled


def logprobs(layout: dict[str, Any], replays: bool = True) -> list[tuple[tuple[int, ...], list[float]]] | None:
    """By sequence, of all ranks; each rollout's keys are on one rank of the model copy."""
    settings = config(MODELS / MODEL, layout, train__replay="none")
    policy = policy_of(settings)
    made = rollouts(num_layers=3)
    micros = micro_batches(settings, pack_own(made))
    if replays:
        mine = with_keys(made)[own_share(len(made))]
        check_rollouts(mine, policy.shape, keys=True)
        copy = distributed.model_group()
        here = [index % copy.size() == copy.rank() for index in range(len(mine))]
        mine = [one if is_here else drop_routes(one) for one, is_here in zip(mine, here, strict=True)]
        micros = deliver_keys(mine, micros, find_indexers(policy.chunks), policy.shape)
    outputs = run(policy.chunks, micros, temperature=1.0, vocab_size=policy.shape.vocab_size)
    columns = [(micro.batch, output.logprobs) for micro, output in zip(micros, outputs, strict=False)]
    found = gather_sequences(columns)
    return None if found is None else [(key, value.tolist()) for key, value in sorted(found.items())]


@pytest.mark.multirank
@pytest.mark.parametrize("case", [case(2, KEYS, name) for name in ("cp2", "pp2", "tp2 ep2 etp1", "")], ids=str)
def test_every_layout_attends_to_the_keys_of_the_rollouts(case: Case, outcome: Any, in_model_folder: None) -> None:
    expected, native = logprobs({}), logprobs({}, replays=False)
    found = [np.concatenate([values for _, values in one]) for one in (outcome, expected, native)]  # type: ignore[union-attr]
    np.testing.assert_allclose(found[0], found[1], atol=2e-5)
    assert np.abs(found[1] - found[2]).max() > 1e-2


@pytest.mark.parametrize("family", ["deepseek_v32", MODEL])
def test_the_local_engine_returns_the_keys_of_a_full_forward(family: str, tmp_path: Path) -> None:
    """Enough heads that no two keys have one score; prompts of different lengths, so some are padded."""
    write_family(tmp_path, family, index_n_heads=64, pad_token_id=None)
    engine, rng = local_engine(tmp_path), np.random.default_rng(1)
    requests = [
        SampleRequest(rng.integers(2, 30, 1 + 3 * index, dtype=np.int32), index, 0, index) for index in range(5)
    ]
    params = SamplingParams(max_response_tokens=6, return_indexer_topk=True)
    model, selected = engine._model, []
    for module in [module for name, module in model.named_modules() if name.endswith("indexer")]:
        module.register_forward_hook(lambda _, __, output: selected.append(output[0]))
    for rollout in engine.generate(requests, params):
        selected.clear()
        with torch.no_grad():
            model(torch.from_numpy(rollout.tokens).long()[None], use_cache=False)
        assert rollout.indexer_topk is not None
        assert rollout.indexer_topk.shape == (rollout.num_tokens, len(selected), 3)
        for token, by_layer in enumerate(rollout.indexer_topk.tolist()):
            for keys, expected in zip(by_layer, (layer[token].tolist() for layer in selected), strict=True):
                assert set(keys) - {-1} == {key for key in expected if key <= token}


def test_a_model_without_an_indexer_refuses(models: dict[str, Path]) -> None:
    request = SampleRequest(np.array([3, 4], np.int32), 0, 0, 0)
    with pytest.raises(RolloutError, match="the model has no layers of indexer_topk"):
        local_engine(models["qwen3_moe"]).generate([request], SamplingParams(return_indexer_topk=True))


WRONG = {
    "are absent, expected": lambda keys: None,
    r"are \(\d+, 1, 3\), expected \(\d+, 2, 3\)": lambda keys: keys[:, :1],
    r"token 0: keys \[1, -1, -1\] of indexer 0, expected 1 different positions up to 0": lambda keys: (
        keys + (keys >= 0)
    ),
    r"token 0: keys \[-1, -1, -1\]": lambda keys: keys * 0 - 1,
    r"token 1: keys \[0, 0, -1\]": lambda keys: keys.clip(max=0),
    r"token 0: keys \[0, -2, -2\]": lambda keys: np.where(keys < 0, -2, keys),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_keys_are_named(text: str, models: dict[str, Path], one_rank: None) -> None:
    shape = policy_of(config(models[MODEL], train__replay="none")).shape
    first, *_ = with_keys(rollouts(num_layers=3))
    check_rollouts([first], shape, keys=True)
    with pytest.raises(TraceError, match=f"group 0 sample 0.*{text}"):
        check_rollouts([replace(first, indexer_topk=WRONG[text](first.indexer_topk))], shape, keys=True)
