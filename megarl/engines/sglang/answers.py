"""Checks the answers of SGLang servers against the request and the model, and turns them into rollouts.

An answer has the experts of every token that the server has processed, prompt included: base64 of raw int32 for every
layer, dense layers included. Servers with megarl's ``plugin`` send a short form without the dense layers. The last
generated token was never processed, and has no row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter

from megarl.core.types import FinishReason, Rollout, SampleRequest
from megarl.engines.protocol import SamplingParams, limit_response, too_many_kept
from megarl.errors import DataError, RolloutError
from megarl.files.foreign_json import check_types
from megarl.files.moe_shape import MoeShape
from megarl.routes.answers import longest_text, routes_from_sglang

_FINISH: Mapping[object, FinishReason] = {"stop": "stop", "length": "length"}
LEAST_LOGPROB = -45.0
"""No honest token is less likely: with 262,144 ids, tokens below this limit are drawn once in 1e14 draws."""
ROUNDING = 1e-6
"""Of a log-probability above 0, in float32."""
TOKEN_BYTES = 256
"""Bytes of an answer per token: ids, text and log-probability."""
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
    routed_experts: str | None = None


class _Answer(BaseModel):
    """The parts of a /generate answer that megarl reads."""

    output_ids: list[int]
    meta_info: _Meta
    prompt_token_ids: list[int] | None = None


_ANSWER, _LOGPROBS = TypeAdapter(_Answer), TypeAdapter(list[float | None])


def parse_answer(
    request: SampleRequest,
    answer: Any,
    version: int,
    shape: MoeShape | None,
    rid: str | None = None,
    params: SamplingParams | None = None,
    bounds: Bounds = Bounds(),
) -> Rollout:
    """Return the rollout in a ``/generate`` answer.

    version: of the last weight update; an answer names this or an earlier version. shape: None for a request without
    routes. rid: id of the request, which the answer must repeat; None: the request had no id. params: of the request;
    None leaves length, end and nucleus unchecked. RolloutError for an answer that is inconsistent, aborted or not
    SGLang's; TraceError for wrong routes.
    """
    label = request.label
    if isinstance(answer, Mapping) and not {"output_ids", "meta_info"} <= answer.keys():
        raise RolloutError(f"{label}: the server's answer has keys {sorted(answer)}, expected output_ids and meta_info")
    try:
        parsed = check_types(_ANSWER, answer, f"{label}: the server's answer")
        values = [entry[0] for entry in parsed.meta_info.output_token_logprobs or ()]
        logprobs = check_types(_LOGPROBS, values, f"{label}: output_token_logprobs of the server's answer")
    except DataError as error:
        raise RolloutError(str(error)) from error
    fault = next(_find_faults(request, parsed, version, rid, params, bounds), None)
    if fault is not None:
        raise RolloutError(f"{label}: {fault}")
    meta, output, num_prompt = parsed.meta_info, np.array(parsed.output_ids, np.int32), len(request.prompt_tokens)
    checked, nuclei = _require_logprobs(logprobs, label), None
    if params is not None and params.has_nucleus:
        checked, nuclei = _parse_nucleus(meta, output, bounds.vocabulary, label)
        if params.max_kept_ids is None:
            nuclei = None
        elif len(nuclei[1]) > params.max_kept_ids:
            raise too_many_kept(request, len(nuclei[1]), params.max_kept_ids, len(output))
    tokens = np.concatenate([request.prompt_tokens, output], dtype=np.int32)
    experts = mask = None
    if shape is not None:
        trace = routes_from_sglang(answer, shape, start=request.known_rows, tokens=tokens.tolist(), label=label)
        experts, mask = trace.experts, trace.row_mask
    return Rollout(
        group=request.group,
        sample=request.sample,
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= num_prompt,
        rollout_logprobs=np.pad(checked, (num_prompt, 0)),
        routed_experts=experts,
        routed_mask=mask,
        weight_versions=np.pad(_versions(meta, len(output)), (num_prompt, 0), constant_values=version),
        finish_reason=_FINISH[meta.finish_reason.type],
        kept_counts=None if nuclei is None else np.pad(nuclei[0], (num_prompt, 0)),
        kept_ids=None if nuclei is None else nuclei[1],
    )


def longest_answer(
    request: SampleRequest, *, shape: MoeShape | None, params: SamplingParams, most_drawn_from: int
) -> int:
    """Return the bytes of the longest honest answer to a request."""
    num_tokens = len(request.prompt_tokens) + params.max_response_tokens
    nuclei = 12 * most_drawn_from if params.has_nucleus else 0
    routes = 0 if shape is None else longest_text(num_tokens, shape)
    return (1 << 20) + (TOKEN_BYTES + nuclei) * num_tokens + routes


def _find_faults(
    request: SampleRequest,
    answer: _Answer,
    version: int,
    rid: str | None,
    params: SamplingParams | None,
    bounds: Bounds,
) -> Iterator[str]:
    """Yield contradictions to the request or the model."""
    meta, output, prompt = answer.meta_info, answer.output_ids, request.prompt_tokens.tolist()
    if rid is not None and meta.id != rid:
        yield f"the answer is to another request: its id is {meta.id!r}, expected {rid!r}"
    if rid is not None and answer.prompt_token_ids != prompt:
        yield "the answer is to another prompt than the one that was sent"
    if not output:
        yield "the server generated no token"
    if wrong := [token for token in output if not 0 <= token < bounds.vocabulary]:
        yield f"the answer has token {wrong[0]}, expected 0..{bounds.vocabulary - 1}, the model's vocabulary"
    for name, count, expected in (
        ("prompt_tokens", meta.prompt_tokens, len(prompt)),
        ("completion_tokens", meta.completion_tokens, len(output)),
    ):
        if count != expected:
            yield f"the server counts {name} = {count}, the tokens are {expected}"
    entries = meta.output_token_logprobs
    if entries is None or len(entries) != len(output):
        yield f"{entries and len(entries)} output_token_logprobs for {len(output)} tokens"
    elif [entry[1] for entry in entries] != output:
        yield "output_token_logprobs are of other tokens than output_ids"
    if (finish := meta.finish_reason).type not in _FINISH:
        yield f"the server finished with {finish.type} ({finish.matched}), expected stop or length"
    if params is not None:
        yield from _find_wrong_end(request, output, finish, params, bounds)
    versions = _versions(meta, len(output))
    if (unknown := (versions < 0) | (versions > version)).any():
        versions_named = (
            meta.weight_version if meta.weight_versions is None else [span.version for span in meta.weight_versions]
        )
        yield (
            f"weight versions {versions_named} are not those that megarl has set: expected one of 0..{version} for "
            f"response token {unknown.argmax()}"
        )


def _find_wrong_end(
    request: SampleRequest, output: Sequence[int], finish: _Finish, params: SamplingParams, bounds: Bounds
) -> Iterator[str]:
    """Yield contradictions to the limit, or to the end tokens."""
    limit = limit_response(request, params, bounds.positions - 1)
    stops = set(params.stop_token_ids)
    ends = stops | bounds.end_tokens if stops else stops  # without, the server ignores the model's own too
    size = len(output)
    if size > limit:
        yield f"the response has {size} tokens, expected at most {limit}"
    if stops.intersection(output[:-1]):
        yield f"the response goes on behind its end token, one of {sorted(stops)}"
    if finish.type == "stop" and (output[-1] not in ends or finish.matched not in (None, output[-1])):
        yield (
            f"the server says that the response stopped at {finish.matched!r}, its last token is {output[-1]}, "
            f"expected one of {sorted(ends)}"
        )
    fills_model = len(request.prompt_tokens) + size >= bounds.positions - ROOM_SLACK
    if finish.type == "length" and size < limit and (output[-1] in ends or not fills_model):
        yield (
            f"the server says that the response was cut by its limit: it has {size} tokens, expected {limit} (a server "
            "with less room needs more: --context-length, sglang.max_total_tokens, sglang.mem_fraction)"
        )


def _require_logprobs(values: Sequence[float | None], label: str) -> np.ndarray:
    """Return float32 [output]; RolloutError for a log-probability outside of the possible range."""
    logprobs = np.array([np.nan if value is None else value for value in values], np.float64)
    wrong = ~((logprobs >= LEAST_LOGPROB) & (logprobs <= ROUNDING))  # NaN is in no range
    if wrong.any():
        token = int(wrong.argmax())
        raise RolloutError(
            f"{label}: the log-probability of response token {token} is {logprobs[token]:.9g}, expected "
            f"{LEAST_LOGPROB:g} to 0"
        )
    return np.minimum(logprobs, 0.0).astype(np.float32)


def _parse_nucleus(
    meta: _Meta, output: np.ndarray, vocabulary: int, label: str
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return float32 [output], log-probabilities within the nucleus; sizes of the nuclei, and their ids, ascending."""
    sets, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if sets is None or logprobs is None or {len(sets), len(logprobs)} != {len(output)}:
        raise RolloutError(
            f"{label}: the answer does not say which ids each of {len(output)} tokens was drawn from, which top_p "
            "below 1 needs: take SGLang 0.5.20 or later, or set rollout.top_p = 1"
        )
    counts = np.fromiter(map(len, sets), np.int32)
    owner, ids = np.repeat(np.arange(len(output)), counts), np.fromiter(chain.from_iterable(sets), np.int32)
    if ids.max(initial=0) >= vocabulary:
        raise RolloutError(f"{label}: a token was drawn from id {ids.max()}, expected 0..{vocabulary - 1}")
    ids = ids[np.lexsort((ids, owner))]
    if (np.bincount(owner[ids == output[owner]], minlength=len(output)) != 1).any():
        raise RolloutError(f"{label}: a token is not among the ids that it was drawn from")
    if ((np.diff(ids) == 0) & (np.diff(owner) == 0)).any():
        raise RolloutError(f"{label}: an id is twice among those that a token was drawn from")
    return _require_logprobs(logprobs, label), (counts, ids)


def _versions(meta: _Meta, size: int) -> np.ndarray:
    """int32 [size], of each response token; -1 where the answer has no version, or no number.

    Newer servers name the version of each span of output tokens.
    """
    versions = np.full(size, -1, np.int32)
    whole = _Span(start=0, end=size, version="none" if meta.weight_version is None else meta.weight_version)
    for span in meta.weight_versions or [whole]:
        text = str(span.version)
        is_number = text.isascii() and text.isdecimal() and len(text) < 10
        if 0 <= span.start <= span.end <= size:
            versions[span.start : span.end] = int(text) if is_number else -1
    return versions
