"""The local engine against full uncached forwards of transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from local_engines import local_engine
from rollout_oracle import Oracle, make_requests
from safetensors.torch import load_file
from sglang_oracle import check_nuclei
from transformers import AutoConfig

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.decode import sampling_logprobs
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.errors import RolloutError, WeightSyncError

PARAMS = SamplingParams(max_response_tokens=9, stop_token_ids=(1, 5))
"""Two stop tokens, so that some responses end early and some at the limit."""


def assert_same(a: Rollout, b: Rollout) -> None:
    """Equal responses; log-probabilities up to the float noise of other batch shapes."""
    assert (a.group, a.sample, a.finish_reason) == (b.group, b.sample, b.finish_reason)
    assert np.array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.rollout_logprobs, b.rollout_logprobs, atol=1e-5)
    if a.routed_experts is not None and b.routed_experts is not None:
        assert np.array_equal(a.routed_experts, b.routed_experts)


@pytest.mark.parametrize("equal_lengths", [True, False])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_logprobs_and_routes_equal_a_full_forward(
    engine: LocalEngine, oracle: Oracle, temperature: float, top_p: float, equal_lengths: bool
) -> None:
    requests = make_requests(12, lengths=(6, 6) if equal_lengths else (1, 12), copies=2)
    params = replace(PARAMS, temperature=temperature, top_p=top_p)
    rollouts = engine.generate(requests, replace(params, return_gate_weights=True))
    assert all(rollout.gate_weights is None for rollout in engine.generate(requests[:2], params))
    for request, rollout in zip(requests, rollouts, strict=True):
        length = len(request.prompt_tokens)
        logprobs = sampling_logprobs(oracle.logits(rollout.tokens), temperature, top_p)
        expected = logprobs[:-1].gather(1, torch.tensor(rollout.tokens[1:, None]).long())[:, 0].numpy()
        np.testing.assert_allclose(rollout.rollout_logprobs[length:], expected[length - 1 :], atol=1e-5)
        assert np.array_equal(rollout.routed_experts, oracle.routes(rollout.tokens))  # the last token's row too
        np.testing.assert_allclose(rollout.gate_weights, oracle.gates(rollout.tokens), atol=1e-5)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.5), (1.3, 0.999), (1.0, 1e-6)])
def test_the_recorded_ids_are_the_nucleus_of_each_token(
    engine: LocalEngine, oracle: Oracle, temperature: float, top_p: float
) -> None:
    params = replace(PARAMS, temperature=temperature, top_p=top_p)
    requests = make_requests(12, lengths=(1, 12), copies=2)
    rollouts = engine.generate(requests, replace(params, max_kept_ids=100_000))
    sizes = check_nuclei(rollouts, oracle, params, close=1e-5)
    assert (max(sizes) == 1) == (top_p == 1e-6)
    (rollout,) = engine.generate(requests[:1], params)
    assert (rollout.kept_counts, rollout.kept_ids) == (None, None)
    found = max(len(rollout.kept_ids) for rollout in rollouts)
    engine.generate(requests, replace(params, max_kept_ids=found))
    with pytest.raises(RolloutError, match=rf"its first \d tokens were drawn from {found} ids in all, more"):
        engine.generate(requests, replace(params, max_kept_ids=found - 1))


def test_few_tokens_may_get_copies_of_their_experts(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, changes = make_requests(12, copies=2), []
    grouped = engine.generate(requests, PARAMS)
    change = engine._model.set_experts_implementation

    def change_and_note(name: str) -> None:
        changes.append(name)
        change(name)

    monkeypatch.setattr(engine._model, "set_experts_implementation", change_and_note)
    monkeypatch.setattr(engine, "_copied_rows", 24)  # fewer than the tokens of the prompts
    for _ in range(2):
        for expected, rollout in zip(grouped, engine.generate(requests, PARAMS), strict=True):
            assert_same(rollout, expected)
    assert changes == ["batched_mm", "grouped_mm", "batched_mm"]
    change("grouped_mm")


def test_columns_of_a_rollout(engine: LocalEngine) -> None:
    for request, rollout in zip(make_requests(9), engine.generate(make_requests(9), PARAMS), strict=True):
        length, total = len(request.prompt_tokens), rollout.num_tokens
        assert (rollout.group, rollout.sample, rollout.prompt_length) == (request.group, request.sample, length)
        assert np.array_equal(rollout.tokens[:length], request.prompt_tokens)
        assert rollout.loss_mask.tolist() == [False] * length + [True] * (total - length)
        assert not rollout.rollout_logprobs[:length].any()
        assert (rollout.rollout_logprobs[length:] < 0).all()
        assert rollout.routed_experts.shape == (total, 2, 2)
        assert rollout.routed_mask.tolist() == [True] * total
        assert rollout.weight_versions.tolist() == [7] * total
        columns = (rollout.tokens, rollout.rollout_logprobs, rollout.routed_experts, rollout.weight_versions)
        assert [column.dtype for column in columns] == [np.int32, np.float32, np.uint8, np.int32]


def test_finish_reasons_and_lengths(engine: LocalEngine) -> None:
    assert engine.generate([], PARAMS) == []
    for rollout in engine.generate(make_requests(40), PARAMS):
        response = rollout.response_tokens.tolist()
        assert 1 <= len(response) <= 9
        assert not {1, 5} & set(response[:-1])  # nothing follows a stop token
        assert (rollout.finish_reason == "stop") == (response[-1] in (1, 5))
        assert rollout.finish_reason == "stop" or len(response) == 9
    prompt = np.full(60, 3, dtype=np.int32)  # of 64 positions
    (rollout,) = engine.generate([SampleRequest(prompt, 0, 0, 0)], SamplingParams(max_response_tokens=9))
    assert (rollout.num_tokens, rollout.finish_reason) == (64, "length")


def test_response_depends_on_prompt_and_seed_only(engine: LocalEngine, model_path: Path) -> None:
    requests = make_requests(14, copies=2)
    together = engine.generate(requests, PARAMS)
    order = np.random.default_rng(1).permutation(len(requests))
    for i, rollout in zip(order, engine.generate([requests[i] for i in order], PARAMS), strict=True):
        assert_same(rollout, together[i])
    for request, rollout in zip(requests, together, strict=True):
        assert_same(engine.generate([request], PARAMS)[0], rollout)  # no padding, no neighbours
    for rollout, other in zip(
        local_engine(model_path, max_batch_size=3).generate(requests, PARAMS), together, strict=True
    ):
        assert_same(rollout, other)
    for request, rollout in zip(requests, together, strict=True):
        other = engine.generate([replace(request, seed=request.seed + 500)], PARAMS)[0]
        if not np.array_equal(other.tokens, rollout.tokens):
            break
    else:
        pytest.fail("the seed changes nothing")


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9)])
def test_samples_follow_the_distribution(engine: LocalEngine, oracle: Oracle, temperature: float, top_p: float) -> None:
    """Chi-square of the first two tokens together: sees a wrong distribution and noise that is used twice."""
    prompt = np.array([3, 9, 4], dtype=np.int32)
    num = 6000
    requests = [SampleRequest(prompt_tokens=prompt, group=0, sample=i, seed=i) for i in range(num)]
    params = SamplingParams(temperature, top_p, max_response_tokens=2, return_routed_experts=False)
    counts = np.zeros((32, 32))
    for rollout in engine.generate(requests, params):
        counts[tuple(rollout.response_tokens)] += 1
    first = sampling_logprobs(oracle.logits(prompt)[-1:], temperature, top_p)[0].double().exp().numpy()
    rows = [oracle.logits([*prompt, token])[-1] for token in range(32)]
    second = sampling_logprobs(torch.stack(rows), temperature, top_p).double().exp().numpy()
    expected = num * first[:, None] * second
    assert not counts[expected == 0].any()  # nothing outside of the nucleus
    rare = expected < 5
    found = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    assert freedom > 20
    chi_square = ((found - wanted) ** 2 / wanted).sum()
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


def test_greedy_takes_the_most_likely_token(engine: LocalEngine, oracle: Oracle) -> None:
    for rollout in engine.generate(make_requests(5), SamplingParams(temperature=0.0, max_response_tokens=5)):
        tokens = rollout.tokens.tolist()
        for t in range(rollout.prompt_length, len(tokens)):
            assert tokens[t] == oracle.logits(tokens[:t])[-1].argmax()
        assert not rollout.rollout_logprobs.any()  # a point mass


def shuffled(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of the same names and shapes."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(w.shape, generator=generator) * 0.3 for name, w in weights.items()}


def test_update_changes_what_the_model_computes(model_path: Path, oracle: Oracle) -> None:
    engine = local_engine(model_path, weight_version=3)
    requests = make_requests(8)
    weights = load_file(model_path / "model.safetensors")
    memory = {name: view.data_ptr() for name, view in engine._views.items()}
    before = engine.generate(requests, PARAMS)
    engine.update_weights(shuffled(weights).items(), version=4)
    assert engine.weight_version == 4
    changed = engine.generate(requests, PARAMS)
    assert all(not np.array_equal(a.rollout_logprobs, b.rollout_logprobs) for a, b in zip(before, changed, strict=True))
    assert all((rollout.weight_versions == 4).all() for rollout in changed)
    engine.update_weights(weights.items(), version=5)  # and back: nothing of the other weights is left in a cache
    for a, b in zip(before, engine.generate(requests, PARAMS), strict=True):
        assert_same(a, b)
    assert {name: view.data_ptr() for name, view in engine._views.items()} == memory


def test_every_single_tensor_reaches_the_logits(model_path: Path) -> None:
    """An expert that is written to the wrong place, or to a discarded buffer, shows here."""
    weights = load_file(model_path / "model.safetensors")
    engine = local_engine(model_path)
    ids = torch.randint(2, 32, (20, 40), generator=torch.Generator().manual_seed(0))  # reaches every expert

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return engine._model(ids, use_cache=False).logits

    base = logits()
    for name, weight in weights.items():
        engine.update_weights({**weights, name: weight * 1.5 + 0.1}.items(), 1)
        assert not torch.equal(logits(), base), name
    engine.update_weights(weights.items(), 1)
    assert torch.equal(logits(), base)


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice", "shape", "nan", "integer", "source fails"])
def test_bad_update_is_named_and_blocks_until_a_whole_one_arrives(model_path: Path, fault: str) -> None:
    engine = local_engine(model_path)
    weights = load_file(model_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    unknown = name.replace("experts.5", "experts.8")
    items = list(weights.items())

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield items[0]
        raise WeightSyncError(f"{name}: trainer")

    changed = {
        "missing": [item for item in items if item[0] != name],
        "unknown": [(unknown, weights[name]), *items],
        "twice": [*items, (name, weights[name])],
        "shape": (weights | {name: weights[name].T}).items(),
        "nan": (weights | {name: weights[name] * math.nan}).items(),
        "integer": (weights | {name: weights[name].to(torch.int8)}).items(),
        "source fails": source(),
    }[fault]
    with pytest.raises(WeightSyncError, match=re.escape(unknown if fault == "unknown" else name)):
        engine.update_weights(changed, 1)
    with pytest.raises(WeightSyncError, match="update failed"):
        engine.generate(make_requests(1), PARAMS)
    engine.update_weights(weights.items(), 2)
    assert engine.generate(make_requests(1), PARAMS)[0].weight_versions[0] == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest(np.array([], dtype=np.int32), 4, 2, 0), "group 4 sample 2"),
        (SampleRequest(np.array([3.0]), 4, 2, 0), "integers"),
        (SampleRequest(np.array([3, 32], dtype=np.int32), 4, 2, 0), r"0\.\.31"),
        (SampleRequest(np.full(64, 3, dtype=np.int32), 4, 2, 0), "64 positions"),
        (SampleRequest(np.array([3], dtype=np.int32), 4, 2, -1), "seed"),
    ],
)
def test_bad_requests_are_refused(engine: LocalEngine, request_: SampleRequest, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        engine.generate([*make_requests(2), request_], PARAMS)


def test_bad_settings_are_refused(engine: LocalEngine, model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="stop_token_ids"):
        engine.generate(make_requests(1), replace(PARAMS, stop_token_ids=(32,)))
    with pytest.raises(TypeError, match="generator"):
        engine.generate((request for request in make_requests(2)), PARAMS)  # no empty list
    fresh = LocalEngine(AutoConfig.from_pretrained(model_path))
    assert fresh.weight_version == -1
    with pytest.raises(WeightSyncError, match="no weights"):
        fresh.generate(make_requests(1), PARAMS)
    fresh.close()
    fresh.close()
    with pytest.raises(WeightSyncError, match="closed"):
        fresh.generate(make_requests(1), PARAMS)
