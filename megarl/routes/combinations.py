"""Sets of K out of E experts as integers of ceil(log2 C(E, K)) bits, for any E and K.

    rank{c_1 < ... < c_K} = sum_i C(c_i, i),   0 <= rank < C(E, K)      (the combinatorial number system)

Integers are 32-bit limbs, lowest first: uint64 [W, N], so that sums and differences fit before they are carried.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

MAX_TOP_K = 64
_LOW = np.uint64(0xFFFFFFFF)


class Combinations:
    """The K-subsets of 0..E-1, numbered; vectorised over rows. For 0 <= K <= 64, K <= E <= 65536."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        if not (0 <= top_k <= min(num_experts, MAX_TOP_K) and num_experts <= 65536):
            raise ValueError(f"top-{top_k} of {num_experts}; expected top-k up to {MAX_TOP_K}, experts up to 65536")
        self.num_experts = num_experts
        self.top_k = top_k
        self.count = math.comb(num_experts, top_k)
        """C(E, K)."""
        self.bits = (self.count - 1).bit_length()
        """ceil(log2 C(E, K)), the width of a row."""
        self._num_limbs = -(-self.count.bit_length() // 32)

    def rank(self, columns: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
        """Number the sets: K columns [N], ascending in a row -> uint32 [ceil(bits / 32), N], lowest first."""
        total = np.zeros((self._num_limbs, num_rows), dtype=np.uint64)
        for column, numbers in zip(columns, self._columns(), strict=True):
            experts = column.astype(np.intp)
            for limb, binomials in zip(total, numbers, strict=True):
                limb += np.take(binomials, experts, mode="clip")
        self._carry(total)
        return total[: -(-self.bits // 32)].astype(np.uint32)

    def unrank(self, words: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The inverse: uint32 [W, N] -> ``rows``, integers [N, K]. Returns bool [N], True where it is of no set."""
        ranks = np.zeros((self._num_limbs, len(rows)), dtype=np.uint64)
        ranks[: len(words)] = words
        limbs = [[(self.count >> (32 * w)) & 0xFFFFFFFF] for w in range(self._num_limbs)]
        wrong = _at_most(np.array(limbs, dtype=np.uint64), np.zeros(1, dtype=np.intp), ranks)
        column = self._last_column
        for slot in reversed(range(self.top_k)):
            experts = self._largest_at_most(column, ranks)
            rows[:, slot] = experts
            self._subtract(ranks, column, experts)
            lower = column[:, 1:].copy()
            self._subtract(lower, column, np.arange(lower.shape[1]))  # C(c, i) = C(c+1, i+1) - C(c, i+1)
            column = lower
        return wrong

    def _columns(self) -> Iterator[np.ndarray]:
        """For i = 1..K, uint64 [W, E-K+i]: C(c, i) for all c that the i-th smallest expert can be."""
        column = np.zeros((self._num_limbs, self.num_experts - self.top_k), dtype=np.uint64)
        column[0] = 1  # C(c, 0)
        for _ in range(self.top_k):
            sums = np.zeros((self._num_limbs, column.shape[1] + 1), dtype=np.uint64)
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
        if self.bits < 64:
            return np.searchsorted(_join(column, np.uint64), _join(ranks, np.uint64), side="right") - 1
        # Floats are within 2^-47 of the numbers, and neighbouring binomials further apart: one exact step is left.
        ends = _join(column, np.float64) * (1 + 2.0**-40)
        index = np.searchsorted(ends, _join(ranks, np.float64), side="right") - 1
        fits = _at_most(column, index + 1, ranks) & (index + 1 < column.shape[1])
        return index + fits

    def _carry(self, limbs: np.ndarray) -> None:
        """Bring every limb but the last below 2^32, in place."""
        for low, high in pairwise(limbs):
            high += low >> np.uint64(32)
            low &= _LOW

    def _subtract(self, ranks: np.ndarray, column: np.ndarray, index: np.ndarray) -> None:
        borrow = np.uint64(0)
        for limb, binomials in zip(ranks, column, strict=True):
            limb -= np.take(binomials, index, mode="clip") + borrow
            borrow = limb >> np.uint64(63)
            limb &= _LOW


def _join(limbs: np.ndarray, dtype: type[np.uint64] | type[np.float64]) -> np.ndarray:
    """The numbers [N]; float64 is within 2^-47 of them, and they are below 2^1000, as C(65536, 64) is."""
    total = limbs[-1].astype(dtype)
    for limb in limbs[-2::-1]:
        total = total * dtype(2**32) + limb.astype(dtype)
    return total


def _at_most(column: np.ndarray, index: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """bool [N], column[:, index] <= ranks as numbers of W limbs; an index beyond the column stands for its last."""
    result = np.ones(ranks.shape[1], dtype=bool)
    for binomials, limb in zip(column, ranks, strict=True):
        binomial = np.take(binomials, index, mode="clip")
        result = (binomial < limb) | ((binomial == limb) & result)
    return result
