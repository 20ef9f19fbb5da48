"""The local engine against full uncached forwards of transformers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollout_oracle import Oracle, make_requests
from safetensors.torch import load_file
from transformers import AutoConfig

from megarl.core.fp8 import is_fp8_weight, round_through_fp8
from megarl.core.packing import check_kept
from megarl.core.types import Rollout, SampleRequest
from megarl.engines.local.decode import sampling_logprobs
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.errors import NumericsError, RolloutError, WeightSyncError
from megarl.routes.turns import join

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
    params = dataclasses.replace(PARAMS, temperature=temperature, top_p=top_p)
    rollouts = engine.generate(requests, params)
    for request, rollout in zip(requests, rollouts, strict=True):
        length = len(request.prompt_tokens)
        logprobs = sampling_logprobs(oracle.logits(rollout.tokens), temperature, top_p)
        expected = logprobs[:-1].gather(1, torch.tensor(rollout.tokens[1:, None]).long())[:, 0].numpy()
        np.testing.assert_allclose(rollout.rollout_logprobs[length:], expected[length - 1 :], atol=1e-5)
        assert rollout.routed_experts is not None
        assert np.array_equal(rollout.routed_experts, oracle.routes(rollout.tokens))  # the last token's row too
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.5), (0.7, 0.95), (1.3, 0.999), (1.0, 1e-6)])
def test_the_recorded_ids_are_the_nucleus_of_each_token(
    engine: LocalEngine, oracle: Oracle, temperature: float, top_p: float
) -> None:
    """Against probabilities of transformers in float64: the shortest prefix of the sorted ids that reaches top_p."""
    params = dataclasses.replace(PARAMS, temperature=temperature, top_p=top_p)
    requests = make_requests(12, lengths=(1, 12), copies=2)
    sizes = []
    for rollout in engine.generate(requests, dataclasses.replace(params, max_kept_ids=100_000)):
        check_kept(rollout)
        assert rollout.kept_counts is not None
        assert rollout.kept_ids is not None
        assert (rollout.kept_counts.dtype, rollout.kept_ids.dtype) == (np.int32, np.int32)
        assert not rollout.kept_counts[: rollout.prompt_length].any()
        sets = np.split(rollout.kept_ids, np.cumsum(rollout.kept_counts)[:-1])
        probabilities = (oracle.logits(rollout.tokens).double() / temperature).softmax(-1).numpy()
        for token in range(rollout.prompt_length, rollout.num_tokens):
            of_token = probabilities[token - 1]
            order = np.argsort(-of_token, kind="stable")
            size = int((of_token[order].cumsum() < top_p).sum()) + 1
            assert set(sets[token].tolist()) == set(order[:size].tolist())
            assert sets[token].tolist() == sorted(sets[token].tolist())
            expected = np.log(of_token[rollout.tokens[token]] / of_token[order[:size]].sum())
            assert rollout.rollout_logprobs[token] == pytest.approx(expected, abs=1e-5)
            if size == 1:
                assert rollout.rollout_logprobs[token] == 0.0
            sizes.append(size)
    assert (max(sizes) == 1) == (top_p == 1e-6)
    for rollout in engine.generate(requests, params):
        assert (rollout.kept_counts, rollout.kept_ids) == (None, None)


def test_the_ids_of_two_turns_are_joined(engine: LocalEngine) -> None:
    params = dataclasses.replace(PARAMS, top_p=0.8, max_kept_ids=1000)
    first = engine.generate(make_requests(6), params)
    prompts = [np.append(rollout.tokens, [3, 4]).astype(np.int32) for rollout in first]
    second = engine.generate(
        [SampleRequest(p, r.group, r.sample, 9) for p, r in zip(prompts, first, strict=True)], params
    )
    for earlier, later in zip(first, second, strict=True):
        whole = join(earlier, later)
        check_kept(whole)
        assert whole.kept_counts is not None
        assert ((whole.kept_counts > 0) == whole.loss_mask).all()
        assert whole.loss_mask.sum() == earlier.loss_mask.sum() + later.loss_mask.sum()


def test_more_ids_than_a_response_may_have_are_an_error(engine: LocalEngine) -> None:
    params = dataclasses.replace(PARAMS, top_p=0.9)
    found = engine.generate(make_requests(4), dataclasses.replace(params, max_kept_ids=10_000))
    most = max(len(rollout.kept_ids) for rollout in found if rollout.kept_ids is not None)
    engine.generate(make_requests(4), dataclasses.replace(params, max_kept_ids=most))
    with pytest.raises(
        RolloutError, match=rf"group \d sample 0: its first \d tokens were drawn from {most} ids in all, more"
    ):
        engine.generate(make_requests(4), dataclasses.replace(params, max_kept_ids=most - 1))


def test_columns_of_a_rollout(engine: LocalEngine) -> None:
    for request, rollout in zip(make_requests(9), engine.generate(make_requests(9), PARAMS), strict=True):
        length, total = len(request.prompt_tokens), rollout.num_tokens
        assert (rollout.group, rollout.sample) == (request.group, request.sample)
        assert np.array_equal(rollout.tokens[:length], request.prompt_tokens)
        assert rollout.tokens.dtype == np.int32
        assert rollout.loss_mask.tolist() == [False] * length + [True] * (total - length)
        assert rollout.prompt_length == length
        assert rollout.rollout_logprobs.dtype == np.float32
        assert not rollout.rollout_logprobs[:length].any()
        assert (rollout.rollout_logprobs[length:] < 0).all()
        assert rollout.routed_experts is not None
        assert rollout.routed_mask is not None
        assert rollout.routed_experts.shape == (total, 2, 2)
        assert rollout.routed_experts.dtype == np.uint8
        assert rollout.routed_mask.dtype == bool
        assert rollout.routed_mask.all()
        assert len(rollout.routed_mask) == total
        assert rollout.weight_versions.tolist() == [7] * total
        assert rollout.weight_versions.dtype == np.int32


def test_finish_reasons_and_lengths(engine: LocalEngine) -> None:
    assert engine.generate([], PARAMS) == []
    for rollout in engine.generate(make_requests(40), PARAMS):
        response = rollout.response_tokens.tolist()
        assert 1 <= len(response) <= 9
        assert not {1, 5} & set(response[:-1])  # nothing follows a stop token
        assert (rollout.finish_reason == "stop") == (response[-1] in (1, 5))
        assert rollout.finish_reason == "stop" or len(response) == 9
    for rollout in engine.generate(make_requests(5), SamplingParams(max_response_tokens=1)):
        assert len(rollout.response_tokens) == 1
        assert rollout.finish_reason == "length"


def test_response_depends_on_prompt_and_seed_only(engine: LocalEngine, model_path: Path) -> None:
    requests = make_requests(14, copies=2)
    together = engine.generate(requests, PARAMS)
    order = np.random.default_rng(1).permutation(len(requests))
    for i, rollout in zip(order, engine.generate([requests[i] for i in order], PARAMS), strict=True):
        assert_same(rollout, together[i])
    for request, rollout in zip(requests, together, strict=True):
        assert_same(engine.generate([request], PARAMS)[0], rollout)  # no padding, no neighbours
    for rollout, other in zip(
        LocalEngine.from_pretrained(model_path, max_batch_size=3).generate(requests, PARAMS), together, strict=True
    ):
        assert_same(rollout, other)
    for request, rollout in zip(requests, together, strict=True):
        other = engine.generate([dataclasses.replace(request, seed=request.seed + 500)], PARAMS)[0]
        if not np.array_equal(other.tokens, rollout.tokens):
            break
    else:
        pytest.fail("the seed changes nothing")


def test_routes_are_optional_and_change_nothing_else(engine: LocalEngine) -> None:
    requests = make_requests(10)
    without = engine.generate(requests, dataclasses.replace(PARAMS, return_routed_experts=False))
    for a, b in zip(without, engine.generate(requests, PARAMS), strict=True):
        assert a.routed_experts is None
        assert a.routed_mask is None
        assert_same(a, b)


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


def test_ends_where_the_positions_end(engine: LocalEngine) -> None:
    prompt = np.full(60, 3, dtype=np.int32)  # of 64 positions
    rollout = engine.generate([SampleRequest(prompt, 0, 0, 0)], SamplingParams(max_response_tokens=9))[0]
    assert rollout.num_tokens == 64
    assert rollout.finish_reason == "length"


def test_a_generator_of_requests_is_no_empty_list(engine: LocalEngine) -> None:
    requests: Any = (request for request in make_requests(2))
    with pytest.raises(TypeError, match="generator"):
        engine.generate(requests, PARAMS)


def shuffled(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights of the same names and shapes."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(w.shape, generator=generator) * 0.3 for name, w in weights.items()}


def test_update_changes_what_the_model_computes(model_path: Path, oracle: Oracle) -> None:
    engine = LocalEngine.from_pretrained(model_path, weight_version=3)
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
    engine = LocalEngine.from_pretrained(model_path)
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


def test_starts_without_weights(model_path: Path) -> None:
    engine = LocalEngine(AutoConfig.from_pretrained(model_path))
    assert engine.weight_version == -1
    with pytest.raises(WeightSyncError, match="no weights"):
        engine.generate(make_requests(1), PARAMS)
    engine.update_weights(load_file(model_path / "model.safetensors").items(), 0)
    assert len(engine.generate(make_requests(1), PARAMS)) == 1


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice", "shape", "nan", "integer", "source fails"])
def test_bad_update_is_named_and_blocks_until_a_whole_one_arrives(model_path: Path, fault: str) -> None:
    engine = LocalEngine.from_pretrained(model_path)
    weights = load_file(model_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    items = list(weights.items())
    changed = {
        "missing": [item for item in items if item[0] != name],
        "unknown": [("model.layers.2.mlp.experts.8.up_proj.weight", weights[name]), *items],
        "twice": [*items, (name, weights[name])],
        "shape": list({**weights, name: weights[name].T}.items()),
        "nan": list({**weights, name: weights[name] * math.nan}.items()),
        "integer": list({**weights, name: weights[name].to(torch.int8)}.items()),
        "source fails": [],
    }[fault]
    if fault == "source fails":

        def source():
            yield items[0]
            raise KeyError("trainer")

        with pytest.raises(KeyError):
            engine.update_weights(source(), 1)
    else:
        named = "experts.8.up_proj" if fault == "unknown" else name
        with pytest.raises(WeightSyncError, match=named.replace(".", r"\.")):
            engine.update_weights(changed, 1)
    with pytest.raises(WeightSyncError, match="update failed"):
        engine.generate(make_requests(1), PARAMS)
    engine.update_weights(weights.items(), 2)
    assert engine.generate(make_requests(1), PARAMS)[0].weight_versions[0] == 2


def test_fp8_rounding_rounds_exactly_the_linear_weights(model_path: Path) -> None:
    weights = load_file(model_path / "model.safetensors")
    engine = LocalEngine.from_pretrained(model_path, fp8_rounding=True)
    rounded = {name: round_through_fp8(w) if is_fp8_weight(name) else w for name, w in weights.items()}
    plain = LocalEngine.from_pretrained(model_path)
    plain.update_weights(rounded.items(), 0)
    requests = make_requests(6)
    for a, b in zip(engine.generate(requests, PARAMS), plain.generate(requests, PARAMS), strict=True):
        assert_same(a, b)
        assert np.array_equal(a.rollout_logprobs, b.rollout_logprobs)
    view = "model.layers.0.mlp.experts.3.gate_proj.weight"
    assert torch.equal(engine._views[view], rounded[view])
    assert not torch.equal(rounded[view], weights[view])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest(np.array([], dtype=np.int32), 4, 2, 0), "group 4 sample 2"),
        (SampleRequest(np.array([[3]], dtype=np.int32), 4, 2, 0), "group 4 sample 2"),
        (SampleRequest(np.array([3.0]), 4, 2, 0), "integers"),
        (SampleRequest(np.array([3, 32], dtype=np.int32), 4, 2, 0), r"0\.\.31"),
        (SampleRequest(np.array([-1], dtype=np.int32), 4, 2, 0), r"0\.\.31"),
        (SampleRequest(np.full(64, 3, dtype=np.int32), 4, 2, 0), "64 positions"),
        (SampleRequest(np.array([3], dtype=np.int32), 4, 2, -1), "seed"),
    ],
)
def test_bad_requests_are_refused(engine: LocalEngine, request_: SampleRequest, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        engine.generate([*make_requests(2), request_], PARAMS)


def test_bad_settings_are_refused(engine: LocalEngine, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="stop_token_ids"):
        engine.generate(make_requests(1), dataclasses.replace(PARAMS, stop_token_ids=(32,)))
    with pytest.raises(RolloutError, match="no checkpoint"):
        LocalEngine.from_pretrained(tmp_path)


def test_overflowing_weights_are_an_error_not_a_sample(model_path: Path) -> None:
    engine = LocalEngine.from_pretrained(model_path)
    weights = load_file(model_path / "model.safetensors")
    engine.update_weights({**weights, "lm_head.weight": torch.full((32, 32), 3e38)}.items(), 1)
    with pytest.raises(NumericsError, match="not finite"):
        engine.generate(make_requests(2), PARAMS)


def test_closed_engine_refuses(model_path: Path) -> None:
    engine = LocalEngine.from_pretrained(model_path)
    engine.close()
    engine.close()
    with pytest.raises(RolloutError, match="closed"):
        engine.generate(make_requests(1), PARAMS)
    with pytest.raises(RolloutError, match="closed"):
        engine.update_weights([], 1)
