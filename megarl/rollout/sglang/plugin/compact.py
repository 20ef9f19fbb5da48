"""The short form of a routing trace on the wire: what a client asks for, and how the server rewrites its answer.

    request   header ``megarl-routes``, JSON: the version of the coding and the shape of the model's routes
    answer    ``meta_info["routed_experts"]``: base64 of a trace of ``megarl.core.routing.codec``, MoE layers only

SGLang itself sends base64 of raw int32 for all layers, and ignores the header. The answer tells what it is: a trace
begins with four letters, which as an int32 would be expert 1414287949.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from megarl.core.routing.codec import MAGIC, encode
from megarl.core.routing.trace import RoutingTrace
from megarl.errors import TraceError

if TYPE_CHECKING:  # the server's side needs no model
    from megarl.models.shapes import MoeShape

HEADER = "megarl-routes"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """The shape of the routes that a client expects, without which SGLang's bytes cannot be read."""

    num_layers: int
    """All decoder layers."""
    dense_layers: tuple[int, ...]
    """0-based indices of those without experts."""
    num_experts: int
    """E."""
    topk: int
    """K."""

    @staticmethod
    def of(shape: MoeShape) -> Ask:
        """What a client of this model asks for."""
        return Ask(shape.num_layers, shape.dense_layers, shape.num_experts, shape.topk)

    def header(self) -> dict[str, str]:
        """The request header that asks for the short form."""
        return {HEADER: json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))}

    @staticmethod
    def parse(header: str | None) -> Ask | None:
        """What a request asks for; None without the header, and for one of another version or that makes no sense."""
        try:
            found = json.loads(header or "null")
            if not isinstance(found, dict) or found.pop("version", None) != VERSION:
                return None
            if set(found) != {field.name for field in fields(Ask)}:
                return None
            dense = tuple(int(layer) for layer in found.pop("dense_layers"))
            ask = Ask(dense_layers=dense, **{name: int(value) for name, value in found.items()})
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None
        is_sound = 0 < ask.num_layers <= 1 << 16 and ask.topk > 0 and ask.num_experts > 0
        return ask if is_sound and set(dense) < set(range(ask.num_layers)) else None

    @property
    def moe_layers(self) -> list[int]:
        """0-based indices of the layers that have experts."""
        return sorted(set(range(self.num_layers)) - set(self.dense_layers))


def compact(raw: bytes, ask: Ask) -> bytes | None:
    """The short form of ``raw``, int32 [rows, layers, K]; None where there is none or it would not be shorter.

    There is none of routes that are not of the shape that was asked for: the client sees them and tells what is wrong.
    """
    if not raw or len(raw) % (4 * ask.num_layers * ask.topk):
        return None
    whole = np.frombuffer(raw, "<i4").reshape(-1, ask.num_layers, ask.topk)
    if ask.dense_layers:
        if whole[:, list(ask.dense_layers)].any():
            return None
        whole = whole[:, ask.moe_layers]
    try:
        short = encode(RoutingTrace(whole, ask.num_experts))
    except TraceError:
        return None
    return short if len(short) < len(raw) else None


def is_compact(raw: bytes) -> bool:
    """Whether decoded bytes are the short form."""
    return raw[: len(MAGIC)] == MAGIC
