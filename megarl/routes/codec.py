"""Routing traces as bytes: K ceil(log2 E) bits per token and layer.

    header   20 bytes: magic, version, CRC32 of all that follows it, whether there is a mask, L, K, E - 1, T
    payload  mask | the rows of the tokens that have one, token by token, layer by layer

Numbers are little-endian. Experts stand in planes of bits: the lowest bit of all, the next bit of all, and so on.
A mask, one bit per token, is written only for a trace with a mask.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from megarl.errors import TraceError, refusal
from megarl.routes.trace import RoutingTrace, narrow_dtype

MAGIC = b"MRLT"
VERSION = 7
MAX_TOP_K = 64
MAX_FREE_BYTES = 1 << 28
"""Bytes in memory of the rows that cost no payload: missing rows, and rows of no bits (K = 0, E = 1, no layers)."""
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
        """Of an expert."""
        return (self.num_experts - 1).bit_length()

    def check(self, label: str) -> None:
        """TraceError unless a header can hold this shape."""
        sizes = f"{label}: {self.num_tokens} tokens of {self.num_layers} layers, top-{self.top_k} of {self.num_experts}"
        if self.num_tokens >= 1 << 32 or self.num_layers >= 1 << 16:
            raise TraceError(f"{sizes}, expected fewer than 2^32 tokens and 2^16 layers: no header holds these")
        if not (1 <= self.num_experts <= 65536 and self.top_k <= min(self.num_experts, MAX_TOP_K)):
            raise TraceError(refusal("sizes_of_routes", sizes=sizes, max_top_k=MAX_TOP_K))

    def check_free(self, num_present: int, label: str) -> None:
        """TraceError if too much of the trace is backed by nothing but the header and the mask."""
        num_free = self.num_tokens - (num_present if self.num_layers * self.top_k * self.bits else 0)
        # Without experts a row still takes a byte where rows are checked, so that no factor may be 0.
        dtype = np.dtype(narrow_dtype(self.num_experts))
        if num_free * max(1, self.num_layers) * max(1, self.top_k) * dtype.itemsize > MAX_FREE_BYTES:
            facts = {"label": label, "num_free": num_free, "shape": self, "max_free_bytes": MAX_FREE_BYTES}
            raise TraceError(refusal("tokens_without_route", **facts))


def encode(trace: RoutingTrace) -> bytes:
    """Write a trace as bytes; its label is not written. TraceError above top-64, and for 2^32 tokens or more."""
    num_tokens, num_layers, top_k = trace.experts.shape
    shape = _Shape(num_tokens, num_layers, top_k, trace.num_experts)
    shape.check(trace.label)
    shape.check_free(num_tokens - trace.num_missing, trace.label)
    mask, experts = b"", trace.experts
    if trace.present is not None:
        mask, experts = np.packbits(trace.present, bitorder="little").tobytes(), experts[trace.present]
    body = _SHAPE.pack(trace.present is not None, num_layers, top_k, trace.num_experts - 1, num_tokens) + mask
    experts = experts.reshape(-1)
    planes = (experts & (1 << np.arange(shape.bits, dtype=experts.dtype))[:, None]) != 0
    body += np.packbits(planes, bitorder="little").tobytes()
    return _START.pack(MAGIC, VERSION, zlib.crc32(body)) + body


def decode(data: bytes | bytearray | memoryview, label: str = "routing trace") -> RoutingTrace:
    """Read what ``encode`` wrote.

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
            raise TraceError(refusal("length_of_mask", label=label, length=len(payload), size=size, shape=shape))
        present = np.unpackbits(payload[:size], count=shape.num_tokens, bitorder="little").astype(bool)
        payload, num_present = payload[size:], int(np.count_nonzero(present))
    count = num_present * shape.num_layers * shape.top_k
    expected = -(-count * shape.bits // 8)
    if len(payload) != expected:  # before anything large is allocated
        facts = {"label": label, "length": len(payload), "expected": expected, "num_present": num_present}
        raise TraceError(refusal("length_of_routes", shape=shape, **facts))
    shape.check_free(num_present, label)
    experts = np.zeros((shape.num_tokens, shape.num_layers, shape.top_k), narrow_dtype(shape.num_experts))
    stored = np.zeros((num_present, *experts.shape[1:]), experts.dtype)
    planes = np.unpackbits(payload, count=shape.bits * count, bitorder="little").reshape(shape.bits, *stored.shape)
    for bit, plane in enumerate(planes):
        stored |= plane.astype(stored.dtype) << bit
    experts[slice(None) if present is None else present] = stored
    return RoutingTrace(experts, shape.num_experts, present, label)


def _read_header(data: memoryview, label: str) -> tuple[_Shape, bool]:
    """Return the shape, and whether there is a mask."""
    if len(data) < HEADER_BYTES:
        raise TraceError(refusal("length_of_header", label=label, length=len(data), header_bytes=HEADER_BYTES))
    magic, version, crc = _START.unpack_from(data)
    if magic != MAGIC:
        raise TraceError(f"{label}: begins with {magic!r}, expected {MAGIC!r}: this is no encoded routing trace")
    if version != VERSION:
        raise TraceError(f"{label}: format version {version}, expected {VERSION}: of another megarl; record again")
    if zlib.crc32(data[_START.size :]) != crc:
        raise TraceError(refusal("checksum_of_routes", label=label, length=len(data)))
    has_mask, num_layers, top_k, last_expert, num_tokens = _SHAPE.unpack_from(data, _START.size)
    if has_mask > 1:
        raise TraceError(f"{label}: a mask {has_mask}, expected 0 or 1: the data is damaged")
    shape = _Shape(num_tokens, num_layers, top_k, last_expert + 1)
    shape.check(label)
    return shape, bool(has_mask)
