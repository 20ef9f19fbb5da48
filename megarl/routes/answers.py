"""Routes in SGLang's answers, as one checked trace of the whole sequence.

``routes_from_sglang`` is for megarl's client and for a loop of your own. An answer has a row for each token that the
model read: prompt and response without the last token. A row of -1 is missing: the token routes natively, and is
counted.

Exempt layers (``MoeShape``) are left out, whatever an answer has there: SGLang captures no layer whose router reads a
table, and answers with zeros.

An engine that routes inside a kernel captures nothing, and answers with zeros of a new buffer, with padding, or with
one row of an earlier pass for all tokens. ``refuse_uncaptured`` refuses these answers.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.errors import TraceError, refusal, reworded
from megarl.files.hf_config import MoeShape
from megarl.routes.codec import MAGIC, decode
from megarl.routes.trace import RoutingTrace


def routes_from_sglang(
    response: Any, shape: MoeShape, start: int = 0, *,
    tokens: Sequence[int] | None = None, label: str = "SGLang's answer", logical_ids: np.ndarray | None = None,
) -> RoutingTrace:  # fmt: skip
    """Return the routes [T, L, K] of prompt and response from one JSON answer of SGLang's ``/generate``.

    Ask with ``return_routed_experts`` a server that was started with ``--enable-return-routed-experts``. T is
    prompt_tokens + completion_tokens; ``present`` is False for the last token.

    shape: ``MoeShape.of(config.json)``, or ``RoutingReplay.shape``. start (several turns): the
    ``routed_experts_start_len`` of the request; rows before it are not present. tokens: the T token ids, if the answer
    does not repeat the prompt. logical_ids: integers [L, P], the experts of P physical ids in each MoE layer, for an
    engine that answers with physical ids (SGLang before 0.5.10 with EPLB; later releases answer with experts).

    TraceError for an answer without routes, with another number of rows, layers or experts, with experts that are out
    of range or twice in a row, or with rows that no router has chosen (``refuse_uncaptured``).
    """
    if not isinstance(response, Mapping) or not isinstance(meta := response.get("meta_info"), Mapping):
        kind = f"a list of {len(response)}" if isinstance(response, list) else f"a {type(response).__name__}"
        raise TraceError(refusal("answer_of_generate", label=label, kind=kind))
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        raise TraceError(refusal("answer_without_routes", label=label))
    counts: list[Any] = [meta.get(name) for name in ("prompt_tokens", "completion_tokens")]
    if not all(isinstance(count, int) and count >= 0 for count in counts) or counts == [0, 0]:
        raise TraceError(f"{label}: prompt_tokens and completion_tokens are {counts}, expected two counts above 0")
    total = sum(map(int, counts))
    if not shape.moe_layers:
        raise TraceError(f"{label}: the model has no experts, so there is nothing to replay: ask for no routes")
    if not 0 <= start < total:
        raise TraceError(f"{label}: start is {start}, expected one of its {total} tokens")
    prompt, output = response.get("prompt_token_ids"), response.get("output_ids")
    if tokens is None and isinstance(prompt, list) and isinstance(output, list):
        tokens = [*prompt, *output]
    row_tokens = None if tokens is None or len(tokens) != total else tokens[start : total - 1]
    trace = decode_routes(text, total - 1, shape, label, start, row_tokens, logical_ids)
    experts, present = np.zeros((total, *trace.experts.shape[1:]), trace.experts.dtype), np.zeros(total, bool)
    experts[start : total - 1], present[start : total - 1] = trace.experts, trace.row_mask
    return RoutingTrace.of_sets(experts, trace.num_experts, present, label)


def read_routes(
    raw: bytes, shape: MoeShape, label: str = "routes", logical_ids: np.ndarray | None = None
) -> RoutingTrace:
    """Return SGLang's int32 [rows, layers, K] without dense and exempt layers; TraceError for a wrong shape.
    logical_ids: of ``routes_from_sglang``.
    """
    if len(raw) % (4 * shape.num_layers * shape.topk):
        raise TraceError(refusal("bytes_of_routes", label=label, length=len(raw), shape=shape))
    whole = np.frombuffer(raw, "<i4").reshape(-1, shape.num_layers, shape.topk)
    rows = whole[:, list(shape.moe_layers)] if len(shape.moe_layers) < shape.num_layers else whole
    for layer in shape.dense_layers:
        if (whole[:, layer].any(1) & (rows != -1).any((1, 2))).any():
            raise TraceError(f"{label}: the dense layer {layer} has routes: the server runs another model")
    experts = np.arange(shape.num_experts)
    table = np.broadcast_to(experts, (rows.shape[1], len(experts))) if logical_ids is None else np.asarray(logical_ids)
    is_table = table.dtype.kind in "iu" and table.shape[:-1] == rows.shape[1:2]
    if logical_ids is not None and not (is_table and np.isin(table, experts).all()):
        form = f"integers [{rows.shape[1]} MoE layers, physical ids] in 0..{shape.num_experts - 1}"
        raise TraceError(f"{label}: logical_ids are {table.dtype} {list(table.shape)}, expected {form}")
    if rows.size and rows.max() >= table.shape[1]:
        raise TraceError(refusal("physical_ids", label=label, found=rows.max(), most=table.shape[1] - 1))
    if logical_ids is not None:
        rows = np.where(rows < 0, rows, table.astype(np.int32)[np.arange(len(table))[:, None], rows])
    return RoutingTrace.of_rows(rows, shape.num_experts, label)


def decode_routes(
    text: str, num_rows: int, shape: MoeShape, label: str, known_rows: int = 0, tokens: Sequence[int] | None = None,
    logical_ids: np.ndarray | None = None,
) -> RoutingTrace:  # fmt: skip
    """Return the routes of the MoE layers without the known rows; ``present`` is None if no row is missing.

    ``text`` is base64 of int32 [rows, all layers, K], or of the plugin's short form. Servers before 0.5.12 send the
    known rows too, which are cut off. ``tokens``: those of the rows, if they are known. ``logical_ids``: of
    ``routes_from_sglang``. Raise TraceError for damaged
    text, for another number of rows, layers or experts, for routes in a dense layer, and as ``refuse_uncaptured``.
    """
    if len(text) > (longest := longest_text(num_rows, shape)):
        raise TraceError(f"{label}: routed_experts of {len(text)} characters, expected at most {longest}")
    raw = _from_base64(text, "routed_experts", label)
    is_short = is_compact(raw)
    if is_short and logical_ids is not None:
        raise TraceError(f"{label}: megarl's plugin answers with experts: leave logical_ids out")
    trace = _decode_short(raw, shape, label) if is_short else read_routes(raw, shape, label, logical_ids)
    expected = num_rows - known_rows
    if (found := len(trace.experts)) not in (num_rows, expected):
        raise TraceError(refusal("rows_of_routes", label=label, found=found, expected=expected, shape=shape))
    first = found - expected
    present = None if trace.present is None else trace.present[first:]
    trace = RoutingTrace.of_sets(trace.experts[first:], trace.num_experts, present, label)
    refuse_uncaptured(trace, tokens)
    return trace


def _from_base64(text: str, name: str, label: str) -> bytes:
    with reworded(ValueError, TraceError, f"{label}: {name} are no base64 (", "); the answer was cut short"):
        return base64.b64decode(text, validate=True)


def decode_keys(text: str | None, shape: tuple[int, int, int], indexers: Sequence[int], label: str) -> np.ndarray:
    """Return ``indexer_topk`` of SGLang's answer, int32 [rows + 1, indexers, k], with -1 for the last token.

    ``text`` is base64 of int32 ``shape``, [rows, all layers, k]. Keys are positions in the request only on a server
    with SGLANG_DSA_FUSE_TOPK=0. TraceError for keys behind their token, as slots of the cache are, and other shapes.
    """
    keys = np.frombuffer(_from_base64(text or "", "indexer_topk", label), np.int8)
    if len(keys) != 4 * math.prod(shape):
        raise TraceError(refusal("keys_of_answer", label=label, length=len(keys), expected=list(shape)))
    rows = keys.view("<i4").reshape(shape)[:, list(indexers)]
    if (rows > np.arange(len(rows))[:, None, None]).any():
        raise TraceError(f"{label}: indexer_topk has keys behind their token: start SGLang with SGLANG_DSA_FUSE_TOPK=0")
    return np.pad(rows, ((0, 1), (0, 0), (0, 0)), constant_values=-1)


def longest_text(num_rows: int, shape: MoeShape) -> int:
    """Return the base64 length of ``num_rows`` rows plus 16, so that a wrong number of rows is reported as a number."""
    return (num_rows + 16) * shape.num_layers * shape.topk * 16 // 3 + 256


LEAST_ROWS = 8


def refuse_uncaptured(trace: RoutingTrace, tokens: Sequence[int] | None = None) -> None:
    """TraceError for rows that an engine has not captured: no row at all, padding, or the same row for every token.

    With L layers, b = L log2 C(E, K) and D different tokens (``tokens``; None: all differ) the rows are refused if

        every row is the same                                            L (D - 1)     >= 24
        every row is 0..K-1 in every layer (zeros of a top-1 model)      b + L (D - 1) >= 24
        any row is                                                       b             >= 64
        8 rows or more are expected, and none is there

    A router that sends at most half of all tokens to any one set of experts is refused in one of 2^24 answers at most,
    because the numbers of experts are arbitrary. So short answers of small models may repeat a row.
    """
    rows, (_, layers, top_k) = trace.row_mask, trace.experts.shape
    if not rows.any() and len(rows) >= LEAST_ROWS:
        raise TraceError(f"{trace.label}: all {len(rows)} rows of routes are missing: the engine captured nothing")
    if not rows.any() or top_k == trace.num_experts:
        return
    experts = trace.experts[rows]
    is_padding = experts.max((1, 2)) < top_k  # K different experts below K
    bits = layers * math.log2(math.comb(trace.num_experts, top_k))
    different = len(np.unique(np.flatnonzero(rows) if tokens is None else np.asarray(tokens)[rows]))
    surprise = layers * (different - 1) + bits * bool(is_padding.all())
    if is_padding.any() and bits >= 64:
        fault = f"{np.count_nonzero(is_padding)} of {len(experts)} rows name experts 0..{top_k - 1} in every layer"
    elif surprise >= 24 and (is_padding.all() or (experts == experts[:1]).all()):
        fault = f"all {len(experts)} rows are the same, of {different} different tokens"
    else:
        return
    raise TraceError(refusal("not_captured", label=trace.label, fault=fault))


def _decode_short(raw: bytes, shape: MoeShape, label: str) -> RoutingTrace:
    trace = decode(raw, label)
    sizes, names = (*trace.experts.shape[1:], trace.num_experts), "layers, top-k, experts"
    if sizes != (expected := (len(shape.moe_layers), shape.topk, shape.num_experts)):
        raise TraceError(f"{label}: {names} are {sizes}, expected {expected}: the server's plugin is not megarl's")
    return trace


def is_compact(raw: bytes) -> bool:
    """Whether decoded bytes are the short form."""
    return raw[: len(MAGIC)] == MAGIC
