"""The short form of a routing trace on the wire: the client's request, and the server's rewritten answer.

request   header ``megarl-routes``, JSON: the version of the coding and the shape of the model's routes
answer    ``meta_info["routed_experts"]``: base64 of a trace of ``megarl.routes.codec``, MoE layers only;
          ``meta_info["megarl_seal"]``: a digest that binds the parts of the answer and the request

SGLang itself sends base64 of raw int32 for all layers, and ignores the header. A trace in the short form begins with
four letters, as an int32 the impossible expert 1414287949.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from megarl.errors import TraceError
from megarl.files.moe_shape import MoeShape
from megarl.routes.answers import read_routes
from megarl.routes.codec import VERSION, encode

HEADER = "megarl-routes"
SEAL = "megarl_seal"
_COUNTS = ("num_layers", "num_experts", "topk")


def make_header(shape: MoeShape) -> dict[str, str]:
    """Return the request header for the short form: JSON with the shape that the client expects."""
    fields = {name: getattr(shape, name) for name in ("num_layers", "dense_layers", "num_experts", "topk")}
    return {HEADER: json.dumps({"version": VERSION, **fields}, separators=(",", ":"))}


def parse_header(headers: Mapping[str, str]) -> MoeShape | None:
    """Return the shape in a request's header; None for a missing, senseless or differently versioned header."""
    try:
        header = json.loads(headers.get(HEADER) or "null")
        if not isinstance(header, dict) or header.keys() != {"version", "dense_layers", *_COUNTS}:
            return None
        num_layers, num_experts, topk = (int(header[name]) for name in _COUNTS)
        dense = {int(layer) for layer in header["dense_layers"]}
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    if header["version"] != VERSION or not 0 < num_layers <= 1 << 16:
        return None
    moe_layers = tuple(layer for layer in range(num_layers) if layer not in dense)
    has_experts = min(topk, num_experts) >= 1 if moe_layers else topk == num_experts == 0
    is_sound = has_experts and dense <= set(range(num_layers))
    return MoeShape(num_layers, moe_layers, num_experts, topk) if is_sound else None


def compact(raw: bytes, shape: MoeShape) -> bytes | None:
    """Return the short form of ``raw``, int32 [rows, layers, K]; None if the short form would not be shorter.

    Routes of another shape have no short form: the client sees the routes and reports the problem.
    """
    try:
        short = encode(read_routes(raw, shape))
    except TraceError:
        return None
    return short if raw and len(short) < len(raw) else None


def seal(prompt: Sequence[int], answer: Mapping[str, Any]) -> str:
    """Return the digest of an answer, and of the prompt that the server got.

    The digest covers all inputs of a rollout: the id of the request, both token sequences, log-probabilities, kept
    sets, routes, weight versions and finish reason. No part can come from another answer. The digest is no signature:
    anybody can compute it.
    """
    meta = answer["meta_info"]
    fields = [meta.get(name) for name in ("id", "finish_reason", "weight_version", "weight_versions")]
    logprobs = [np.nan if entry[0] is None else entry[0] for entry in meta.get("output_token_logprobs") or ()]
    sets, digest = meta.get("output_token_sampling_mask"), hashlib.blake2b(digest_size=16)
    for chunk in (
        np.asarray(prompt, "<i8").tobytes(),
        np.asarray(answer["output_ids"], "<i8").tobytes(),
        np.asarray(logprobs, "<f4").tobytes(),  # as float32: some releases hold float32 scalars, and JSON is decimal
        json.dumps(fields, sort_keys=True).encode(),
        (meta.get("routed_experts") or "").encode(),
        *(() if sets is None else _parts_of_sets(sets, meta)),
    ):
        digest.update(len(chunk).to_bytes(8, "little") + chunk)
    return digest.hexdigest()


def _parts_of_sets(sets: Sequence[Sequence[int]], meta: Mapping[str, Any]) -> tuple[bytes, ...]:
    ids = np.fromiter(chain.from_iterable(sets), "<i4")
    logprobs = np.asarray(meta.get("output_token_sampling_logprobs") or (), "<f4")
    return np.fromiter(map(len, sets), "<i4").tobytes(), ids.tobytes(), logprobs.tobytes()
