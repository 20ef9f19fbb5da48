"""Names the likely mistake behind wrong rows: each hypothesis predicts the experts, and the first that fits wins.

A hypothesis counts for the share of wrong (row, layer) pairs that it predicts exactly. Wrong pairs differ from the
expected experts, so a hypothesis that changes nothing explains nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.verify.expert_sets import ExpertSets, bits_of_map, list_experts, map_of_bits

MOST_ROWS = 512  # wrong rows that the hypotheses look at
MOST_SHIFT = 64  # rows, or tokens of sequences beside each other
MOST_MICRO_BATCHES = 256  # whose expected routes are tried, the nearest first
MOST_INDEXED = 1 << 18  # rows of these in which a wrong row is looked for
MOST_ORIGINS = 64  # places where a wrong row is looked for
LEAST_EXPLAINED = 0.8
"""Share of wrong pairs that a hypothesis must predict to be named."""
LEAST_NATIVE = 0.5
"""Experts shared beyond chance, over those of rows that miss one expert, from which the router chose by itself."""
LEAST_VOTES = 4
"""Rows that must have moved equally far, or agree; fewer do by chance."""


_ROWS = "empty zeros constant fewer more shifted transposed run"
KINDS = frozenset(f"{_ROWS} micro_batch layer low_byte renumbered draft native other".split())
"""docs/verify.md says what each means."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A mistake that explains wrong rows."""

    kind: str
    """One of ``KINDS``."""
    micro_batch: int
    explained: float
    """Share of the wrong pairs of the micro-batch that it predicts."""
    text: str
    """What happened, in a sentence."""


_Prediction = tuple[str, str, np.ndarray]
"""Kind, sentence, predicted bits [R, L, B]."""


def find_cause(micro: int, used_sets: ExpertSets, wrong: np.ndarray, expected: Sequence[ExpertSets]) -> Cause:
    """Return the first hypothesis that predicts the wrong pairs bool [R, L], of which there is at least one.

    micro: which of ``expected`` the rows should have been.
    """
    rows = np.flatnonzero(wrong.any(1))
    if len(rows) > MOST_ROWS:
        rows = rows[np.arange(MOST_ROWS) * len(rows) // MOST_ROWS]
    bits, places, wrong = used_sets.bits[rows], used_sets.rows[rows], wrong[rows]
    for kind, text, predicted in _predict(micro, bits, places, wrong, expected, used_sets.width):
        is_same = (predicted == bits).all(2)
        judged = wrong & (predicted != 255).any(2)  # a shift leaves rows at an end without a source
        if kind != "shifted" or judged.any(1).sum() < max(LEAST_VOTES, wrong.any(1).sum() / 2):
            judged = wrong
        if is_same[judged].mean() >= LEAST_EXPLAINED:
            return Cause(kind, micro, float(is_same[wrong].mean()), text)
    return _judge_rest(micro, bits, places, wrong, expected[micro])


def _predict(
    micro: int, bits: np.ndarray, places: np.ndarray, wrong: np.ndarray, expected: Sequence[ExpertSets], width: int
) -> Iterator[_Prediction]:
    """Yield all hypotheses, simple ones first."""
    target = expected[micro]
    meant = target.bits[_places_in(target, places)]
    for look in (_constant, _renumbered):
        yield from look(bits, meant, wrong)
    yield "fewer", "these rows lack some of the expected experts", bits & meant
    yield "more", "these rows have further experts beside the expected ones", bits | meant
    for unit, size, sign in itertools.product(dict.fromkeys((width, 1)), range(1, MOST_SHIFT + 1), (1, -1)):
        what, where = ("place", "") if unit == 1 else ("token", f" in each of {width} sequences")
        late = f"rows stand {size} {what}{'s' * (size > 1)} too {'late' if sign > 0 else 'early'}{where}"
        yield "shifted", late, _rows_of(target, places - sign * size * unit)
    for width in range(2, target.num_rows // 2 + 1):
        if target.num_rows % width == 0:
            order = np.arange(target.num_rows).reshape(width, -1).T.ravel()
            text = f"rows are in the order of [{width}, {target.num_rows // width}] transposed"
            yield "transposed", text, _rows_of(target, order[places])
    nearest = sorted(range(len(expected)), key=lambda index: abs(index - micro))[:MOST_MICRO_BATCHES]
    nearest = [one for one in nearest if expected[one].num_rows and expected[one].bits.shape[1:] == bits.shape[1:]]
    for other in nearest[1:]:
        yield "micro_batch", f"these are the routes of micro-batch {other}", _rows_of(expected[other], places)
    yield from _other_layers(bits, meant, wrong)
    yield from _run(bits, places, wrong, expected, nearest)


def _places_in(sets: ExpertSets, places: np.ndarray) -> np.ndarray:
    """Indices of rows ``places`` in the record; a row that it does not have is the nearest one before."""
    return np.clip(np.searchsorted(sets.rows, places, "right") - 1, 0, len(sets.rows) - 1)


def _rows_of(sets: ExpertSets, places: np.ndarray) -> np.ndarray:
    """bits of rows ``places``; a row that the record does not have is all experts, which predicts nothing."""
    index = _places_in(sets, places)
    return np.where((sets.rows[index] == places)[:, None, None], sets.bits[index], np.uint8(255))


def _constant(bits: np.ndarray, target: np.ndarray, wrong: np.ndarray) -> Iterator[_Prediction]:
    """One row for all: the most frequent one of each layer."""
    common = np.stack([_most_frequent(bits[wrong[:, layer], layer]) for layer in range(bits.shape[1])])
    sizes = map_of_bits(common).sum(1)[wrong.any(0)]
    first = list_experts(common[wrong.any(0).argmax()])
    predicted = np.broadcast_to(common, bits.shape)
    if not sizes.any():
        yield "empty", "these tokens reach no expert at all", predicted
    elif all(list_experts(row) == list(range(size)) for row, size in zip(common[wrong.any(0)], sizes, strict=True)):
        yield "zeros", f"these rows are the experts {first}, as zeros or padding would be", predicted
    elif wrong.any(1).sum() >= LEAST_VOTES and len(np.unique(target.reshape(len(target), -1), axis=0)) > 1:
        yield "constant", f"these rows are all equal, experts {first} in the first layer", predicted


def _most_frequent(bits: np.ndarray) -> np.ndarray:
    if not len(bits):
        return np.zeros(bits.shape[1], np.uint8)
    kinds, counts = np.unique(bits, axis=0, return_counts=True)
    return kinds[counts.argmax()]


def _renumbered(bits: np.ndarray, target: np.ndarray, wrong: np.ndarray) -> Iterator[_Prediction]:
    """Expert e of the expected rows is expert p(e) of the used ones, in each layer."""
    used, meant = map_of_bits(bits), map_of_bits(target)
    if used.shape[2] > 256:
        low = np.zeros_like(meant)
        for first in range(0, meant.shape[2], 256):
            block = meant[..., first : first + 256]
            low[..., : block.shape[2]] |= block
        yield "low_byte", "expert numbers are cut to 8 bits: numbers above 255 lost 256", bits_of_map(low)
    predicted, evidence, example = np.zeros_like(meant), 0, ""
    for layer in np.flatnonzero(wrong.any(0)):
        rows = wrong[:, layer]
        cooccurrences = meant[rows, layer].T.astype(np.float64) @ used[rows, layer]
        occurring = meant[rows, layer].sum(0)
        number = (cooccurrences / np.sqrt(np.maximum(1, used[rows, layer].sum(0)))).argmax(1)
        evidence += int(occurring.sum() - 2 * np.count_nonzero(occurring))
        for expert in np.flatnonzero(occurring):
            predicted[:, layer, number[expert]] |= meant[:, layer, expert]
            if number[expert] != expert:
                example = example or f"{expert} became {number[expert]}"
    if evidence > 0:
        text = f"the same experts have other numbers ({example}), such as physical ids"
        yield "renumbered", text, bits_of_map(predicted)


def _other_layers(bits: np.ndarray, target: np.ndarray, wrong: np.ndarray) -> Iterator[_Prediction]:
    """Each layer uses the expected routes of the layer that fits best."""
    source = np.arange(bits.shape[1])
    for layer in np.flatnonzero(wrong.any(0)):
        rows = wrong[:, layer]
        source[layer] = (bits[rows, layer][:, None] == target[rows]).all(2).mean(0).argmax()
    moved = np.flatnonzero(source != np.arange(len(source)))
    if len(moved):
        text = ", ".join(f"column {layer} has those of column {source[layer]}" for layer in moved[:4])
        yield "layer", f"routes of other layers: {text}{', ...' * (len(moved) > 4)}", target[:, source]


def _run(
    bits: np.ndarray, places: np.ndarray, wrong: np.ndarray, expected: Sequence[ExpertSets], nearest: Sequence[int]
) -> Iterator[_Prediction]:
    """Wrong rows stand elsewhere in the expected routes. Rows that occur once or twice vote for how far they moved."""
    layers, num_indexed = wrong.any(0), 0
    origins: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in nearest:
        num_indexed += len(expected[index].rows)
        for row, key in zip(expected[index].rows.tolist(), _hash_rows(expected[index].bits[:, layers]), strict=True):
            if len(origins[key]) < MOST_ORIGINS:
                origins[key].append((index, row))
        if num_indexed > MOST_INDEXED:
            break
    keys = zip(places.tolist(), _hash_rows(bits[:, layers]), strict=True)
    moves = [[(index, row - place) for index, row in origins.get(key, ())] for place, key in keys]
    votes = Counter(move for options in moves if len(options) <= 2 for move in options)
    best_moves = [max(options, key=lambda move: votes[move], default=(0, 0)) for options in moves]
    has_moved = np.array([votes[move] >= LEAST_VOTES for move in best_moves])
    if has_moved.any():
        first = int(has_moved.argmax())
        index, distance = best_moves[first]
        whose = "of this micro-batch" if index == nearest[0] else f"of micro-batch {index}"
        text = f"from row {places[first]} on stand rows of other tokens, first row {places[first] + distance} {whose}"
        yield "run", text, np.where(has_moved[:, None, None], bits, np.uint8(255))


def _hash_rows(bits: np.ndarray) -> list[int]:
    return [hash(row.tobytes()) for row in bits]


def _judge_rest(micro: int, bits: np.ndarray, places: np.ndarray, wrong: np.ndarray, target: ExpertSets) -> Cause:
    """A router that chooses by itself misses one expert of a wrong row, and rows of other tokens miss nearly all."""
    meant = map_of_bits(target.bits[_places_in(target, places)])
    top_k = meant.sum(2).max()
    share = float((map_of_bits(bits) & meant)[wrong].sum() / max(1, meant[wrong].sum()))
    # Two rows share an expert with the square of its frequency in the layer.
    target_bits = target.bits[target.known.any(1)]
    by_layer = np.square(map_of_bits(target_bits[:: max(1, len(target_bits) // MOST_ROWS)]).mean(0)).sum(1) / top_k
    chance = float(np.broadcast_to(by_layer, wrong.shape)[wrong].mean())
    native = (share - chance) / max(1.0 - 1.0 / top_k - chance, 1e-9)
    text = f"these rows share {share:.0%} of the expected experts, {chance:.0%} would be chance"
    if native >= LEAST_NATIVE:
        return Cause("native", micro, min(native, 1.0), f"the router chose by itself: {text}")
    return Cause("other", micro, 0.0, text)
