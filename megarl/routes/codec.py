"""Routing traces as bytes: ceil(log2 C(E, K)) bits per token and layer, or the experts themselves in their order.

    header   20 bytes: magic, version, CRC32 of all that follows it, flags, L, K, E - 1, T
    payload  mask | the rows of the tokens that have one, token by token, layer by layer

Numbers are little-endian. An unordered row is the number of its set (``cells``; for other shapes ``combinations``),
written in planes of at most 2^15 rows (``rows``); an ordered row is K bytes (E <= 256) or K 16-bit words. A mask is
written only for a trace with a mask: one bit per token or, if shorter, the number of runs and the run lengths (32-bit
words), alternating between tokens with and without a row. A trace without a mask takes at most the header and the bytes
of the experts (one per expert for E <= 256, else two).
"""

import struct
import zlib
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache

import numpy as np

from megarl.errors import TraceError
from megarl.routes import cells
from megarl.routes.combinations import MAX_TOP_K, Combinations
from megarl.routes.rows import blocks, num_bytes, pack, sort_columns, unpack
from megarl.routes.trace import RoutingTrace

MAGIC = b"MRLT"
VERSION = 3
MAX_MISSING_BYTES = 1 << 28
"""Bytes that the experts of missing rows may take in memory: they cost no payload but a bit or a run of the mask."""
MAX_FREE_BYTES = 1 << 24
"""The same where no row costs payload (K = 0, K = E, no layers), so that a header alone asks for little memory."""
_START = struct.Struct("<4sBI")
_SHAPE = struct.Struct("<BHHHI")
HEADER_BYTES = _START.size + _SHAPE.size


class _Flag(IntFlag):
    ORDERED = 1
    MASK_AS_BITS = 2
    MASK_AS_RUNS = 4


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the header says about the trace."""

    num_tokens: int
    num_layers: int
    top_k: int
    num_experts: int
    ordered: bool

    @property
    def row_bits(self) -> int:
        """Bits of one token in one layer."""
        if self.ordered:
            return 8 * self.top_k * self.expert_dtype.itemsize
        return _numbering(self.num_experts, self.top_k).bits

    @property
    def expert_dtype(self) -> np.dtype:
        return np.dtype("u1" if self.num_experts <= 256 else "<u2")

    def rows_bytes(self, num_present: int) -> int:
        return num_bytes(num_present * self.num_layers, self.row_bits)

    def check(self, label: str) -> None:
        if self.num_tokens >= 1 << 32 or self.num_layers >= 1 << 16 or self.top_k >= 1 << 16:
            raise TraceError(
                f"{label}: {self.num_tokens} tokens of {self.num_layers} layers, top-{self.top_k}, expected fewer than "
                f"2^32 tokens, 2^16 layers and 2^16 experts of a token: no header holds these"
            )
        if not (1 <= self.num_experts <= 65536 and self.top_k <= self.num_experts):
            raise TraceError(
                f"{label}: the header says top-{self.top_k} of {self.num_experts} experts, expected 1..65536 experts "
                f"and a top-k up to their number: the data is damaged"
            )
        if not self.ordered and self.top_k > MAX_TOP_K:
            raise TraceError(
                f"{label}: top-{self.top_k} of {self.num_experts} experts, expected at most top-{MAX_TOP_K} for an "
                f"unordered trace: encode it with ordered=True"
            )

    def check_unbacked(self, num_present: int, label: str) -> None:
        """Raise if more than a bounded part of the trace is backed by nothing but the header."""
        free = not self.num_layers * self.row_bits
        unbacked = self.num_tokens - (0 if free else num_present)
        # Without experts a row still takes a byte where rows are checked, so that no factor may be 0.
        unbacked_bytes = unbacked * max(1, self.num_layers) * max(1, self.top_k) * self.expert_dtype.itemsize
        limit = MAX_FREE_BYTES if free else MAX_MISSING_BYTES
        if unbacked_bytes > limit:
            raise TraceError(
                f"{label}: {unbacked} tokens of {self.num_layers} layers, top-{self.top_k}, hold no route, expected at "
                f"most {limit} bytes of experts without one: cut the sequence, or leave its missing rows out"
            )

    def check_rows(self, num_present: int, num_bytes: int, label: str) -> None:
        """Raise unless the rows of the present tokens fill ``num_bytes``; comes before anything large is allocated."""
        expected = self.rows_bytes(num_present)
        if num_bytes != expected:
            raise TraceError(
                f"{label}: {num_bytes} bytes of routes, expected {expected} for {num_present} tokens of "
                f"{self.num_layers} layers, top-{self.top_k} of {self.num_experts}: the data is damaged"
            )
        self.check_unbacked(num_present, label)


def encode(trace: RoutingTrace, *, ordered: bool = False) -> bytes:
    """Write a trace as bytes; its label is not written.

    Unordered traces hold at most top-64 (else TraceError).
    """
    num_tokens, num_layers, top_k = trace.experts.shape
    shape = _Shape(num_tokens, num_layers, top_k, trace.num_experts, ordered)
    shape.check(trace.label)
    shape.check_unbacked(num_tokens - trace.num_missing, trace.label)
    flags, mask = _write_mask(trace.present)
    flags |= _Flag.ORDERED if ordered else _Flag(0)
    experts = trace.experts if trace.present is None else trace.experts[trace.present]
    rows = experts.reshape(len(experts) * num_layers, top_k)
    payload = mask + (rows.astype(shape.expert_dtype).tobytes() if ordered else _write_unordered(rows, shape))
    body = _SHAPE.pack(flags, num_layers, top_k, trace.num_experts - 1, num_tokens) + payload
    return _START.pack(MAGIC, VERSION, zlib.crc32(body)) + body


def decode(data: bytes | bytearray | memoryview, label: str = "routing trace") -> RoutingTrace:
    """Read what ``encode`` wrote; the rows of an unordered trace come in ascending order.

    Raises TraceError, naming ``label``, what was found and what was expected, if the data is cut off, damaged, of
    another format or version, or contradicts its own header. Reserves no memory that the length of the data does not
    justify, up to a fixed bound for tokens without routes.
    """
    data = memoryview(data).cast("B")
    shape, flags, payload = _read_header(data, label)
    present, row_bytes = _read_mask(payload, flags, shape, label)
    num_present = shape.num_tokens if present is None else int(np.count_nonzero(present))
    if shape.ordered:
        rows = np.frombuffer(row_bytes, dtype=shape.expert_dtype).astype(shape.expert_dtype.newbyteorder("="))
    else:
        rows = _read_unordered(np.frombuffer(row_bytes, dtype=np.uint8), num_present, shape, label)
    experts = rows.reshape(num_present, shape.num_layers, shape.top_k)
    if present is not None:
        scattered = np.zeros((shape.num_tokens, shape.num_layers, shape.top_k), dtype=experts.dtype)
        scattered[present] = experts
        experts = scattered
    make = RoutingTrace if shape.ordered else RoutingTrace.of_sets  # a number that is of a set needs no other check
    return make(experts, shape.num_experts, present=present, label=label)


@lru_cache(maxsize=4)
def _numbering(num_experts: int, top_k: int) -> cells.Cells | Combinations:
    in_tables = num_experts <= cells.MOST_EXPERTS and cells.LEAST_TOP_K <= top_k <= cells.MOST_TOP_K
    return (cells.Cells if in_tables else Combinations)(num_experts, top_k)


def _write_unordered(rows: np.ndarray, shape: _Shape) -> bytes:
    sets = _numbering(shape.num_experts, shape.top_k)
    row_blocks = (rows[block] for block in blocks(len(rows)))
    return b"".join(pack(sets.rank(sort_columns(row_block), len(row_block)), sets.bits) for row_block in row_blocks)


def _read_unordered(stream: np.ndarray, num_present: int, shape: _Shape, label: str) -> np.ndarray:
    sets = _numbering(shape.num_experts, shape.top_k)
    num_rows = num_present * shape.num_layers
    rows = np.empty((num_rows, shape.top_k), dtype=shape.expert_dtype.newbyteorder("="))
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


def _write_mask(present: np.ndarray | None) -> tuple[_Flag, bytes]:
    if present is None:
        return _Flag(0), b""
    edges = np.flatnonzero(np.diff(present, prepend=True))
    lengths = np.diff(np.concatenate([[0], edges, [len(present)]]))
    runs = np.concatenate([[len(lengths)], lengths]).astype("<u4").tobytes()
    bits = np.packbits(present, bitorder="little").tobytes()
    if len(present) < 1 << 32 and len(runs) < len(bits):
        return _Flag.MASK_AS_RUNS, runs
    return _Flag.MASK_AS_BITS, bits


def _read_mask(payload: memoryview, flags: _Flag, shape: _Shape, label: str) -> tuple[np.ndarray | None, memoryview]:
    """The mask, bool [T] or None, and the rest of the payload, whose length is checked."""
    if not flags & (_Flag.MASK_AS_BITS | _Flag.MASK_AS_RUNS):
        shape.check_rows(shape.num_tokens, len(payload), label)
        return None, payload
    as_runs = bool(flags & _Flag.MASK_AS_RUNS)
    length = 4 + 4 * int.from_bytes(payload[:4], "little") if as_runs else -(-shape.num_tokens // 8)
    if len(payload) < length:
        raise TraceError(
            f"{label}: a payload of {len(payload)} bytes, expected {length} for the mask of {shape.num_tokens} tokens "
            f"alone: the data is damaged"
        )
    if not as_runs:
        bits = np.frombuffer(payload[:length], dtype=np.uint8)
        present = np.unpackbits(bits, count=shape.num_tokens, bitorder="little").astype(bool)
        shape.check_rows(int(np.count_nonzero(present)), len(payload) - length, label)
        return present, payload[length:]
    runs = np.frombuffer(payload[4:length], dtype="<u4").astype(np.int64)
    if int(runs.sum()) != shape.num_tokens:
        raise TraceError(
            f"{label}: a mask of {int(runs.sum())} tokens, expected {shape.num_tokens}: the data is damaged"
        )
    shape.check_rows(int(runs[::2].sum()), len(payload) - length, label)  # before the mask itself takes memory
    return np.repeat(np.arange(len(runs)) % 2 == 0, runs), payload[length:]


def _read_header(data: memoryview, label: str) -> tuple[_Shape, _Flag, memoryview]:
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
    flags, num_layers, top_k, last_expert, num_tokens = _SHAPE.unpack_from(data, _START.size)
    unknown = flags & ~int(sum(_Flag))
    if unknown or (flags & _Flag.MASK_AS_BITS and flags & _Flag.MASK_AS_RUNS):
        raise TraceError(f"{label}: flags {flags:#04x}, expected a combination that megarl writes: the data is damaged")
    shape = _Shape(num_tokens, num_layers, top_k, last_expert + 1, bool(flags & _Flag.ORDERED))
    shape.check(label)
    return shape, _Flag(flags), data[HEADER_BYTES:]
