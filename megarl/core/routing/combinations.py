"""Sets of K out of E experts as integers of ceil(log2 C(E, K)) bits, and those integers as a string of bits.

    rank{c_1 < ... < c_K} = sum_i C(c_i, i),   0 <= rank < C(E, K)      (the combinatorial number system)

Integers below 2^63 are one 64-bit word, larger ones several 32-bit limbs, lowest first: arrays are uint64 [W, N].
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

MAX_TOP_K = 64
_GROUP = 64
"""Rows that fill whole 64-bit words together, whatever their width."""
_MANTISSA_BITS = 7
_KEPT_WORDS = 1 << 22
"""Binomials up to this number of words (32 MiB) are kept between blocks; more of them are computed for each block."""


class Combinations:
    """The K-subsets of 0..E-1, numbered; vectorised over rows. For 0 <= K <= 64, K <= E <= 65536."""

    block_rows = 1 << 15
    """Rows that fit into the cache together: callers hand over blocks of this size, a multiple of 64."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        if not (0 <= top_k <= min(num_experts, MAX_TOP_K) and num_experts <= 65536):
            raise ValueError(f"top-{top_k} of {num_experts}; expected top-k up to {MAX_TOP_K}, experts up to 65536")
        self.num_experts = num_experts
        self.top_k = top_k
        self.count = math.comb(num_experts, top_k)
        """C(E, K)."""
        self.bits = (self.count - 1).bit_length()
        """ceil(log2 C(E, K)), the width of a row."""
        self.limb_bits = 64 if self.bits <= 63 else 32
        self.num_limbs = max(1, -(-self.bits // self.limb_bits))

    def rank(self, rows: np.ndarray) -> np.ndarray:
        """Number the sets: unsigned integers [N, K], ascending in each row -> uint64 [W, N]."""
        total = np.zeros((self.num_limbs, len(rows)), dtype=np.uint64)
        for slot, column in enumerate(self._ascending()):
            chosen = rows[:, slot].astype(np.intp)
            for limb, binomials in zip(total, column, strict=True):
                limb += np.take(binomials, chosen, mode="clip")
        self._carry(total)
        return total

    def unrank(self, ranks: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """The inverse: uint64 [W, N] below C(E, K) -> dtype [N, K], ascending in each row. Overwrites ``ranks``."""
        rows = np.empty((ranks.shape[1], self.top_k), dtype=dtype)
        for below, (column, search) in enumerate(self._descending()):
            chosen = search.largest_at_most(column, ranks, self._as_float(ranks))
            rows[:, self.top_k - 1 - below] = chosen
            self._subtract(ranks, column, chosen)
        return rows

    def first_too_large(self, ranks: np.ndarray) -> int | None:
        """Position of the first rank that is not below C(E, K), None if all are."""
        limit = self._limbs(self.count)[:, None]
        wrong = _at_most(limit, np.zeros(1, dtype=np.intp), ranks)
        return int(wrong.argmax()) if wrong.any() else None

    def pack(self, ranks: np.ndarray) -> np.ndarray:
        """Write ranks one after the other, lowest bit first: uint64 [W, N] -> uint8 [ceil(N * bits / 8)]."""
        num_rows = ranks.shape[1]
        groups = -(-num_rows // _GROUP)
        words = np.zeros((self.bits + 1, groups), dtype=np.uint64)  # one word more, for what spills over the end
        for limb, values in enumerate(ranks):
            padded = np.zeros(groups * _GROUP, dtype=np.uint64)
            padded[:num_rows] = values
            columns = np.ascontiguousarray(padded.reshape(groups, _GROUP).T)
            for slot in range(_GROUP):
                word, shift = divmod(slot * self.bits + limb * self.limb_bits, 64)
                words[word] |= columns[slot] << np.uint64(shift)
                if shift + self._width(limb) > 64:
                    words[word + 1] |= columns[slot] >> np.uint64(64 - shift)
        stream = np.ascontiguousarray(words[: self.bits].T).astype("<u8", copy=False)
        return stream.reshape(-1).view(np.uint8)[: self.num_bytes(num_rows)]

    def unpack(self, stream: np.ndarray, num_rows: int) -> np.ndarray:
        """The inverse: uint8 [ceil(N * bits / 8)] -> uint64 [W, N]."""
        if not self.bits:
            return np.zeros((1, num_rows), dtype=np.uint64)
        groups = -(-num_rows // _GROUP)
        padded = np.zeros(groups * self.bits * 8, dtype=np.uint8)
        padded[: len(stream)] = stream
        words = np.ascontiguousarray(padded.view("<u8").astype(np.uint64, copy=False).reshape(groups, self.bits).T)
        ranks = np.empty((self.num_limbs, num_rows), dtype=np.uint64)
        for limb in range(self.num_limbs):
            columns = np.empty((_GROUP, groups), dtype=np.uint64)
            width = self._width(limb)
            mask = np.uint64((1 << width) - 1)
            for slot in range(_GROUP):
                word, shift = divmod(slot * self.bits + limb * self.limb_bits, 64)
                value = words[word] >> np.uint64(shift)
                if shift + width > 64:
                    value |= words[word + 1] << np.uint64(64 - shift)
                np.bitwise_and(value, mask, out=columns[slot])
            ranks[limb] = columns.T.reshape(-1)[:num_rows]
        return ranks

    def num_bytes(self, num_rows: int) -> int:
        """Length of ``num_rows`` packed rows."""
        return -(-num_rows * self.bits // 8)

    def _width(self, limb: int) -> int:
        """Bits of a limb that a rank can use; the highest one is seldom full."""
        return min(self.limb_bits, self.bits - limb * self.limb_bits)

    def _limbs(self, value: int) -> np.ndarray:
        mask = (1 << self.limb_bits) - 1
        return np.array([(value >> (self.limb_bits * w)) & mask for w in range(self.num_limbs)], dtype=np.uint64)

    def _as_float(self, limbs: np.ndarray) -> np.ndarray:
        """float64, within 2^-47 of the value; below 2^1000, as C(65536, 64) is."""
        total = limbs[-1].astype(np.float64)
        for limb in limbs[-2::-1]:
            total = total * 2.0**self.limb_bits + limb
        return total

    def _carry(self, limbs: np.ndarray) -> None:
        """Bring every limb but the last below 2^32, in place; a single word never overflows."""
        for low, high in pairwise(limbs):
            high += low >> np.uint64(32)
            low &= np.uint64(0xFFFFFFFF)

    def _subtract(self, ranks: np.ndarray, column: np.ndarray, chosen: np.ndarray) -> None:
        borrow = np.uint64(0)
        for limb, binomials in zip(ranks, column, strict=True):
            limb -= np.take(binomials, chosen, mode="clip")
            if self.num_limbs > 1:
                limb -= borrow
                borrow = limb >> np.uint64(63)
                limb &= np.uint64(0xFFFFFFFF)

    def _next_column(self, column: np.ndarray) -> np.ndarray:
        """C(c, i+1) for c = 0..n from C(c, i) for c = 0..n-1: the sums of all that come before."""
        sums = np.zeros((self.num_limbs, column.shape[1] + 1), dtype=np.uint64)
        np.cumsum(column, axis=1, out=sums[:, 1:])  # at most 65536 limbs below 2^32
        self._carry(sums)
        return sums

    def _ascending(self) -> Iterator[np.ndarray] | Sequence[np.ndarray]:
        """For i = 1..K, uint64 [W, E-K+i]: C(c, i) for all c that the i-th smallest expert can be."""
        return self._kept if self._is_small else self._columns()

    @property
    def _is_small(self) -> bool:
        return self.top_k * self.num_experts * self.num_limbs <= _KEPT_WORDS

    def _columns(self) -> Iterator[np.ndarray]:
        column = np.zeros((self.num_limbs, self.num_experts - self.top_k), dtype=np.uint64)
        column[0] = 1  # C(c, 0)
        for _ in range(self.top_k):
            column = self._next_column(column)
            yield column

    @cached_property
    def _kept(self) -> list[np.ndarray]:
        return list(self._columns())

    def _descending(self) -> Iterator[tuple[np.ndarray, _Search]] | Sequence[tuple[np.ndarray, _Search]]:
        """The same for i = K..1, each with what finds an expert by its rank."""
        return self._kept_searches if self._is_small else self._searches()

    @cached_property
    def _kept_searches(self) -> list[tuple[np.ndarray, _Search]]:
        return [(column, _Search(self._as_float(column))) for column in reversed(self._kept)]

    def _searches(self) -> Iterator[tuple[np.ndarray, _Search]]:
        """One after the other, for tables that are too large to keep."""
        (column,) = deque(self._columns(), maxlen=1)
        for _ in range(self.top_k):
            yield column, _Search(self._as_float(column))
            lower = column[:, 1:].copy()
            self._subtract(lower, column, np.arange(lower.shape[1]))  # C(c, i) = C(c+1, i+1) - C(c, i+1)
            column = lower


class _Search:
    """Finds the largest c with column[c] <= rank: a table over the leading bits of the rank, then bisection."""

    def __init__(self, column: np.ndarray) -> None:
        """column: float64 [n], ascending, within 2^-47 of the binomials."""
        self._shift = 52 - _MANTISSA_BITS
        self._first = int(np.float64(1.0).view(np.int64)) >> self._shift
        last = int(np.maximum(column[-1] * 2, 1.0).view(np.int64)) >> self._shift
        edges = (np.arange(self._first, last + 2) << self._shift).view(np.float64)
        edges[0] = 0.0
        rounding = 2.0**-40
        low = np.searchsorted(column, edges[:-1] * (1 - rounding), side="right") - 1
        high = np.searchsorted(column, edges[1:] * (1 + rounding), side="right") - 1
        self._guess = np.maximum(low, 0)
        self._span = int((high - self._guess).max())

    def largest_at_most(self, column: np.ndarray, ranks: np.ndarray, approximate: np.ndarray) -> np.ndarray:
        """column: uint64 [W, n]; ranks: uint64 [W, N], of which ``approximate`` is the float64 [N] -> intp [N]."""
        key = approximate.view(np.int64) >> self._shift
        key -= self._first
        chosen = np.take(self._guess, key, mode="clip")
        for doubling in reversed(range(self._span.bit_length())):
            tried = chosen + (1 << doubling)
            fits = _at_most(column, tried, ranks)
            fits &= tried < column.shape[1]  # _at_most compares with the last entry there
            chosen += fits.astype(np.intp) << doubling
        return chosen


def _at_most(column: np.ndarray, index: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """bool [N], column[:, index] <= ranks as numbers of W limbs; an index beyond the column stands for its last."""
    result: np.ndarray | None = None
    for binomials, limb in zip(column, ranks, strict=True):
        taken = np.take(binomials, index, mode="clip")
        result = taken <= limb if result is None else (taken < limb) | ((taken == limb) & result)
    assert result is not None
    return result
