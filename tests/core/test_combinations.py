from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from megarl.routes.numbering import MAX_PREFIX_BITS, Cells, Combinations
from megarl.routes.rows import BLOCK_ROWS, blocks, find_doubled, num_bytes, pack, sort_columns, unpack


def as_integers(words: np.ndarray) -> list[int]:
    return [sum(int(word) << (32 * w) for w, word in enumerate(column)) for column in words.T]


def as_words(numbers: list[int], bits: int) -> np.ndarray:
    words = [[(number >> 32 * w) & 0xFFFFFFFF for number in numbers] for w in range(-(-bits // 32))]
    return np.array(words, dtype=np.uint32).reshape(-(-bits // 32), len(numbers))


def random_rows(seed: int, num_rows: int, num_experts: int, top_k: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    rows = [np.sort(generator.choice(num_experts, top_k, replace=False)) for _ in range(num_rows)]
    # The extremes of every column: all lowest, all highest, and one high expert above the lowest ones.
    edges = [np.arange(top_k), np.arange(num_experts - top_k, num_experts), np.r_[: top_k - 1, num_experts - 1]]
    return np.array(edges + rows, dtype=np.uint8 if num_experts <= 256 else np.uint16)


def rank(sets: Cells | Combinations, rows: np.ndarray) -> np.ndarray:
    return sets.rank(list(rows.T.copy()), len(rows))


def unrank(sets: Cells | Combinations, words: np.ndarray, dtype: type = np.uint16) -> tuple[np.ndarray, np.ndarray]:
    rows = np.empty((words.shape[1], sets.top_k), dtype=np.uint8 if isinstance(sets, Cells) else dtype)
    return rows, sets.unrank(words, rows)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 2), (5, 5), (7, 3), (9, 1), (10, 8), (16, 4)])
def test_small_sets_are_numbered_in_colexicographic_order(num_experts, top_k):
    sets = Combinations(num_experts, top_k)
    everything = sorted(itertools.combinations(range(num_experts), top_k), key=lambda chosen: chosen[::-1])
    rows = np.array(everything, dtype=np.uint8)
    words = rank(sets, rows)
    assert sets.bits == math.ceil(math.log2(len(everything)))
    assert as_integers(words) == (list(range(len(everything))) if sets.bits else [0])
    found, wrong = unrank(sets, words)
    np.testing.assert_array_equal(found, rows)
    assert not wrong.any()


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [
        (128, 8),
        (256, 8),
        (384, 8),
        (63, 31),
        (66, 33),
        (67, 33),
        (68, 34),
        (512, 10),
        (512, 22),
        (1024, 64),
        (65536, 8),
    ],
)
def test_large_sets_against_exact_integers(num_experts, top_k):
    sets = Combinations(num_experts, top_k)
    rows = random_rows(0, 300, num_experts, top_k)
    expected = [sum(math.comb(int(c), i + 1) for i, c in enumerate(row)) for row in rows]
    words = rank(sets, rows)
    assert as_integers(words) == expected
    assert expected[1] == math.comb(num_experts, top_k) - 1
    found, wrong = unrank(sets, words)
    np.testing.assert_array_equal(found, rows)
    assert not wrong.any()


def test_every_boundary_between_two_largest_experts():
    """Where the largest expert changes, the rank steps from C(c, K) - 1 to C(c, K): a search must not be off by one."""
    for num_experts, top_k in ((256, 8), (300, 12)):
        sets = Combinations(num_experts, top_k)
        rows = [[*range(c - top_k, c)] for c in range(top_k, num_experts + 1)]
        rows += [[*range(top_k - 1), c] for c in range(top_k - 1, num_experts)]
        wanted = np.array(rows, dtype=np.uint16)
        np.testing.assert_array_equal(unrank(sets, rank(sets, wanted))[0], wanted)


def test_the_largest_case():
    """C(65536, 64): 729 bits, tables too large to keep."""
    sets = Combinations(65536, 64)
    assert sets.bits == math.ceil(math.log2(math.comb(65536, 64)))
    rows = random_rows(1, 5, 65536, 64)
    expected = [sum(math.comb(int(c), i + 1) for i, c in enumerate(row)) for row in rows]
    words = rank(sets, rows)
    assert as_integers(words) == expected
    stream = np.frombuffer(pack(words, sets.bits), dtype=np.uint8)
    np.testing.assert_array_equal(unrank(sets, unpack(stream, len(rows), sets.bits))[0], rows)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (512, 22)])
def test_a_number_beyond_the_last_set_is_found(num_experts, top_k):
    sets = Combinations(num_experts, top_k)
    numbers = as_integers(rank(sets, random_rows(3, 9, num_experts, top_k)))
    for beyond in (sets.count, (1 << sets.bits) - 1):
        numbers[7] = beyond
        assert unrank(sets, as_words(numbers, sets.bits))[1].tolist() == [i == 7 for i in range(12)]


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 65), (65537, 2), (4, 5)])
def test_limits(num_experts, top_k):
    with pytest.raises(ValueError, match=f"top-{top_k} of {num_experts}"):
        Combinations(num_experts, top_k)


def colex(chosen: list[int]) -> int:
    return sum(math.comb(c, i + 1) for i, c in enumerate(chosen))


def numbers_by_definition(num_experts: int, top_k: int, rows: np.ndarray) -> list[int]:
    """The formula of ``Cells`` in Python's integers, one cell and one row at a time."""
    middle = (top_k - 1) // 2
    low = top_k - 2 - middle
    cells = [(p, q) for q in range(num_experts) for p in range(q)]
    sizes = {(p, q): math.comb(p, low) * math.comb(q - p - 1, middle) for p, q in cells}
    bits = (math.comb(num_experts, top_k) - 1).bit_length()
    shift = bits
    while sum(-(-size >> shift) for size in sizes.values()) > 1 << (bits - shift):
        shift -= 1
    shift = 0 if bits - shift > MAX_PREFIX_BITS else shift
    starts, end = {}, 0
    for cell, size in sizes.items():
        starts[cell] = end
        end += -(-size >> shift) << shift
    numbers = []
    for row in rows.tolist():
        p, q = row[low], row[-1]
        second = colex([c - p - 1 for c in row[low + 1 : -1]])
        numbers.append(starts[p, q] + colex(row[:low]) * math.comb(q - p - 1, middle) + second)
    return numbers


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(2, 2), (4, 2), (5, 5), (7, 3), (9, 4), (11, 6), (12, 7), (10, 8), (16, 4), (13, 5)]
)
def test_cells_number_every_small_set_once_and_refuse_every_other_number(num_experts, top_k):
    sets = Cells(num_experts, top_k)
    rows = np.array(list(itertools.combinations(range(num_experts), top_k)), dtype=np.uint8)
    expected = numbers_by_definition(num_experts, top_k, rows)
    assert len(set(expected)) == len(rows)
    if sets.bits:
        assert as_integers(rank(sets, rows)) == expected
    found, wrong = unrank(sets, as_words(list(range(1 << sets.bits)), sets.bits))
    np.testing.assert_array_equal(found[expected], rows)
    assert np.flatnonzero(~wrong).tolist() == sorted(expected)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(128, 8), (256, 8), (64, 6), (160, 6), (32, 4), (256, 2), (256, 7), (222, 5), (206, 8)],
)
def test_cells_of_known_models_and_of_those_without_room_between_cells(num_experts, top_k):
    """222/5 and 206/8 fill their bits but for 0.02 % and 0.4 %: their cells are searched for."""
    sets = Cells(num_experts, top_k)
    assert sets.bits == math.ceil(math.log2(math.comb(num_experts, top_k)))
    rows = random_rows(0, 2000, num_experts, top_k)
    words = rank(sets, rows)
    assert as_integers(words) == numbers_by_definition(num_experts, top_k, rows)
    found, wrong = unrank(sets, words)
    np.testing.assert_array_equal(found, rows)
    assert not wrong.any()


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (256, 8), (206, 8)])
def test_any_number_is_refused_or_gives_a_set_that_has_this_number(num_experts, top_k):
    sets = Cells(num_experts, top_k)
    numbers = np.random.default_rng(0).integers(0, 1 << sets.bits, 200_000).tolist()
    numbers += [0, (1 << sets.bits) - 1]
    words = as_words(numbers, sets.bits)
    found, wrong = unrank(sets, words)
    assert (found[~wrong, 1:] > found[~wrong, :-1]).all()
    assert found[~wrong].max() < num_experts
    np.testing.assert_array_equal(rank(sets, found[~wrong]), words[:, ~wrong])
    share = math.comb(num_experts, top_k) / 2**sets.bits
    assert np.count_nonzero(~wrong) / len(numbers) == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("bits", [0, 1, 7, 8, 9, 31, 32, 33, 41, 64, 69])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 65])
def test_numbers_stand_in_planes_of_words_bytes_and_bits(bits, num_rows):
    generator = np.random.default_rng(bits)
    numbers = [int.from_bytes(generator.bytes(9), "little") % (1 << bits) for _ in range(num_rows)]
    words = as_words(numbers, bits)
    data, expected = pack(words, bits), b""
    for w in range(bits // 32):
        expected += b"".join(((n >> 32 * w) & 0xFFFFFFFF).to_bytes(4, "little") for n in numbers)
    for octet in range(bits // 32 * 4, bits // 8):
        expected += bytes((n >> 8 * octet) & 0xFF for n in numbers)
    flags = [(n >> bit) & 1 for bit in range(bits // 8 * 8, bits) for n in numbers]
    expected += sum(flag << i for i, flag in enumerate(flags)).to_bytes(-(-len(flags) // 8), "little")
    assert data == expected
    assert len(data) == num_bytes(num_rows, bits) == math.ceil(num_rows * bits / 8)
    np.testing.assert_array_equal(unpack(np.frombuffer(data, dtype=np.uint8), num_rows, bits), words)


@pytest.mark.parametrize("width", [0, 1, 2, 3, 5, 6, 8, 10, 13, 16])
def test_sorting_all_rows_of_zeros_and_ones_sorts_any(width):
    """The principle of zeros and ones: compare-and-exchange steps that sort these sort every row."""
    rows = ((np.arange(1 << width)[:, None] >> np.arange(width)) & 1).astype(np.uint8)
    before = rows.copy()
    columns = sort_columns(rows)
    assert len(columns) == width
    if width:
        np.testing.assert_array_equal(np.stack(columns, axis=1), np.sort(before, axis=1))
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize(("width", "dtype"), [(1, np.uint8), (22, np.uint16), (64, np.uint16)])
def test_sorting_wide_rows(width, dtype):
    rows = np.random.default_rng(0).integers(0, 250, (300, width)).astype(dtype)
    np.testing.assert_array_equal(np.stack(sort_columns(rows), axis=1), np.sort(rows, axis=1))


def test_doubled_rows_are_found_wherever_they_are():
    num_rows = 2 * BLOCK_ROWS + 5
    rows = np.tile(np.arange(8, dtype=np.uint8), (num_rows, 1))
    assert find_doubled(rows).tolist() == []
    assert find_doubled(rows[:, :1]).tolist() == []
    doubled = {0: (0, 7), BLOCK_ROWS - 1: (3, 4), BLOCK_ROWS: (2, 6), num_rows - 1: (0, 1)}
    for row, (one, other) in doubled.items():
        rows[row, other] = rows[row, one]
    assert find_doubled(rows).tolist() == sorted(doubled)


def test_blocks_cover_the_rows():
    for num_rows in (0, 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS):
        assert [row for block in blocks(num_rows) for row in range(num_rows)[block]] == list(range(num_rows))
    assert BLOCK_ROWS % 8 == 0
