"""slime's hooks: rows have the gradients of ``policy_loss`` under any layout, and the watch sees wrong routes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from cases_slime import direct_gradients, refusals
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


@pytest.mark.parametrize("case", [case(1, "cases_slime:tis_weights", row="icepop")], ids=str)
def test_tis_weighs_by_the_old_mu_parts_of_the_row(case: Case, outcome: Any) -> None:
    weights, ratios = outcome
    torch.testing.assert_close(weights, torch.where((ratios >= 0.5) & (ratios <= 5.0), ratios, 0.0))


REFUSALS = {
    ("init", "dapo", ()): "slime: the row 'dapo' divides as 'token-mean', but",
    ("init", "minirl", (("per_token", True),)): "slime: the row 'minirl' divides as 'seq-mean-token-sum', but",
    ("init", "geo_rs", ()): "must know all tokens",
    ("init", "grpo", (("qkv_format", "bshd"),)): "thd",
    ("loss", "minirl", ()): "slime: the row 'minirl' reads old_logprobs, which the batch does not have",
    ("tis", "grpo", ()): "slime: 'grpo' has no old/mu part",
    ("before_train_step", "grpo", ()): "slime has no routes for this step",
}
ASKED = tuple((function, row, dict(more)) for function, row, more in REFUSALS)


def test_what_is_refused(one_rank: None) -> None:
    for found, wanted in zip(refusals({}, ASKED), REFUSALS.values(), strict=True):
        assert wanted in found


FAULTS = {"none": "right", "native": "rows are right", "skipped": "rows are right", "recomputed": "recomputation"}


@pytest.mark.parametrize("case", [case(1, "cases_slime:watched", fault=fault) for fault in FAULTS], ids=str)
def test_the_next_hook_raises_if_tokens_went_to_other_experts(case: Case, outcome: Any) -> None:
    first, second, third = outcome
    print(third)
    assert (first, second) == ("right", "right")
    assert FAULTS[dict(case.arguments)["fault"]] in third
