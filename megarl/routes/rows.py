"""Rows of K experts, a block at a time: sorted, checked for duplicates, and their numbers as bytes."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np

BLOCK_ROWS = 1 << 15
"""Rows that fit into the cache together; part of the format. A multiple of 8: full blocks fill their bytes."""
# glibc hands freed memory back to the system at once, and every temporary array of a block then costs page faults (1.6
# times the time to encode), until an array of this size was freed (mallopt(3), M_MMAP_THRESHOLD). It is never touched.
np.empty(1 << 24, dtype=np.uint8)


def blocks(num_rows: int) -> Iterator[slice]:
    """Slices of at most ``BLOCK_ROWS`` rows that cover ``num_rows``."""
    return (slice(start, min(start + BLOCK_ROWS, num_rows)) for start in range(0, num_rows, BLOCK_ROWS))


def sort_columns(rows: np.ndarray) -> list[np.ndarray]:
    """Sort each row: integers [N, K] -> K columns [N]; column k holds the k-th smallest expert of every row."""
    columns = list(rows.T.copy(order="C"))
    spare = np.empty(len(rows), dtype=rows.dtype)
    for low, high in _comparators(len(columns)):
        np.minimum(columns[low], columns[high], out=spare)
        np.maximum(columns[low], columns[high], out=columns[high])
        columns[low], spare = spare, columns[low]
    return columns


def find_doubled(rows: np.ndarray) -> np.ndarray:
    """Ascending numbers of the rows, integers [N, K], that name an expert twice."""
    row_numbers = [np.empty(0, dtype=np.intp)]
    for block in blocks(len(rows)):
        equal = [expert == next_expert for expert, next_expert in pairwise(sort_columns(rows[block]))]
        if any(column.any() for column in equal):
            row_numbers.append(block.start + np.flatnonzero(np.any(equal, axis=0)))
    return np.concatenate(row_numbers)


def num_bytes(num_rows: int, bits: int) -> int:
    """Length of ``num_rows`` packed numbers."""
    return -(-num_rows * bits // 8)


def pack(words: np.ndarray, bits: int) -> bytes:
    """Write N numbers of ``bits`` bits: uint32 [ceil(bits / 32), N], lowest word first -> ceil(N * bits / 8) bytes.

    Planes back to back: full 32-bit words of all numbers, then full bytes of the last word of all numbers, then the
    remaining bits of all numbers.
    """
    num_words, num_octets, num_flags = _planes(bits)
    planes = [words[:num_words].astype("<u4", copy=False).tobytes()]
    if num_octets or num_flags:
        last = words[-1]
        planes += [(last >> np.uint32(8 * i)).astype(np.uint8).tobytes() for i in range(num_octets)]
        top = (last >> np.uint32(8 * num_octets)).astype(np.uint8)
        planes.append(np.packbits(top & _FLAGS[:num_flags], bitorder="little").tobytes())
    return b"".join(planes)


def unpack(stream: np.ndarray, num_rows: int, bits: int) -> np.ndarray:
    """The inverse: uint8 [ceil(N * bits / 8)] -> uint32 [ceil(bits / 32), N]."""
    num_words, num_octets, num_flags = _planes(bits)
    words = np.empty((-(-bits // 32), num_rows), dtype=np.uint32)
    words[:num_words] = stream[: 4 * num_words * num_rows].view("<u4").reshape(num_words, num_rows)
    if num_octets or num_flags:
        octets = stream[4 * num_words * num_rows :]
        flags = np.unpackbits(octets[num_octets * num_rows :], count=num_flags * num_rows, bitorder="little")
        words[-1] = np.bitwise_or.reduce(flags.reshape(num_flags, num_rows) * _FLAGS[:num_flags], axis=0)
        for i in reversed(range(num_octets)):
            words[-1] <<= np.uint32(8)
            words[-1] |= octets[i * num_rows : (i + 1) * num_rows]
    return words


_FLAGS = np.uint8(1) << np.arange(8, dtype=np.uint8)[:, None]


def _planes(bits: int) -> tuple[int, int, int]:
    """Planes of 32-bit words, of bytes and of bits."""
    return bits // 32, bits % 32 // 8, bits % 8


@lru_cache(maxsize=8)
def _comparators(width: int) -> tuple[tuple[int, int], ...]:
    """Positions to put in order, one pair after the other, to sort ``width`` values: Batcher's odd-even merge sort."""
    pairs, half = [], 1
    while half < width:  # merges sorted runs of ``half`` values
        step = half
        while step:
            for start in range(step % half, width - step, 2 * step):
                for low in range(start, min(start + step, width - step)):
                    if low // (2 * half) == (low + step) // (2 * half):
                        pairs.append((low, low + step))
            step //= 2
        half *= 2
    return tuple(pairs)
