"""slime's hooks: rows have the gradients of ``policy_loss`` under any layout, and the watch sees wrong routes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cases_slime import direct_gradients
from ranks import Case, case

ROWS = ("minirl", "grpo", "dapo", "gspo", "dr_grpo", "icepop", "ctpo", "sapo", "gmpo", "topr")
direct = functools.cache(direct_gradients)


LAYOUTS = [case(n, "cases_slime:step_gradients", layout, rows=ROWS) for n, layout in ((1, ""), (2, "cp2"), (2, ""))]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda one: f"{one.world_size}-{dict(one.layout)}")
def test_the_gradient_of_a_step_is_that_of_policy_loss_over_the_whole_batch(case: Case, outcome: Any) -> None:
    for row, wanted in direct(ROWS).items():
        scale = max(np.abs(value).max() for value in wanted.values())
        for name, value in wanted.items():
            np.testing.assert_allclose(outcome[row][name], value, rtol=0, atol=2e-6 * scale, err_msg=f"{row} {name}")


FAULTS = {"none": "right", "native": "rows are right", "skipped": "rows are right", "recomputed": "recomputation"}


@pytest.mark.parametrize("case", [case(1, "cases_slime:watched", fault=fault) for fault in FAULTS], ids=str)
def test_the_next_hook_raises_if_tokens_went_to_other_experts(case: Case, outcome: Any) -> None:
    first, second, third = outcome
    print(third)
    assert (first, second) == ("right", "right")
    assert FAULTS[dict(case.arguments)["fault"]] in third
