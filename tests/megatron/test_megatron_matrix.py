"""The replay matrix: layouts x recomputation x dispatcher x router x precision, every pair of values at least once."""

from __future__ import annotations

from typing import Any

import pytest
from cases_matrix import AXES, cases, complaints, pairwise
from matrix_world import Variant
from ranks import Case

POINTS = pairwise()
CASES = cases(POINTS)


def test_the_chosen_points_hold_every_pair_of_values() -> None:
    for a in range(len(AXES)):
        for b in range(a):
            assert {(point[a], point[b]) for point in POINTS} == {(x, y) for x in AXES[a] for y in AXES[b]}
    assert len(POINTS) < 300


@pytest.mark.multirank
@pytest.mark.parametrize(("layout", "case"), CASES.items(), ids=[name.replace(" ", "-") for name in CASES])
def test_acceptance_replay_holds_at_every_point_of_the_layout(layout: str, case: Case, outcome: dict[str, Any]) -> None:
    of_layout = [point for point in POINTS if point[0] == layout]
    assert len(outcome) == len(of_layout) > 0
    wrong = {point: complaints(point, outcome[str(Variant(*point[1:]))]) for point in of_layout}
    assert {point: told for point, told in wrong.items() if told} == {}
