from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from megarl.core.routing.combinations import Combinations


def as_integers(limbs: np.ndarray, limb_bits: int) -> list[int]:
    return [sum(int(limb) << (limb_bits * w) for w, limb in enumerate(column)) for column in limbs.T]


def random_rows(seed: int, num_rows: int, num_experts: int, top_k: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = [np.sort(generator.choice(num_experts, top_k, replace=False)) for _ in range(num_rows)]
    # The extremes of every column: all lowest, all highest, and one high expert above the lowest ones.
    edges = [np.arange(top_k), np.arange(num_experts - top_k, num_experts), np.r_[: top_k - 1, num_experts - 1]]
    return np.array(edges + rows, dtype=np.uint16)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 2), (5, 5), (7, 3), (9, 1), (10, 8), (16, 4)])
def test_small_sets_are_numbered_in_colexicographic_order(num_experts, top_k):
    sets = Combinations(num_experts, top_k)
    everything = sorted(itertools.combinations(range(num_experts), top_k), key=lambda chosen: chosen[::-1])
    rows = np.array(everything, dtype=np.uint8)
    ranks = sets.rank(rows)
    assert ranks[0].tolist() == list(range(len(everything)))
    assert sets.bits == math.ceil(math.log2(len(everything)))
    np.testing.assert_array_equal(sets.unrank(ranks, np.uint8), rows)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(128, 8), (256, 8), (384, 8), (66, 33), (67, 33), (68, 34), (512, 10), (512, 22), (1024, 64), (65536, 8)],
)
def test_large_sets_against_exact_integers(num_experts, top_k):
    sets = Combinations(num_experts, top_k)
    rows = random_rows(0, 300, num_experts, top_k)
    expected = [sum(math.comb(int(c), i + 1) for i, c in enumerate(row)) for row in rows]
    ranks = sets.rank(rows)
    assert as_integers(ranks, sets.limb_bits) == expected
    assert expected[1] == math.comb(num_experts, top_k) - 1
    assert sets.first_too_large(ranks) is None
    np.testing.assert_array_equal(sets.unrank(ranks, np.uint16), rows)


def test_every_boundary_between_two_largest_experts():
    """Where the largest expert changes, the rank steps from C(c, K) - 1 to C(c, K): a search must not be off by one."""
    for num_experts, top_k in ((256, 8), (300, 12)):
        sets = Combinations(num_experts, top_k)
        rows = [[*range(c - top_k, c)] for c in range(top_k, num_experts + 1)]
        rows += [[*range(top_k - 1), c] for c in range(top_k - 1, num_experts)]
        wanted = np.array(rows, dtype=np.uint16)
        np.testing.assert_array_equal(sets.unrank(sets.rank(wanted), np.uint16), wanted)


def test_the_largest_case():
    """C(65536, 64): 729 bits, tables too large to keep."""
    sets = Combinations(65536, 64)
    assert sets.bits == math.ceil(math.log2(math.comb(65536, 64)))
    rows = random_rows(1, 5, 65536, 64)
    expected = [sum(math.comb(int(c), i + 1) for i, c in enumerate(row)) for row in rows]
    ranks = sets.rank(rows)
    assert as_integers(ranks, sets.limb_bits) == expected
    np.testing.assert_array_equal(sets.unrank(sets.unpack(sets.pack(ranks), len(rows)), np.uint16), rows)


@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (4, 2), (128, 8), (66, 33), (512, 10), (512, 22)])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 63, 64, 65, 200])
def test_rows_stand_back_to_back_lowest_bit_first(num_experts, top_k, num_rows):
    sets = Combinations(num_experts, top_k)
    ranks = sets.rank(random_rows(2, 200, num_experts, top_k)[:num_rows])
    stream = sets.pack(ranks)
    assert len(stream) == sets.num_bytes(num_rows) == math.ceil(num_rows * sets.bits / 8)
    number = int.from_bytes(stream.tobytes(), "little")
    read = [(number >> (row * sets.bits)) & ((1 << sets.bits) - 1) for row in range(num_rows)]
    assert read == as_integers(ranks, sets.limb_bits)
    assert number >> (num_rows * sets.bits) == 0
    np.testing.assert_array_equal(sets.unpack(stream, num_rows), ranks)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (512, 22)])
def test_a_number_beyond_the_last_set_is_found(num_experts, top_k):
    sets = Combinations(num_experts, top_k)
    ranks = sets.rank(random_rows(3, 9, num_experts, top_k))
    for beyond in (sets.count, (1 << sets.bits) - 1):
        wrong = ranks.copy()
        for w in range(sets.num_limbs):
            wrong[w, 7] = (beyond >> (w * sets.limb_bits)) & ((1 << sets.limb_bits) - 1)
        assert sets.first_too_large(wrong) == 7


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 65), (65537, 2), (4, 5)])
def test_limits(num_experts, top_k):
    with pytest.raises(ValueError, match=f"top-{top_k} of {num_experts}"):
        Combinations(num_experts, top_k)
