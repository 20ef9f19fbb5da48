from __future__ import annotations

import math
from typing import Any

import pytest
from matrix_world import LAYOUTS
from ranks import Case

CASES = {
    name: Case(LAYOUTS[name][0], "cases_metrics:collected", LAYOUTS[name][1])
    for name in ("dp2", "dp4", "pp2", "cp2 tp2 ep2 etp1", "tp2 ep2 etp2")
}


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=[name.replace(" ", "-") for name in CASES])
def test_metrics_are_those_of_a_merge_in_rank_order(name: str, case: Case, outcome: list[dict[str, Any]]) -> None:
    copies = case.world_size // {"pp2": 2, "cp2 tp2 ep2 etp1": 4, "tp2 ep2 etp2": 2}.get(name, 1)
    for of_rank in outcome:
        assert all(found["same"] for found in of_rank.values() if isinstance(found, dict))
    assert ("two uses of one name" in outcome[0]["kinds"]) == (copies > 1)
    assert outcome[0]["differing"]["names"] == ["only/0", "loss", *(f"only/{copy}" for copy in range(1, copies))]
    assert "unseen" not in outcome[0]["alike"]["names"]
    (most,) = outcome[0]["nan"]
    assert math.isnan(most) == (copies > 1), "a maximum must not lose it"
