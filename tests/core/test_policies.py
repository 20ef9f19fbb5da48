"""Which policies an objective compares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.core.choices.policies import reads_policies
from megarl.core.choices.table import OBJECTIVES


@pytest.mark.parametrize(
    ("row", "parts", "expected"),
    [
        ("reinforce", {}, set()),
        ("grpo", {}, {"theta_old"}),
        ("cispo", {}, {"theta_old"}),
        ("minirl", {}, {"theta_mu", "theta_old"}),
        ("minirl_no_clip", {}, {"theta_mu"}),
        ("minirl_no_clip", {"dual_clip": 3.0}, {"theta_mu", "theta_old"}),
        ("minirl_no_clip", {"tis_on": "old_mu"}, {"theta_old", "old_mu"}),
        ("minirl_no_clip", {"weight": "old_mu"}, {"old_mu"}),
        ("minirl_no_clip", {"weight": "old_mu", "tis_on": "old_mu"}, {"old_mu"}),
        ("reinforce", {"gap": "theta_mu", "gap_high": 2.0}, {"theta_mu"}),
        ("grpo", {"gap": "old_mu", "gap_mode": "mask", "gap_high": 2.0}, {"theta_old", "old_mu"}),
        ("reinforce", {"mask": lambda columns: columns.loss_mask}, set()),
    ],
)
def test_policies_by_hand(row: str, parts: dict[str, Any], expected: set[str]) -> None:
    assert reads_policies(replace(OBJECTIVES[row], **parts)) == expected
