"""Routing traces as bytes: ceil(log2 C(E, K)) bits per token and layer.

    header   20 bytes: magic, version, CRC32 of all that follows it, whether there is a mask, L, K, E - 1, T
    payload  mask | the rows of the tokens that have one, token by token, layer by layer

Numbers are little-endian. A row is the number of its set (``numbering``), written in
planes of at most 2^15 rows (``rows``). A mask, one bit per token, is written only for a trace with a mask. A trace
without a mask takes at most the header and the bytes of the experts (one per expert for E <= 256, else two).
"""

import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megarl.errors import TraceError
from megarl.routes import numbering
from megarl.routes.numbering import MAX_TOP_K, Cells, Combinations
from megarl.routes.rows import blocks, num_bytes, pack, sort_columns, unpack
from megarl.routes.trace import RoutingTrace, narrow_dtype

MAGIC = b"MRLT"
VERSION = 4
MAX_FREE_BYTES = 1 << 28
"""Bytes in memory of the rows that cost no payload: missing rows, and rows of no bits (K = 0, K = E, no layers)."""
_START = struct.Struct("<4sBI")
_SHAPE = struct.Struct("<BHHHI")
HEADER_BYTES = _START.size + _SHAPE.size


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the header says about the trace."""

    num_tokens: int
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def bits(self) -> int:
        """Of one row: of a token in one layer."""
        return _numbering(self.num_experts, self.top_k).bits

    def check(self, label: str) -> None:
        """TraceError unless a header can hold this shape, and a number each of its rows."""
        sizes = f"{label}: {self.num_tokens} tokens of {self.num_layers} layers, top-{self.top_k} of {self.num_experts}"
        if self.num_tokens >= 1 << 32 or self.num_layers >= 1 << 16:
            raise TraceError(f"{sizes}, expected fewer than 2^32 tokens and 2^16 layers: no header holds these")
        if not (1 <= self.num_experts <= 65536 and self.top_k <= min(self.num_experts, MAX_TOP_K)):
            raise TraceError(
                f"{sizes} experts, expected 1..65536 experts and at most top-{MAX_TOP_K} of them: the data is damaged, "
                "or the model has another top-k than traces hold"
            )

    def check_free(self, num_present: int, label: str) -> None:
        """TraceError if too much of the trace is backed by nothing but the header and the mask."""
        num_free = self.num_tokens - (num_present if self.num_layers * self.bits else 0)
        # Without experts a row still takes a byte where rows are checked, so that no factor may be 0.
        dtype = np.dtype(narrow_dtype(self.num_experts))
        if num_free * max(1, self.num_layers) * max(1, self.top_k) * dtype.itemsize > MAX_FREE_BYTES:
            raise TraceError(
                f"{label}: {num_free} tokens of {self.num_layers} layers, top-{self.top_k}, hold no route, expected at "
                f"most {MAX_FREE_BYTES} bytes of experts without one: cut the sequence, or leave its missing rows out"
            )


def encode(trace: RoutingTrace) -> bytes:
    """Write a trace as bytes; its label is not written. TraceError above top-64, and for 2^32 tokens or more."""
    num_tokens, num_layers, top_k = trace.experts.shape
    shape = _Shape(num_tokens, num_layers, top_k, trace.num_experts)
    shape.check(trace.label)
    shape.check_free(num_tokens - trace.num_missing, trace.label)
    has_mask = trace.present is not None
    mask = np.packbits(trace.present, bitorder="little").tobytes() if has_mask else b""
    experts = trace.experts[trace.present] if has_mask else trace.experts
    rows, sets = experts.reshape(len(experts) * num_layers, top_k), _numbering(trace.num_experts, top_k)
    row_blocks = (rows[block] for block in blocks(len(rows)))
    packed = (pack(sets.rank(sort_columns(row_block), len(row_block)), sets.bits) for row_block in row_blocks)
    body = _SHAPE.pack(has_mask, num_layers, top_k, trace.num_experts - 1, num_tokens) + mask + b"".join(packed)
    return _START.pack(MAGIC, VERSION, zlib.crc32(body)) + body


def decode(data: bytes | bytearray | memoryview, label: str = "routing trace") -> RoutingTrace:
    """Read what ``encode`` wrote; experts come in ascending order.

    Raises TraceError, naming ``label``, what was found and what was expected, if the data is cut off, damaged, of
    another format or version, or contradicts its own header. Reserves no memory that the length of the data does not
    justify, up to a fixed bound for tokens without routes.
    """
    data = memoryview(data).cast("B")
    shape, has_mask = _read_header(data, label)
    payload, present, num_present = np.frombuffer(data[HEADER_BYTES:], np.uint8), None, shape.num_tokens
    if has_mask:
        size = -(-shape.num_tokens // 8)
        if len(payload) < size:
            raise TraceError(
                f"{label}: a payload of {len(payload)} bytes, expected {size} for the mask of {shape.num_tokens} "
                "tokens alone: the data is damaged"
            )
        present = np.unpackbits(payload[:size], count=shape.num_tokens, bitorder="little").astype(bool)
        payload, num_present = payload[size:], int(np.count_nonzero(present))
    expected = num_bytes(num_present * shape.num_layers, shape.bits)
    if len(payload) != expected:  # before anything large is allocated
        raise TraceError(
            f"{label}: {len(payload)} bytes of routes, expected {expected} for {num_present} tokens of "
            f"{shape.num_layers} layers, top-{shape.top_k} of {shape.num_experts}: the data is damaged"
        )
    shape.check_free(num_present, label)
    rows = _read_rows(payload, num_present, shape, label)
    experts = rows.reshape(num_present, shape.num_layers, shape.top_k)
    if present is not None:
        scattered = np.zeros((shape.num_tokens, shape.num_layers, shape.top_k), dtype=experts.dtype)
        scattered[present] = experts
        experts = scattered
    return RoutingTrace.of_sets(experts, shape.num_experts, present, label)  # numbers of sets need no other check


@lru_cache(maxsize=4)
def _numbering(num_experts: int, top_k: int) -> Cells | Combinations:
    in_tables = num_experts <= numbering.MOST_EXPERTS and numbering.LEAST_TOP_K <= top_k <= numbering.MOST_TOP_K
    return (Cells if in_tables else Combinations)(num_experts, top_k)


def _read_rows(stream: np.ndarray, num_present: int, shape: _Shape, label: str) -> np.ndarray:
    sets = _numbering(shape.num_experts, shape.top_k)
    num_rows = num_present * shape.num_layers
    rows = np.empty((num_rows, shape.top_k), dtype=narrow_dtype(shape.num_experts))
    for block in blocks(num_rows):
        first, last = num_bytes(block.start, sets.bits), num_bytes(block.stop, sets.bits)
        wrong = sets.unrank(unpack(stream[first:last], block.stop - block.start, sets.bits), rows[block])
        if wrong.any():
            token, layer = divmod(block.start + int(wrong.argmax()), shape.num_layers)
            raise TraceError(
                f"{label}: present row {token}, layer {layer} holds a number that is of no {shape.top_k} of "
                f"{shape.num_experts} experts: the data is damaged or was not written by megarl"
            )
    return rows


def _read_header(data: memoryview, label: str) -> tuple[_Shape, bool]:
    """Return the shape, and whether there is a mask."""
    if len(data) < HEADER_BYTES:
        raise TraceError(
            f"{label}: {len(data)} bytes, expected at least the {HEADER_BYTES} of a header: the data is cut off, or is "
            f"no routing trace"
        )
    magic, version, crc = _START.unpack_from(data)
    if magic != MAGIC:
        raise TraceError(f"{label}: begins with {magic!r}, expected {MAGIC!r}: this is no encoded routing trace")
    if version != VERSION:
        raise TraceError(
            f"{label}: format version {version}, expected {VERSION}: another megarl wrote it; record again"
        )
    if zlib.crc32(data[_START.size :]) != crc:
        raise TraceError(
            f"{label}: the data of {len(data)} bytes does not match its checksum: it is cut off, damaged, or has "
            f"others behind it; fetch it again"
        )
    has_mask, num_layers, top_k, last_expert, num_tokens = _SHAPE.unpack_from(data, _START.size)
    if has_mask > 1:
        raise TraceError(f"{label}: a mask {has_mask}, expected 0 or 1: the data is damaged")
    shape = _Shape(num_tokens, num_layers, top_k, last_expert + 1)
    shape.check(label)
    return shape, bool(has_mask)
