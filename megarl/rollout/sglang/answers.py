"""Turns the answers of SGLang servers into rollouts, and checks them first.

An answer has the experts of every token that the server has processed, prompt included: base64 of raw int32 for every
layer, dense layers included. Servers with megarl's ``plugin`` send a short form without the dense layers. The last
generated token was never processed, so it has no row.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from megarl.core.types import FinishReason, Rollout, SampleRequest
from megarl.errors import RolloutError, TraceError
from megarl.models.routes import decode_routes
from megarl.models.shapes import MoeShape
from megarl.rollout.engine import SamplingParams, make_rollout, too_many_kept
from megarl.rollout.sglang.plugin.compact import SEAL, seal

_FINISH: Mapping[object, FinishReason] = {"stop": "stop", "length": "length"}


def parse_answer(
    request: SampleRequest,
    answer: Any,
    version: int,
    shape: MoeShape | None,
    rid: str | None = None,
    params: SamplingParams | None = None,
) -> Rollout:
    """Returns the rollout that a ``/generate`` answer describes.

    version: of the weights, if the answer names none. shape: None if no routes were asked for. rid: the id that the
    request carried, which its answer must repeat; None if it had none. params: whether there is a nucleus, and whether
    the rollout carries its ids; None if there is none.
    Raises RolloutError for an answer that is inconsistent, aborted or not SGLang's, TraceError for wrong routes.
    """
    label = request.label
    try:
        if rid is not None and (found := answer["meta_info"].get("id")) != rid:
            raise RolloutError(f"{label}: the answer is to another request: its id is {found!r}, expected {rid!r}")
        # From 0.5.13 on, without megarl's plugin, answers repeat the prompt.
        if rid is not None and answer.get("prompt_token_ids") not in (None, request.prompt_tokens.tolist()):
            raise RolloutError(f"{label}: the answer is to another prompt than the one that was sent")
        rollout = _parse(request, answer, version, shape, params, label)
        if rid is not None and is_sealed(answer):  # last: the other checks say what is wrong
            _require_seal(request, answer, label)
        return rollout
    except (RolloutError, TraceError):
        raise
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:  # the JSON may hold anything
        raise RolloutError(f"{label}: the server's answer cannot be read ({type(error).__name__}: {error})") from error


def is_sealed(answer: Mapping[str, Any]) -> bool:
    """Whether a server with megarl's plugin has sealed an answer."""
    return SEAL in answer["meta_info"]


def _require_seal(request: SampleRequest, answer: Mapping[str, Any], label: str) -> None:
    """Raises RolloutError for parts of several answers."""
    if answer["meta_info"][SEAL] != seal(request.prompt_tokens.tolist(), answer):
        raise RolloutError(
            f"{label}: the answer does not fit its seal: prompt, tokens, log-probabilities, weight versions or routes "
            "are not those of one answer to this request"
        )


def _parse(
    request: SampleRequest,
    answer: Mapping[str, Any],
    version: int,
    shape: MoeShape | None,
    params: SamplingParams | None,
    label: str,
) -> Rollout:
    meta = answer.get("meta_info")
    if not isinstance(meta, Mapping) or "output_ids" not in answer:
        raise RolloutError(f"{label}: the server's answer has keys {sorted(answer)}, expected output_ids and meta_info")
    output = np.asarray(answer["output_ids"], np.int32)
    num_prompt, num_tokens = len(request.prompt_tokens), len(request.prompt_tokens) + len(output)
    if not len(output):
        raise RolloutError(f"{label}: the server generated no token")
    for name, expected in (("prompt_tokens", num_prompt), ("completion_tokens", len(output))):
        if meta.get(name) != expected:
            raise RolloutError(f"{label}: the server counts {name} = {meta.get(name)}, the tokens are {expected}")
    logprobs, kept = _parse_logprobs(meta, output, label), None
    if params is not None and params.has_nucleus:
        logprobs, kept = _parse_nucleus(meta, output, label)
        if params.max_kept_ids is None:
            kept = None
        elif len(kept[1]) > params.max_kept_ids:
            raise too_many_kept(request, len(kept[1]), params.max_kept_ids, len(output))
    versions = _parse_versions(meta, num_prompt, len(output), version, label)
    experts = mask = None
    if shape is not None:
        experts, mask = _parse_routes(meta, num_tokens, request.known_rows, shape, label)
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind not in _FINISH:
        raise RolloutError(f"{label}: the server finished with {reason}, expected stop or length")
    return make_rollout(request, output, logprobs, experts, mask, versions, _FINISH[kind], kept)


def _parse_logprobs(meta: Mapping[str, Any], output: np.ndarray, label: str) -> np.ndarray:
    """Returns float32 [output], log-probabilities under the distribution over the whole vocabulary."""
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(output):
        found = len(entries) if isinstance(entries, list) else entries
        raise RolloutError(f"{label}: {found} output_token_logprobs for {len(output)} tokens")
    if [entry[1] for entry in entries] != output.tolist():
        raise RolloutError(f"{label}: output_token_logprobs are of other tokens than output_ids")
    return _require_logprobs([entry[0] for entry in entries], label)


def _require_logprobs(values: Sequence[float | None], label: str) -> np.ndarray:
    found = np.array([np.nan if value is None else value for value in values], np.float32)
    wrong = ~(np.isfinite(found) & (found <= 1e-6))
    if wrong.any():
        token = int(wrong.argmax())
        raise RolloutError(f"{label}: the log-probability of response token {token} is {found[token]}")
    return np.minimum(found, 0.0)


def _parse_nucleus(
    meta: Mapping[str, Any], output: np.ndarray, label: str
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Returns float32 [output], log-probabilities within the ids that each token was drawn from; how many these are,
    and which, ascending."""
    sets, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if not isinstance(sets, list) or not isinstance(logprobs, list) or {len(sets), len(logprobs)} != {len(output)}:
        raise RolloutError(
            f"{label}: the answer does not say which ids each of {len(output)} tokens was drawn from, which top_p "
            "below 1 needs: take SGLang 0.5.20 or later, or set rollout.top_p = 1"
        )
    counts = np.fromiter(map(len, sets), np.int32)
    owner, ids = np.repeat(np.arange(len(output)), counts), np.fromiter(chain.from_iterable(sets), np.int32)
    ids = ids[np.lexsort((ids, owner))]
    if (np.bincount(owner[ids == output[owner]], minlength=len(output)) != 1).any():
        raise RolloutError(f"{label}: a token is not among the ids that it was drawn from")
    if ((np.diff(ids) == 0) & (np.diff(owner) == 0)).any():
        raise RolloutError(f"{label}: an id is twice among those that a token was drawn from")
    return _require_logprobs(logprobs, label), (counts, ids)


def _parse_versions(meta: Mapping[str, Any], prompt: int, output: int, version: int, label: str) -> np.ndarray:
    """Returns int32 [prompt + output]; newer servers name the version of each span of output tokens."""
    found = np.full(prompt + output, version, np.int32)
    spans = meta.get("weight_versions") or []
    try:
        if spans:
            found[prompt:] = -1  # no version for a token that no span names
        for span in spans:
            found[prompt + int(span["start"]) : prompt + int(span["end"])] = int(span["version"])
        if not spans and meta.get("weight_version") is not None:
            found[:] = int(meta["weight_version"])
    except (KeyError, TypeError, ValueError) as error:
        named = spans or meta.get("weight_version")
        raise RolloutError(f"{label}: weight versions {named} are not those that megarl has set") from error
    return found


def _parse_routes(
    meta: Mapping[str, Any], num_tokens: int, known_rows: int, shape: MoeShape, label: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns experts [T, L, K] and mask [T]; the last token and the known prefix have no row."""
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        raise TraceError(
            f"{label}: the answer has no routed_experts although they were asked for: start the server with "
            "--enable-return-routed-experts (SGLang 0.5.7 or later)"
        )
    rows = decode_routes(text, num_tokens - 1, shape, label, known_rows)
    experts = np.zeros((num_tokens, *rows.shape[1:]), rows.dtype)
    experts[known_rows : num_tokens - 1] = rows
    mask = np.zeros(num_tokens, bool)
    mask[known_rows : num_tokens - 1] = True
    return experts, mask
