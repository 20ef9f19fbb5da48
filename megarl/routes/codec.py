"""Routing traces as bytes: ceil(log2 C(E, K)) bits per token and layer.

    header   20 bytes: magic, version, CRC32 of all that follows it, whether there is a mask, L, K, E - 1, T
    payload  mask | the rows of the tokens that have one, token by token, layer by layer

Numbers are little-endian. A row is the number of its set, ``sum_i C(c_i, i)`` of the experts c_1 < ... < c_K (the
combinatorial number system). Where these numbers take more than 63 bits, a row is K numbers instead, its experts in
ascending order. Numbers stand in planes: the lowest byte of all, the next byte of all, and then the remaining bits of
all, lowest first. A mask, one bit per token, is written only for a trace with a mask.
"""

import math
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megarl.errors import TraceError
from megarl.routes.trace import RoutingTrace, narrow_dtype

MAGIC = b"MRLT"
VERSION = 5
MAX_TOP_K = 64
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
    def width(self) -> int:
        """Experts of one number: K, or 1 where a number for K of them has too many bits."""
        return self.top_k if math.comb(self.num_experts, self.top_k) <= 1 << 63 else 1

    @property
    def bits(self) -> int:
        """Of one number."""
        return (math.comb(self.num_experts, self.width) - 1).bit_length()

    def num_numbers(self, num_tokens: int) -> int:
        """Numbers of the rows of so many tokens."""
        return num_tokens * self.num_layers * (self.top_k // max(self.width, 1) or 1)

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
    rows = np.sort(experts, axis=2).reshape(-1, shape.width) if shape.width else np.empty((0, 0), np.uint8)
    body = _SHAPE.pack(trace.present is not None, num_layers, top_k, trace.num_experts - 1, num_tokens) + mask
    body += _pack(_rank(rows, trace.num_experts), shape.bits)
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
    count = shape.num_numbers(num_present)
    expected = -(-count * shape.bits // 8)
    if len(payload) != expected:  # before anything large is allocated
        raise TraceError(
            f"{label}: {len(payload)} bytes of routes, expected {expected} for {num_present} tokens of "
            f"{shape.num_layers} layers, top-{shape.top_k} of {shape.num_experts}: the data is damaged"
        )
    shape.check_free(num_present, label)
    experts = np.zeros((shape.num_tokens, shape.num_layers, shape.top_k), dtype=narrow_dtype(shape.num_experts))
    experts[slice(None) if present is None else present] = _read_rows(payload, count, num_present, shape, label)
    return RoutingTrace.of_sets(experts, shape.num_experts, present, label)  # numbers of sets need no other check


def _read_rows(stream: np.ndarray, count: int, num_present: int, shape: _Shape, label: str) -> np.ndarray:
    """Integers [present tokens, L, K], or [K] of all rows that take no bits."""
    if not shape.bits:
        return np.arange(shape.top_k)
    numbers = _unpack(stream, count, shape.bits)
    rows, is_wrong = _unrank(numbers, shape.num_experts, shape.width)
    rows = rows.reshape(-1, shape.top_k)
    is_wrong = is_wrong.reshape(-1, shape.top_k // shape.width).any(1)
    is_wrong |= (rows[:, 1:] <= rows[:, :-1]).any(1)
    if is_wrong.any():
        token, layer = divmod(int(is_wrong.argmax()), shape.num_layers)
        raise TraceError(
            f"{label}: present row {token}, layer {layer} holds a number that is of no {shape.top_k} of "
            f"{shape.num_experts} experts: the data is damaged or was not written by megarl"
        )
    return rows.reshape(num_present, shape.num_layers, shape.top_k)


@lru_cache(maxsize=4)
def _binomials(num_experts: int, top_k: int) -> list[np.ndarray]:
    """For i = 1..K, int64 [E-K+i]: C(c, i) for all c that the i-th smallest expert can be."""
    columns = [np.ones(num_experts - top_k, np.int64)]  # C(c, 0)
    for _ in range(top_k):
        columns.append(np.concatenate([np.zeros(1, np.int64), np.cumsum(columns[-1])]))
    return columns[1:]


def _rank(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Number the sets: integers [N, K], ascending in a row -> int64 [N]."""
    numbers = np.zeros(len(rows), np.int64)
    for column, binomials in zip(rows.T, _binomials(num_experts, rows.shape[1]), strict=True):
        numbers += binomials[column]
    return numbers


def _unrank(numbers: np.ndarray, num_experts: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse: int64 [N] -> the sets [N, K], and bool [N], True where a number is of no set."""
    rows = np.empty((len(numbers), top_k), narrow_dtype(num_experts))
    is_wrong = numbers >= math.comb(num_experts, top_k)
    for slot, binomials in reversed(list(enumerate(_binomials(num_experts, top_k)))):
        found = np.searchsorted(binomials, numbers, side="right") - 1
        rows[:, slot] = found
        numbers = numbers - binomials[found]
    return rows, is_wrong


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
