"""Routing traces as bytes: K ceil(log2 E) bits per token and layer.

    header   20 bytes: magic, version, CRC32 of all that follows it, whether there is a mask, L, K, E - 1, T
    payload  mask | the rows of the tokens that have one, token by token, layer by layer

Numbers are little-endian. A row is one number of at most 63 bits, its experts in their order, the first in the
lowest bits; K experts that need more bits are several numbers of equally many experts, the last filled up with zeros.
Numbers stand in planes: the lowest byte of all, the next byte of all, and then the remaining bits of all, lowest first.
A mask, one bit per token, is written only for a trace with a mask.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from megarl.errors import TraceError
from megarl.routes.trace import RoutingTrace, narrow_dtype

MAGIC = b"MRLT"
VERSION = 6
MAX_TOP_K = 64
MAX_BITS = 63
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
    def expert_bits(self) -> int:
        return (self.num_experts - 1).bit_length()

    @property
    def numbers(self) -> int:
        """Of a row."""
        return -(-self.top_k // (MAX_BITS // self.expert_bits)) if self.expert_bits else 0

    @property
    def width(self) -> int:
        """Experts of a number."""
        return -(-self.top_k // self.numbers) if self.numbers else 0

    @property
    def bits(self) -> int:
        """Of a number."""
        return self.width * self.expert_bits

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
    mask, experts = b"", trace.experts
    if trace.present is not None:
        mask, experts = np.packbits(trace.present, bitorder="little").tobytes(), experts[trace.present]
    rows = experts.reshape(len(experts) * num_layers, top_k)
    body = _SHAPE.pack(trace.present is not None, num_layers, top_k, trace.num_experts - 1, num_tokens) + mask
    body += _pack(_join(rows, shape), shape.bits)
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
            raise TraceError(
                f"{label}: a payload of {len(payload)} bytes, expected {size} for the mask of {shape.num_tokens} "
                "tokens alone: the data is damaged"
            )
        present = np.unpackbits(payload[:size], count=shape.num_tokens, bitorder="little").astype(bool)
        payload, num_present = payload[size:], int(np.count_nonzero(present))
    count = num_present * shape.num_layers * shape.numbers
    expected = -(-count * shape.bits // 8)
    if len(payload) != expected:  # before anything large is allocated
        raise TraceError(
            f"{label}: {len(payload)} bytes of routes, expected {expected} for {num_present} tokens of "
            f"{shape.num_layers} layers, top-{shape.top_k} of {shape.num_experts}: the data is damaged"
        )
    shape.check_free(num_present, label)
    experts = np.zeros((shape.num_tokens, shape.num_layers, shape.top_k), dtype=narrow_dtype(shape.num_experts))
    experts[slice(None) if present is None else present] = _read_rows(payload, count, num_present, shape)
    return RoutingTrace(experts, shape.num_experts, present, label)


def _read_rows(stream: np.ndarray, count: int, num_present: int, shape: _Shape) -> np.ndarray:
    """Integers [present tokens, L, K], or [K] of all rows that take no bits."""
    if not shape.bits:
        return np.arange(shape.top_k)
    rows = _split(_unpack(stream, count, shape.bits), shape)
    return rows.reshape(num_present, shape.num_layers, shape.top_k)


def _join(rows: np.ndarray, shape: _Shape) -> np.ndarray:
    """Integers [N, K] -> int64 [N * numbers of a row]."""
    numbers = np.zeros((len(rows), shape.numbers), np.int64)
    for slot in range(shape.top_k if shape.numbers else 0):
        number, place = divmod(slot, shape.width)
        numbers[:, number] |= rows[:, slot].astype(np.int64) << place * shape.expert_bits
    return numbers.reshape(-1)


def _split(numbers: np.ndarray, shape: _Shape) -> np.ndarray:
    """The inverse: int64 [N * numbers of a row] -> experts [N, K]."""
    numbers = numbers.reshape(-1, shape.numbers)
    columns = np.empty((shape.top_k, len(numbers)), narrow_dtype(shape.num_experts))
    for slot in range(shape.top_k):
        number, place = divmod(slot, shape.width)
        columns[slot] = numbers[:, number] >> place * shape.expert_bits & (1 << shape.expert_bits) - 1
    return np.ascontiguousarray(columns.T)


def _pack(numbers: np.ndarray, bits: int) -> bytes:
    """Write N numbers of ``bits`` bits, at most 63: int64 [N] -> ceil(N * bits / 8) bytes."""
    octets = numbers.astype("<i8").view(np.uint8).reshape(-1, 8).T
    whole, rest = divmod(bits, 8)
    flags = octets[whole] >> np.arange(rest, dtype=np.uint8)[:, None] & 1
    return octets[:whole].tobytes() + np.packbits(flags, bitorder="little").tobytes()


def _unpack(stream: np.ndarray, num_rows: int, bits: int) -> np.ndarray:
    """The inverse: uint8 [ceil(N * bits / 8)] -> int64 [N]."""
    whole, rest = divmod(bits, 8)
    octets = np.zeros((8, num_rows), np.uint8)
    octets[:whole] = stream[: whole * num_rows].reshape(whole, num_rows)
    flags = np.unpackbits(stream[whole * num_rows :], count=rest * num_rows, bitorder="little").reshape(rest, num_rows)
    octets[whole] = np.bitwise_or.reduce(flags << np.arange(rest, dtype=np.uint8)[:, None], axis=0)
    return np.ascontiguousarray(octets.T).view("<i8")[:, 0]


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
