"""Answers of an SGLang server become rollouts, or errors that say what is wrong with them."""

from __future__ import annotations

import base64
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import DeepseekV3Config, Glm4MoeConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from megarl.core.types import Rollout, SampleRequest
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.answers import Bounds, longest_answer, parse_answer
from megarl.errors import ConfigError, RolloutError, TraceError
from megarl.files.hf_config import MoeShape
from megarl.routes import encode
from megarl.routes.answers import read_routes

SHAPE = MoeShape(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, topk=2)
REQUEST = SampleRequest(np.array([5, 6, 7], np.int32), group=4, sample=1, seed=0)
OUTPUT = [9, 8]


def routes(rows: int, seed: int = 0) -> np.ndarray:
    """int32 [rows, all 4 layers, 2], zeros in the dense layer."""
    found = np.random.default_rng(seed).random((rows, 4, 8)).argsort(2)[..., :2].astype("<i4")
    found[:, 0] = 0
    return found


def encoded(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def answer(**changes: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": "a",
        "finish_reason": {"type": "stop", "matched": 8},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, 9, None], [-1.25, 8, None]],
        "routed_experts": encoded(routes(4)),
    }
    meta = {k: v for k, v in (meta | changes).items() if v != "absent"}
    return {"output_ids": OUTPUT, "prompt_token_ids": [5, 6, 7], "meta_info": meta}


ANY = Bounds()
ENDED = SamplingParams(max_response_tokens=4, stop_token_ids=(8,))


def parse(
    answer: Any,
    request: SampleRequest = REQUEST,
    shape: MoeShape | None = SHAPE,
    params: SamplingParams = ENDED,
    bounds: Bounds = ANY,
) -> Rollout:
    return parse_answer(request, answer, 7, shape, "a", params, bounds)


def test_an_answer_becomes_a_rollout() -> None:
    found = parse(answer())
    assert (found.group, found.sample, found.finish_reason) == (4, 1, "stop")
    assert found.tokens.tolist() == [5, 6, 7, 9, 8]
    assert found.loss_mask.tolist() == [False, False, False, True, True]
    assert found.rollout_logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -1.25]
    assert found.weight_versions.tolist() == [7] * 5
    assert found.routed_mask.tolist() == [True] * 4 + [False]
    assert found.routed_experts.dtype == np.uint8
    assert np.array_equal(found.routed_experts[:4], routes(4)[:, 1:])
    without = parse(answer(routed_experts="absent"), shape=None)
    assert (without.routed_experts, without.routed_mask) == (None, None)


KEYED = replace(ENDED, return_indexer_topk=True)


def keys_of(rows: int, width: int = 3) -> np.ndarray:
    """int32 [rows, 4 layers, k]: the first positions, then -1, as SGLang fills a row."""
    slots = np.arange(width, dtype="<i4")
    keys = np.where(slots <= np.arange(rows)[:, None], slots, -1)[:, None]
    return np.where(np.arange(4)[:, None] == 1, np.minimum(keys, 0), keys).astype("<i4")


def test_keys_of_the_indexers_are_those_of_their_layers() -> None:
    sent, bounds = keys_of(4), Bounds(indexers=(0, 2), indexer_topk=3)
    found = parse(answer(indexer_topk=encoded(sent)), params=KEYED, bounds=bounds).indexer_topk
    assert (found.dtype, found.shape) == (np.int32, (5, 2, 3))
    assert np.array_equal(found[:4], sent[:, [0, 2]])
    assert (found[4] == -1).all()
    assert parse(answer(indexer_topk=encoded(sent))).indexer_topk is None
    most = [longest_answer(REQUEST, SHAPE, params, bounds) for params in (ENDED, KEYED)]
    assert most[1] - most[0] >= len(encoded(keys_of(len(REQUEST.prompt_tokens) + 4)))
    for wrong, text in (
        ("absent", r"indexer_topk of 0 bytes, expected int32 \[4, 4, 3\]: start SGLang .*--enable-return-indexer-topk"),
        (encoded(keys_of(3)), "indexer_topk of 144 bytes"),
        ("%%%", "indexer_topk are no base64"),
        (encoded(sent + 700), "indexer_topk has keys behind their token: start SGLang with SGLANG_DSA_FUSE_TOPK=0"),
    ):
        with pytest.raises(TraceError, match=f"group 4 sample 1: {text}"):
            parse(answer(indexer_topk=wrong), params=KEYED, bounds=bounds)


def test_a_known_prefix_has_no_rows() -> None:
    """Whether the server leaves it out or, as before 0.5.12, sends everything."""
    for sent in (routes(4)[2:], routes(4)):
        found = parse(answer(routed_experts=encoded(sent)), replace(REQUEST, known_rows=2))
        assert found.routed_mask.tolist() == [False, False, True, True, False]
        assert np.array_equal(found.routed_experts[2:4], routes(4)[2:, 1:])
    with pytest.raises(TraceError, match="3 rows, expected 2 rows of 4 layers with top-2"):
        parse(answer(routed_experts=encoded(routes(3))), replace(REQUEST, known_rows=2))


def test_the_answer_to_another_request_is_an_error() -> None:
    for wrong, named in (
        (answer(id="b"), "'b'"),
        (answer(id="absent"), "None"),
        (answer() | {"prompt_token_ids": None}, "'a'"),
        (answer() | {"prompt_token_ids": [5, 6, 8]}, "'a'"),
    ):
        told = f"group 4 sample 1: the answer is to another request or prompt: its id is {named}, expected 'a'"
        with pytest.raises(RolloutError, match=told):
            parse(wrong)


NUCLEUS = SamplingParams(top_p=0.9, max_kept_ids=4, stop_token_ids=(8,))
SETS = {"output_token_sampling_mask": [[9, 3], [8]], "output_token_sampling_logprobs": [-0.25, 0.0]}


def test_log_probabilities_below_top_p_are_within_the_ids_that_were_drawn_from() -> None:
    found = parse(answer(**SETS), params=NUCLEUS)
    assert found.rollout_logprobs.tolist() == [0.0, 0.0, 0.0, -0.25, 0.0]
    assert (found.kept_counts.tolist(), found.kept_ids.tolist()) == ([0, 0, 0, 2, 1], [3, 9, 8])
    assert (found.kept_counts.dtype, found.kept_ids.dtype) == (np.int32, np.int32)
    bare = parse(answer(**SETS), params=replace(NUCLEUS, max_kept_ids=None))
    assert bare.kept_ids is None
    assert np.array_equal(bare.rollout_logprobs, found.rollout_logprobs)
    with pytest.raises(RolloutError, match="its first 2 tokens were drawn from 3 ids in all, more than the 2"):
        parse(answer(**SETS), params=replace(NUCLEUS, max_kept_ids=2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"output_token_sampling_mask": "absent"}, "which ids each of 2 tokens was drawn from, .* 0.5.20 or later"),
        ({"output_token_sampling_logprobs": [-0.25]}, "which ids each of 2 tokens"),
        ({"output_token_sampling_mask": [[3], [8]]}, "a token is not among the ids that it was drawn from"),
        ({"output_token_sampling_mask": [[3, 9, 3], [8]]}, "an id is twice among those"),
        *(
            ({"output_token_sampling_mask": [[9, 3], [odd, 8]]}, "cannot be read")
            for odd in (None, 3.0, "3", -1, 1 << 70)
        ),
        ({"output_token_sampling_mask": [[9, 3], [8, 40]]}, "drawn from id 40, expected 0..39"),
        ({"output_token_sampling_logprobs": [0.25, 0.0]}, "log-probability of response token 0 is 0.25"),
        ({"output_token_sampling_logprobs": [-0.25, None]}, "log-probability of response token 1 is nan"),
    ],
)
def test_sets_that_do_not_fit_the_tokens_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(RolloutError, match=f"group 4 sample 1: .*{told}"):
        parse(answer(**SETS | change), params=NUCLEUS, bounds=Bounds(vocabulary=40))


def test_the_version_of_the_update_is_that_of_every_token() -> None:
    spans = [{"version": 7, "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]
    for named in ({"weight_versions": spans}, {"weight_version": 7}, {"weight_version": "7"}):
        assert parse(answer(**named)).weight_versions.tolist() == [7] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": {"type": "abort", "message": "x"}}, "finished with .*abort"),
        ({"prompt_tokens": 4}, r"counts \(4, 2\) tokens of prompt and response, expected \(3, 2\)"),
        ({"completion_tokens": 1}, r"counts \(3, 1\) tokens"),
        ({"output_token_logprobs": [[-0.5, 9, None]]}, "other tokens than output_ids"),
        ({"output_token_logprobs": [[-0.5, 9, None], [-1.0, 9, None]]}, "other tokens than output_ids"),
        ({"output_token_logprobs": [[-0.5, 9, None], [None, 8, None]]}, "response token 1 is nan"),
        *(
            ({"weight_version": named}, "made with weight versions .* expected 7 for all 2 tokens")
            for named in ("default", "absent", None, "6", "8", -1, "7.0", "\u0667")
        ),
        *(
            ({"weight_versions": [{"version": named, "start": start, "end": end}]}, "expected 7 for all 2 tokens")
            for named, start, end in (("7", 0, 1), ("7", 1, 2), ("7", -1, 2), ("7", 0, 3), ("6", 0, 2))
        ),
        ({"output_token_logprobs": [[-0.5, 9, None], [-50.0, 8, None]]}, "token 1 is -50, expected -45 to 0"),
        ({"output_ids": []}, "generated no token"),
        ({"output_ids": [10, 8]}, "has token 10, expected 0..9, the model's vocabulary"),
        ({"output_ids": [-1, 8]}, "has token -1, expected 0..9"),
        ({"output_token_logprobs": [[2e-6, 9, None], [-1.0, 8, None]]}, "token 0 is 2e-06"),
    ],
)
def test_answers_that_contradict_themselves_are_errors(changes: dict[str, Any], message: str) -> None:
    ids = changes.pop("output_ids", OUTPUT)
    logprobs = {} if ids is OUTPUT else {"output_token_logprobs": [[-0.5, token, None] for token in ids]}
    wrong = answer(**logprobs | changes) | {"output_ids": ids}
    with pytest.raises(RolloutError, match=f"group 4 sample 1: .*{message}"):
        parse(wrong, bounds=Bounds(vocabulary=10))


@pytest.mark.parametrize(
    "damaged",
    [
        [answer()],
        {"error": "x"},
        answer() | {"output_ids": None},
        *(answer() | {"output_ids": [odd, 8]} for odd in (9.0, True, "9")),
        answer() | {"prompt_token_ids": "567"},
        answer(output_token_logprobs=[[-0.5], [-1.25]]),
        answer(output_token_logprobs=[[False, 9], [-1.25, 8]]),
        answer(finish_reason={"type": ["stop"]}),
        answer(id=["a"]),
        answer(prompt_tokens=3.0),
        answer(completion_tokens="2"),
        answer(weight_versions=[["7", 0, 2]]),
        answer(weight_versions=[{"version": "7", "start": 0.0, "end": 2}]),
        answer(routed_experts=[1, 2]),
    ],
)
def test_an_answer_of_other_types_is_an_error_that_may_pass(damaged: Any) -> None:
    """And does not end the run with whatever Python says of it."""
    with pytest.raises(RolloutError, match=r"group 4 sample 1: .*cannot be read") as caught:
        parse(damaged)
    assert "\n" not in str(caught.value)


def of_tokens(tokens: list[int], kind: str, matched: Any = None) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": kind, "matched": matched},
        "completion_tokens": len(tokens),
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
    }
    return answer(**meta) | {"output_ids": tokens}


OWN = Bounds(vocabulary=10, end_tokens=frozenset({7}))


@pytest.mark.parametrize(
    ("tokens", "kind", "matched", "params", "bounds", "told"),
    [
        ([9, 8], "stop", 8, ENDED, OWN, None),
        ([9, 9, 9, 8], "length", None, ENDED, OWN, None),  # releases differ in which they look at first
        ([9, 9, 9, 9], "length", None, ENDED, OWN, None),
        ([9, 7], "stop", 7, ENDED, OWN, None),  # the model's own end
        ([9, 9], "length", None, ENDED, OWN, "cut by its limit: it has 2 tokens, expected 4"),
        ([8, 8, 8, 8], "length", None, replace(ENDED, stop_token_ids=()), OWN, None),
        ([9] * 5, "length", None, ENDED, OWN, "5 tokens, expected at most 4"),
        ([9, 9], "stop", 8, ENDED, OWN, "its last token is 9, expected one of .7, 8."),
        ([9, 8], "stop", 7, ENDED, OWN, "stopped at 7, its last token is 8"),
        ([8, 9, 8], "stop", 8, ENDED, OWN, "goes on behind its end token"),
        ([8, 9, 9, 9], "length", None, ENDED, OWN, "goes on behind its end token"),
        ([9, 8], "stop", 8, replace(ENDED, stop_token_ids=()), OWN, "expected one of ..$"),
    ],
)
def test_the_end_of_a_response_is_that_which_was_asked_for(
    tokens: list[int], kind: str, matched: Any, params: SamplingParams, bounds: Bounds, told: str | None
) -> None:
    with nullcontext() if told is None else pytest.raises(RolloutError, match=f"group 4 sample 1: .*{told}"):
        found = parse(of_tokens(tokens, kind, matched), shape=None, params=params, bounds=bounds)
        assert (found.finish_reason, found.response_tokens.tolist()) == (kind, tokens)


def test_the_limit_of_the_request_and_of_the_positions_counts() -> None:
    for request, bounds in ((replace(REQUEST, max_response_tokens=2), OWN), (REQUEST, replace(OWN, positions=6))):
        parse(of_tokens([9, 9], "length"), request, None, bounds=bounds)
        with pytest.raises(RolloutError, match="3 tokens, expected at most 2"):
            parse(of_tokens([9, 9, 9], "length"), request, None, bounds=bounds)


def test_routes_that_are_absent_or_wrong_are_errors() -> None:
    def told(text: Any) -> str:
        with pytest.raises(TraceError, match="group 4 sample 1") as caught:
            parse(answer(routed_experts=text))
        return str(caught.value)

    assert "--enable-return-routed-experts" in told("absent")
    whole = encoded(routes(4))
    assert "cut short" in told(whole[:-3])
    assert "no whole number of rows of 4 layers with top-2" in told(whole[:-8])
    assert "5 rows, expected 4 rows of 4 layers with top-2" in told(encoded(routes(5)))
    dense = routes(4)
    dense[2, 0] = (1, 2)
    assert "dense layer 0 has routes" in told(encoded(dense))
    twice = routes(4)
    twice[1, 2] = 5
    assert "row 1, layer 1: experts [5, 5]" in told(encoded(twice))
    large = routes(4)
    large[3, 3, 0] = 8
    assert "expert id 8, expected at most 7. Either the server runs another model, or" in told(encoded(large))
    assert "characters, expected at most" in told("A" * (1 << 20))


def test_a_row_of_minus_one_is_missing() -> None:
    """Also in its dense layers, and in the short form of the plugin."""
    given = routes(4)
    for missing in (given.copy(), given.copy()):
        missing[1:3, 1:] = -1
        given[1:3, 0] = -1  # of the second round
        for text in (encoded(missing), base64.b64encode(encode(read_routes(missing.tobytes(), SHAPE))).decode()):
            found = parse(answer(routed_experts=text))
            assert found.routed_mask.tolist() == [True, False, False, True, False]
            assert np.array_equal(np.sort(found.routed_experts[[0, 3]]), np.sort(routes(4)[[0, 3], 1:]))
            assert not found.routed_experts[1:3].any()
    half = routes(4)
    half[1, 2] = -1
    with pytest.raises(TraceError, match=r"row 1, layer 1: experts \[-1, -1\]"):
        parse(answer(routed_experts=encoded(half)))


def test_shapes_of_model_families() -> None:
    layers, few = {"num_hidden_layers": 4}, {"num_experts": 16, "num_experts_per_tok": 4}
    routed = {"n_routed_experts": 8, "num_experts_per_tok": 2}
    for config, expected in (
        (Qwen3MoeConfig(**layers, mlp_only_layers=[1], **few), ((0, 2, 3), 16, 4)),
        (Qwen2MoeConfig(**layers, decoder_sparse_step=2, **few), ((1, 3), 16, 4)),
        (MixtralConfig(**layers, num_local_experts=8, num_experts_per_tok=2), ((0, 1, 2, 3), 8, 2)),
        (OlmoeConfig(**layers, num_experts=64, num_experts_per_tok=8), ((0, 1, 2, 3), 64, 8)),
        (DeepseekV3Config(**layers, first_k_dense_replace=3, **routed), ((3,), 8, 2)),
        (Glm4MoeConfig(**layers, first_k_dense_replace=1, **routed), ((1, 2, 3), 8, 2)),
    ):
        found = MoeShape.of(config.to_dict())
        assert (found.moe_layers, found.num_experts, found.topk, found.num_layers) == (*expected, 4)
    assert MoeShape.of({"model_type": "llama", "num_hidden_layers": 2}) == MoeShape(2, (), 0, 0)
    with pytest.raises(ConfigError, match="'gpt2' is not known"):
        MoeShape.of({"model_type": "gpt2", "num_hidden_layers": 2})
