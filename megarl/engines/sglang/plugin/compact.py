"""The short form of a routing trace on the wire: the client's request, and the server's rewritten answer.

request   header ``megarl-routes``, JSON: the version of the coding and the shape of the model's routes
answer    ``meta_info["routed_experts"]``: base64 of a trace of ``megarl.routes.codec``, MoE layers only;

SGLang itself sends base64 of raw int32 for all layers, and ignores the header. A trace in the short form begins with
four letters, as an int32 the impossible expert 1414287949.
"""

import json
from collections.abc import Mapping

from megarl.errors import TraceError
from megarl.files.hf_config import MoeShape
from megarl.routes.answers import read_routes
from megarl.routes.codec import VERSION, encode

HEADER = "megarl-routes"
_COUNTS = ("num_layers", "num_experts", "topk")


def make_header(shape: MoeShape) -> dict[str, str]:
    """Return the request header for the short form: JSON with the shape that the client expects."""
    fields = {name: getattr(shape, name) for name in ("num_layers", "dense_layers", "num_experts", "topk")}
    if shape.exempt_layers:  # a plugin that does not know the key leaves the answer as it is
        fields["exempt_layers"] = shape.exempt_layers
    return {HEADER: json.dumps({"version": VERSION, **fields}, separators=(",", ":"))}


def parse_header(headers: Mapping[str, str]) -> MoeShape | None:
    """Return the shape in a request's header; None for a missing, senseless or differently versioned header."""
    try:
        header = json.loads(headers.get(HEADER) or "null")
        if not isinstance(header, dict) or header.keys() - {"exempt_layers"} != {"version", "dense_layers", *_COUNTS}:
            return None
        num_layers, num_experts, topk = (int(header[name]) for name in _COUNTS)
        dense, exempt = ({int(layer) for layer in header.get(f"{kind}_layers", ())} for kind in ("dense", "exempt"))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    if header["version"] != VERSION or not 0 < num_layers <= 1 << 16:
        return None
    moe_layers = tuple(layer for layer in range(num_layers) if layer not in dense | exempt)
    has_experts = min(topk, num_experts) >= 1 if moe_layers else topk == num_experts == 0
    is_sound = has_experts and dense | exempt <= set(range(num_layers)) and not dense & exempt
    return MoeShape(num_layers, moe_layers, num_experts, topk, tuple(sorted(exempt))) if is_sound else None


def compact(raw: bytes, shape: MoeShape) -> bytes | None:
    """Return the short form of ``raw``, int32 [rows, layers, K]; None if the short form would not be shorter.

    Routes of another shape have no short form: the client sees the routes and reports the problem.
    """
    try:
        short = encode(read_routes(raw, shape))
    except TraceError:
        return None
    return short if raw and len(short) < len(raw) else None
