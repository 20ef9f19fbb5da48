"""Numbers of ceil(log2 C(E, K)) bits for sets of K out of E experts: ``Cells`` for usual E, ``Combinations`` for any.

    colex {c_1 < ... < c_K} = sum_i C(c_i, i)      (the combinatorial number system)

``Cells`` reads sets of 2 to 8 out of up to 256 experts from tables:

    row   = low | p | middle | q            ascending; middle has (K - 1) // 2 experts, low the rest
    rank  = start(p, q) + colex(low) * C(q - p - 1, |middle|) + colex(middle - p - 1)

The numbers of a *cell*, a pair of pivots (p, q), begin at a multiple of 2^g, with the largest g that lets all cells fit
into the bits: those above g tell the cell. Where that takes more than 2^18 entries, g is 0, and the cell is searched.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

MAX_TOP_K = 64
"""Of ``Combinations``."""
MOST_EXPERTS, LEAST_TOP_K, MOST_TOP_K = 256, 2, 8
MAX_PREFIX_BITS = 18


class Cells:
    """The K-subsets of 0..E-1, numbered; vectorised over rows. For 2 <= K <= min(8, E), E <= 256."""

    def __init__(self, num_experts: int, top_k: int) -> None:
        self.bits = (math.comb(num_experts, top_k) - 1).bit_length()
        """ceil(log2 C(E, K)), the width of a row."""
        self.num_experts, self.top_k = num_experts, top_k
        self._middle = middle = (top_k - 1) // 2
        self._low = low = top_k - 2 - middle
        q, p = np.tril_indices(num_experts, -1)  # ascending by q, then p
        num_low, num_middle = _choose(p, low), _choose(q - p - 1, middle)
        starts, self._shift = _place(num_low * num_middle, self.bits)
        self._start, self._width = np.zeros((2, num_experts**2), dtype=np.int64)
        self._start[q * num_experts + p], self._width[q * num_experts + p] = starts, num_middle
        pivots = (p << 8 * low) | (p + 1) * sum(1 << 8 * k for k in range(low + 1, top_k - 1)) | (q << 8 * (top_k - 1))
        real = num_low * num_middle > 0
        self._starts, self._pivots = starts[real], pivots[real]
        self._num_low, self._num_middle = num_low[real].astype(np.float64), num_middle[real].astype(np.float64)
        self._cell_of_prefix = None
        if self.bits - self._shift <= MAX_PREFIX_BITS:
            prefixes = np.arange(1 << self.bits - self._shift)
            cells = np.searchsorted(self._starts >> self._shift, prefixes, side="right") - 1
            self._cell_of_prefix = cells.astype(np.uint16)
        self._subsets = {size: _subsets(num_experts, size) for size in {low, middle}}

    def rank(self, columns: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
        """Number the sets: K columns uint8 [N], ascending in a row -> uint32 [ceil(bits / 32), N], lowest first."""
        p, q = columns[self._low], columns[-1]
        cell = q.astype(np.intp)
        cell *= self.num_experts
        cell += p
        number = np.take(self._width, cell)
        number *= _colex(columns[: self._low], num_rows)
        number += np.take(self._start, cell)
        p = p + np.uint8(1)
        number += _colex([expert - p for expert in columns[self._low + 1 : -1]], num_rows)
        return _to_words(number, self.bits)

    def unrank(self, words: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The inverse: uint32 [W, N] -> ``rows``, uint8 [N, K]. Returns bool [N], True where a number is of no set."""
        number = np.zeros(len(rows), dtype=np.int64)
        for word in words[::-1]:
            number <<= 32
            number |= word
        cell = self._find_cells(number)
        number -= np.take(self._starts, cell)
        offset = number.astype(np.float64)  # below 2^49: quotient and product come out exact
        num_middle = np.take(self._num_middle, cell)
        first = offset / num_middle
        np.floor(first, out=first)
        num_middle *= first
        offset -= num_middle
        experts = np.take(self._subsets[self._middle], offset.astype(np.intp), mode="clip").astype(np.int64)
        experts <<= 8 * (self._low + 1)
        experts += np.take(self._pivots, cell)
        experts += np.take(self._subsets[self._low], first.astype(np.intp), mode="clip")
        octets = experts.astype("<i8", copy=False).view(np.uint8).reshape(len(rows), 8)
        for slots in [slice(8)] if self.top_k == 8 else range(self.top_k):
            rows[:, slots] = octets[:, slots]
        return first >= np.take(self._num_low, cell)

    def _find_cells(self, number: np.ndarray) -> np.ndarray:
        if self._cell_of_prefix is None:
            return np.searchsorted(self._starts, number, side="right") - 1
        return np.take(self._cell_of_prefix, number >> self._shift).astype(np.intp)


class Combinations:
    """The K-subsets of 0..E-1, numbered by ``colex``; vectorised over rows. For 0 <= K <= 64, K <= E <= 65536.

    Numbers above 63 bits, which no usual model needs, are Python's integers, and take a hundred times as long.
    """

    def __init__(self, num_experts: int, top_k: int) -> None:
        if not (0 <= top_k <= min(num_experts, MAX_TOP_K) and num_experts <= 65536):
            raise ValueError(f"top-{top_k} of {num_experts}; expected top-k up to {MAX_TOP_K}, experts up to 65536")
        self.num_experts, self.top_k = num_experts, top_k
        self.count = math.comb(num_experts, top_k)
        """C(E, K)."""
        self.bits = (self.count - 1).bit_length()
        """ceil(log2 C(E, K)), the width of a row."""
        self._dtype = np.int64 if self.bits < 63 else object

    def rank(self, columns: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
        """Number the sets: K columns [N], ascending in a row -> uint32 [ceil(bits / 32), N], lowest first."""
        total = np.zeros(num_rows, self._dtype)
        for column, binomials in zip(columns, self._columns(), strict=True):
            total += np.take(binomials, column)
        return _to_words(total, self.bits)

    def unrank(self, words: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The inverse: uint32 [W, N] -> ``rows``, integers [N, K]. Returns bool [N], True where it is of no set."""
        number = np.zeros(len(rows), self._dtype)
        for word in words[::-1]:
            number = (number << 32) + word.astype(self._dtype)
        is_wrong = (number >= self.count).astype(bool)
        # The last column is kept and not all: a header alone must not ask for much memory.
        column, *_ = deque(self._columns(), maxlen=1) or [np.zeros(0, self._dtype)]
        for slot in reversed(range(self.top_k)):
            experts = np.searchsorted(column, number, side="right") - 1
            rows[:, slot] = experts
            number = number - column[experts]
            column = np.diff(column)  # C(c, i) = C(c+1, i+1) - C(c, i+1)
        return is_wrong

    def _columns(self) -> Iterator[np.ndarray]:
        """For i = 1..K, integers [E-K+i]: C(c, i) for all c that the i-th smallest expert can be."""
        column = np.ones(self.num_experts - self.top_k, self._dtype)  # C(c, 0)
        for _ in range(self.top_k):
            column = np.concatenate([np.zeros(1, self._dtype), np.cumsum(column)])
            yield column


def _to_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Integers [N] of so many bits -> uint32 [ceil(bits / 32), N], lowest first."""
    words = np.empty((-(-bits // 32), len(numbers)), dtype=np.uint32)
    for i, word in enumerate(words):
        np.copyto(
            word, numbers >> 32 * i if numbers.dtype != object else numbers >> 32 * i & 0xFFFFFFFF, casting="unsafe"
        )
    return words


def _place(sizes: np.ndarray, bits: int) -> tuple[np.ndarray, int]:
    """The first number of each cell, int64, and g."""
    for shift in range(bits, max(0, bits - MAX_PREFIX_BITS) - 1, -1):
        granules = -(-sizes >> shift)
        if granules.sum() <= 1 << bits - shift:
            return (np.cumsum(granules) - granules) << shift, shift
    return np.cumsum(sizes) - sizes, 0


def _choose(n: np.ndarray, k: int) -> np.ndarray:
    """C(n, k) of integers 0..255, for k up to 3."""
    if k == 0:
        return np.ones_like(n)
    product = n
    for j in range(1, k):
        product = product * (n - j)  # is 0 before a factor is negative, or wraps
    return product // math.factorial(k) if k > 1 else product


def _colex(columns: Sequence[np.ndarray], num_rows: int) -> np.ndarray:
    """sum_i C(columns[i], i + 1), uint32 [N], of at most 3 columns uint8 [N], ascending in each row."""
    total = np.zeros(num_rows, dtype=np.uint32)
    for i, column in enumerate(columns):
        total += _choose(column.astype(np.uint32), i + 1)
    return total


def _subsets(num_experts: int, size: int) -> np.ndarray:
    """All subsets in the order of ``_colex``, one byte per expert, the lowest first: uint32 [C(E, size)]."""
    subsets = np.zeros(1, dtype=np.uint32)
    for i in range(size):
        fewer, counts = subsets, _choose(np.arange(num_experts), i)
        subsets = np.empty(counts.sum(), dtype=np.uint32)
        for expert, stop in enumerate(np.cumsum(counts)):
            subsets[stop - counts[expert] : stop] = fewer[: counts[expert]] | np.uint32(expert << 8 * i)
    return subsets
