"""Sets of K out of E experts as integers of ceil(log2 C(E, K)) bits, and those integers as a string of bits.

    rank{c_1 < ... < c_K} = sum_i C(c_i, i),   0 <= rank < C(E, K)      (the combinatorial number system)

Integers below 2^63 are one 64-bit word, larger ones several 32-bit limbs, lowest first: arrays are uint64 [W, N].
"""

import math
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np

MAX_TOP_K = 64


class Combinations:
    """The K-subsets of 0..E-1, numbered; vectorised over rows. For 0 <= K <= 64, K <= E <= 65536."""

    block_rows = 1 << 15
    """Rows that fit into the cache together: callers hand over blocks of this size, a multiple of 8."""

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
        self._limb_dtype = np.dtype(f"<u{self.limb_bits // 8}")

    def rank(self, rows: np.ndarray) -> np.ndarray:
        """Number the sets: unsigned integers [N, K], ascending in each row -> uint64 [W, N]."""
        total = np.zeros((self.num_limbs, len(rows)), dtype=np.uint64)
        for slot, column in enumerate(self._columns()):
            chosen = rows[:, slot].astype(np.intp)
            for limb, binomials in zip(total, column, strict=True):
                limb += np.take(binomials, chosen, mode="clip")
        self._carry(total)
        return total

    def unrank(self, ranks: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
        """The inverse: uint64 [W, N] below C(E, K) -> dtype [N, K], ascending in each row. Overwrites ``ranks``."""
        rows = np.empty((ranks.shape[1], self.top_k), dtype=dtype)
        column = self._last_column
        for slot in reversed(range(self.top_k)):
            chosen = self._largest_at_most(column, ranks)
            rows[:, slot] = chosen
            self._subtract(ranks, column, chosen)
            lower = column[:, 1:].copy()
            self._subtract(lower, column, np.arange(lower.shape[1]))  # C(c, i) = C(c+1, i+1) - C(c, i+1)
            column = lower
        return rows

    def first_too_large(self, ranks: np.ndarray) -> int | None:
        """Position of the first rank that is not below C(E, K), None if all are."""
        mask = (1 << self.limb_bits) - 1
        limbs = [[(self.count >> (self.limb_bits * w)) & mask] for w in range(self.num_limbs)]
        wrong = _at_most(np.array(limbs, dtype=np.uint64), np.zeros(1, dtype=np.intp), ranks)
        return int(wrong.argmax()) if wrong.any() else None

    def pack(self, ranks: np.ndarray) -> np.ndarray:
        """Write ranks one after the other, lowest bit first: uint64 [W, N] -> uint8 [ceil(N * bits / 8)]."""
        octets = np.ascontiguousarray(ranks.T.astype(self._limb_dtype)).view(np.uint8)
        return np.packbits(np.unpackbits(octets, axis=1, count=self.bits, bitorder="little"), bitorder="little")

    def unpack(self, stream: np.ndarray, num_rows: int) -> np.ndarray:
        """The inverse: uint8 [ceil(N * bits / 8)] -> uint64 [W, N]."""
        bits = np.unpackbits(stream, count=num_rows * self.bits, bitorder="little").reshape(num_rows, self.bits)
        octets = np.zeros((num_rows, self.num_limbs * self._limb_dtype.itemsize), dtype=np.uint8)
        octets[:, : -(-self.bits // 8)] = np.packbits(bits, axis=1, bitorder="little")
        return octets.view(self._limb_dtype).T.astype(np.uint64, order="C")

    def num_bytes(self, num_rows: int) -> int:
        """Length of ``num_rows`` packed rows."""
        return -(-num_rows * self.bits // 8)

    def _columns(self) -> Iterator[np.ndarray]:
        """For i = 1..K, uint64 [W, E-K+i]: C(c, i) for all c that the i-th smallest expert can be."""
        column = np.zeros((self.num_limbs, self.num_experts - self.top_k), dtype=np.uint64)
        column[0] = 1  # C(c, 0)
        for _ in range(self.top_k):
            sums = np.zeros((self.num_limbs, column.shape[1] + 1), dtype=np.uint64)
            np.cumsum(column, axis=1, out=sums[:, 1:])  # at most 65536 limbs below 2^32
            self._carry(sums)
            column = sums
            yield column

    @cached_property
    def _last_column(self) -> np.ndarray:
        """One column is kept and not all: a header alone must not make the reader ask for much memory."""
        return deque(self._columns(), maxlen=1).pop() if self.top_k else np.empty(0, dtype=np.uint64)

    def _largest_at_most(self, column: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """The largest c with column[c] <= rank: uint64 [W, n] ascending, uint64 [W, N] -> intp [N]."""
        if self.num_limbs == 1:
            return np.searchsorted(column[0], ranks[0], side="right") - 1
        # Floats are within 2^-47 of the numbers, and neighbouring binomials further apart: one exact step is left.
        chosen = np.searchsorted(self._as_float(column) * (1 + 2.0**-40), self._as_float(ranks), side="right") - 1
        fits = _at_most(column, chosen + 1, ranks) & (chosen + 1 < column.shape[1])
        return chosen + fits

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


def _at_most(column: np.ndarray, index: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """bool [N], column[:, index] <= ranks as numbers of W limbs; an index beyond the column stands for its last."""
    result = np.ones(ranks.shape[1], dtype=bool)
    for binomials, limb in zip(column, ranks, strict=True):
        taken = np.take(binomials, index, mode="clip")
        result = (taken < limb) | ((taken == limb) & result)
    return result
