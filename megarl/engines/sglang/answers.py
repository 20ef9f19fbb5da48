"""Checks the answers of SGLang servers against the request and the model, and turns them into rollouts.

An answer has the experts of every token that the server has processed, prompt included: base64 of raw int32 for every
layer, dense layers included. Servers with megarl's ``plugin`` send a short form without the dense layers. The last
generated token was never processed, and has no row.

The answer to a request that was stopped (``/abort_request``) has the same fields for the tokens so far, except for a
request in the server's queue: without tokens and counts. A server that runs out of memory retracts requests: it drops
their keys and values, and reads prompt and tokens again later. Rows are then of the second reading, log-probabilities
of the first. The answer counts retractions (``num_retractions``) and does not say where they were.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter

from megarl.core.types import FinishReason, Rollout, SampleRequest
from megarl.engines.protocol import SamplingParams, limit_response, prompt_alone, too_many_kept
from megarl.errors import DataError, RolloutError, refusal, reworded
from megarl.files.foreign_json import check_types
from megarl.files.hf_config import MoeShape
from megarl.routes.answers import decode_keys, longest_text, routes_from_sglang

_FINISH: Mapping[object, FinishReason] = {"stop": "stop", "length": "length"}
LEAST_LOGPROB = -45.0
"""No honest token is less likely: with 262,144 ids, tokens below this limit are drawn once in 1e14 draws."""
ROUNDING = 1e-6
"""Of a log-probability above 0, in float32."""
TOKEN_BYTES = 256
"""Bytes of an answer per token: ids, text and log-probability."""
MOST_DRAWN_FROM = 4000
"""Most ids in a nucleus of the server: SGLang returns 4096 at most, ties included."""
ROOM_SLACK = 4
"""A server may cut a response this number of tokens before the model's positions end."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the model."""

    vocabulary: int = 1 << 31
    positions: int = 1 << 31
    """Of the model, for prompt and response."""
    end_tokens: frozenset[int] = frozenset()
    """The model's own end tokens, at which a server stops beside the request's."""
    indexers: tuple[int, ...] = ()
    """Layers with an indexer of sparse attention, 0-based."""
    indexer_topk: int = 0


_Id = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Finish(BaseModel):
    type: str
    matched: Any = None


class _Span(BaseModel):
    start: int
    end: int
    version: str | int


class _Meta(BaseModel):
    id: str | None = None
    finish_reason: _Finish
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    output_token_logprobs: list[Annotated[list[Any], Field(min_length=2)]] | None = None
    output_token_sampling_mask: list[list[_Id]] | None = None
    output_token_sampling_logprobs: list[float | None] | None = None
    weight_version: str | int | None = None
    weight_versions: list[_Span] | None = None
    num_retractions: Annotated[int, Field(ge=0)] | None = None
    routed_experts: str | None = None
    indexer_topk: str | None = None


class _Answer(BaseModel):
    """The parts of a /generate answer that megarl reads."""

    output_ids: list[int]
    meta_info: _Meta
    prompt_token_ids: list[int] | None = None


_ANSWER, _LOGPROBS = TypeAdapter(_Answer), TypeAdapter(list[float | None])


def parse_answer(
    request: SampleRequest, answer: Any, version: int, shape: MoeShape | None, rid: str, params: SamplingParams,
    bounds: Bounds, stopped: bool = False,
) -> Rollout:  # fmt: skip
    """Return the rollout in a ``/generate`` answer.

    version: of the last weight update. shape: None for a request without routes. rid: id of the request, which the
    answer must repeat. params: of the request. stopped: whether the server was asked to stop; the rollout of an aborted
    answer then ends with "pause", or as its last token says. RolloutError for an answer that is inconsistent, aborted
    without a stop, not SGLang's, or made with other weights; TraceError for wrong routes.
    """
    label = request.label
    with reworded(DataError, RolloutError):
        parsed = check_types(_ANSWER, answer, f"{label}: the server's answer")
        values = [entry[0] for entry in parsed.meta_info.output_token_logprobs or ()]
        logprobs = check_types(_LOGPROBS, values, f"{label}: output_token_logprobs of the server's answer")
    meta, aborted = parsed.meta_info, stopped and parsed.meta_info.finish_reason.type == "abort"
    if aborted and not parsed.output_ids:
        return prompt_alone(request, version)
    finish = _find_end(request, parsed, params, bounds) if aborted else _FINISH.get(meta.finish_reason.type)
    fault = next(_find_faults(request, parsed, version, rid, params, bounds), None)
    if fault is not None or finish is None:
        raise RolloutError(f"{label}: {fault or refusal('finish', finish=meta.finish_reason)}")
    output, num_prompt = np.array(parsed.output_ids, np.int32), len(request.prompt_tokens)
    checked = _require_logprobs(logprobs, label)
    tokens = np.concatenate([request.prompt_tokens, output], dtype=np.int32)
    columns: Any = {"tokens": tokens, "weight_versions": np.full(len(tokens), version, np.int32)}
    if params.has_nucleus:
        checked, counts, ids = _parse_nucleus(meta, output, bounds.vocabulary, label)
        if params.max_kept_ids is not None:
            if len(ids) > params.max_kept_ids:
                raise too_many_kept(request, len(ids), params.max_kept_ids, len(output))
            columns |= {"kept_counts": np.pad(counts, (num_prompt, 0)), "kept_ids": ids}
    if shape is not None:
        trace = routes_from_sglang(answer, shape, start=request.known_rows, tokens=tokens.tolist(), label=label)
        columns |= {"routed_experts": trace.experts, "routed_mask": trace.row_mask}
        if params.return_indexer_topk:
            shapes = (len(tokens) - 1, shape.num_layers, bounds.indexer_topk), bounds.indexers
            columns["indexer_topk"] = decode_keys(meta.indexer_topk, *shapes, label)
    if meta.num_retractions:
        # Every generated token but the last may have been read again: the server read all tokens before a retraction.
        columns["reread_mask"] = np.pad(np.ones(len(output) - 1, bool), (num_prompt, 1))
    columns |= {"loss_mask": np.arange(len(tokens)) >= num_prompt, "rollout_logprobs": np.pad(checked, (num_prompt, 0))}
    return replace(prompt_alone(request, version), finish_reason=finish, **columns)


def longest_answer(request: SampleRequest, shape: MoeShape | None, params: SamplingParams, bounds: Bounds) -> int:
    """Return the bytes of the longest honest answer to a request."""
    num_tokens = len(request.prompt_tokens) + params.max_response_tokens
    nuclei = 12 * MOST_DRAWN_FROM if params.has_nucleus else 0
    routes = 0 if shape is None else longest_text(num_tokens, shape)
    if shape is not None and params.return_indexer_topk:
        routes += 6 * num_tokens * shape.num_layers * bounds.indexer_topk  # base64 of 4 bytes, and room
    return (1 << 20) + (TOKEN_BYTES + nuclei) * num_tokens + routes


def _find_faults(
    request: SampleRequest, answer: _Answer, version: int, rid: str, params: SamplingParams, bounds: Bounds
) -> Iterator[str]:
    """Yield contradictions to the request, its limit and end tokens, the model, or the last weight update."""
    meta, output, prompt = answer.meta_info, answer.output_ids, request.prompt_tokens.tolist()
    if meta.id != rid or answer.prompt_token_ids != prompt:
        yield f"the answer is to another request or prompt: its id is {meta.id!r}, expected {rid!r}"
    if not output:
        yield "the server generated no token"
    if wrong := [token for token in output if not 0 <= token < bounds.vocabulary]:
        yield f"the answer has token {wrong[0]}, expected 0..{bounds.vocabulary - 1}, the model's vocabulary"
    counted, size = (meta.prompt_tokens, meta.completion_tokens), len(output)
    if counted != (len(prompt), size):
        yield f"the server counts {counted} tokens of prompt and response, expected {(len(prompt), size)}"
    if [entry[1] for entry in meta.output_token_logprobs or ()] != output:
        yield "output_token_logprobs are of other tokens than output_ids"
    limit = limit_response(request, params, bounds.positions - 1)
    stops, ends, finish = set(params.stop_token_ids), _find_ends(params, bounds), meta.finish_reason
    if size > limit:
        yield f"the response has {size} tokens, expected at most {limit}"
    if stops.intersection(output[:-1]):
        yield f"the response goes on behind its end token, one of {sorted(stops)}"
    if finish.type == "stop" and (output[-1] not in ends or finish.matched not in (None, output[-1])):
        yield f"it stopped at {finish.matched!r}, its last token is {output[-1]}, expected one of {sorted(ends)}"
    fills_model = len(prompt) + size >= bounds.positions - ROOM_SLACK
    if finish.type == "length" and size < limit and (output[-1] in ends or not fills_model):
        yield refusal("response_cut", size=size, limit=limit)
    # Newer servers name the version of each span of output tokens.
    spans = meta.weight_versions or [_Span(start=0, end=size, version=str(meta.weight_version))]
    starts, ends_of_spans = [span.start for span in spans], [span.end for span in spans]
    if {str(span.version) for span in spans} != {str(version)} or [*starts, size] != [0, *ends_of_spans]:
        yield refusal("versions_of_spans", found=[*map(str, spans)], version=version, size=size)


def _find_ends(params: SamplingParams, bounds: Bounds) -> set[int]:
    """Return the tokens that end a response; without stop tokens the server ignores the model's own, too."""
    return set(params.stop_token_ids) | bounds.end_tokens if params.stop_token_ids else set()


def _find_end(request: SampleRequest, answer: _Answer, params: SamplingParams, bounds: Bounds) -> FinishReason:
    """Return how a stopped response ends: a server adds a token to it, which may be its last."""
    if answer.output_ids[-1] in _find_ends(params, bounds):
        return "stop"
    return "length" if len(answer.output_ids) == limit_response(request, params, bounds.positions - 1) else "pause"


def _require_logprobs(values: Sequence[float | None], label: str) -> np.ndarray:
    """Return float32 [output]; RolloutError for a log-probability outside of the possible range."""
    logprobs = np.array([np.nan if value is None else value for value in values], np.float64)
    wrong = ~((logprobs >= LEAST_LOGPROB) & (logprobs <= ROUNDING))  # NaN is in no range
    if wrong.any():
        facts = {"token": (token := int(wrong.argmax())), "value": logprobs[token], "least": LEAST_LOGPROB}
        raise RolloutError(refusal("sampled_logprob", label=label, **facts))
    return np.minimum(logprobs, 0.0).astype(np.float32)


def _parse_nucleus(meta: _Meta, output: np.ndarray, vocabulary: int, label: str) -> tuple[np.ndarray, ...]:
    """Return float32 [output], log-probabilities within the nucleus; sizes of the nuclei; their ids, ascending."""
    sets, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if sets is None or logprobs is None or {len(sets), len(logprobs)} != {len(output)}:
        raise RolloutError(refusal("answer_without_sets", label=label, num=len(output)))
    counts = np.fromiter(map(len, sets), np.int32)
    owner, ids = np.repeat(np.arange(len(output)), counts), np.fromiter(chain.from_iterable(sets), np.int32)
    if ids.max(initial=0) >= vocabulary:
        raise RolloutError(f"{label}: a token was drawn from id {ids.max()}, expected 0..{vocabulary - 1}")
    ids = ids[np.lexsort((ids, owner))]
    if (np.bincount(owner[ids == output[owner]], minlength=len(output)) != 1).any():
        raise RolloutError(f"{label}: a token is not among the ids that it was drawn from")
    if ((np.diff(ids) == 0) & (np.diff(owner) == 0)).any():
        raise RolloutError(f"{label}: an id is twice among those that a token was drawn from")
    return _require_logprobs(logprobs, label), counts, ids
