from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from trials.rows import budget_rows
from trials.rows.source_row import Data


def rise(num_steps: int, slope: float) -> list[float]:
    """Accuracy that rises from 0 by ``slope`` per step."""
    return [slope * step for step in range(num_steps + 1)]


def make_arm(drawn: int, trained: int, slope: float, entropy: float) -> Data:
    """Ten equal seeds of an arm with constant counts per step and constant entropy."""
    steps = range(101)
    return {
        "accuracy": [rise(100, slope)] * 10,
        "entropy": [[entropy] * 101] * 10,
        "drawn": [[drawn * step for step in steps]] * 10,
        "trained": [[trained * step for step in steps]] * 10,
    }


def test_group_sizes_are_compared_at_the_target():
    """n = 4, 8, 16 reach 0.55 in 20, 16 and 10 steps: n = 16 in half of the steps, with twice the samples of n = 4."""
    by_size = {str(n): [rise(100, 0.55 / steps)] * 10 for n, steps in ((4, 20), (8, 16), (16, 10))}
    steps, samples, fixed = budget_rows.compare_sizes(by_size, 4)
    assert steps[0] == pytest.approx(10 / 20)
    assert samples[0] == pytest.approx(16 * 10 / (4 * 20))
    # (F + 16 * 16) * 10 = (F + 16 * 4) * 20
    assert fixed[0] == pytest.approx(128)
    assert (fixed[0] + 256) * 10 == pytest.approx((fixed[0] + 64) * 20)
    assert "the claim shows" in budget_rows.conclude_group_sizes({"curves": {"0.03": by_size}})
    slower = by_size | {"16": [rise(100, 0.55 / 40)] * 10}
    assert "does not show" in budget_rows.conclude_group_sizes({"curves": {"0.03": slower}})


def test_arms_train_equally_many_samples():
    """Prompts of a step times trained samples of a prompt; the last arm says that it trains twice as many."""
    for recipe in budget_rows.EQUAL_ARMS:
        rule = recipe.make_rule(np.full(recipe.num_prompts, 0.5))
        counts = getattr(rule, "counts", None) or [getattr(rule, "num_samples", 0)] * recipe.num_prompts
        trained = recipe.num_prompts * rule.train_size if rule.train_size is not None else sum(counts)
        assert trained == (256 if "twice" in recipe.name else 128)


def test_gains_are_paired_by_seed():
    base = np.linspace(0.3, 0.9, 10)
    arms = {"n4": {"accuracy": base.tolist()}, "Bal": {"accuracy": (base + 0.02).tolist()}}
    assert budget_rows.gain(arms, "Bal") == pytest.approx((2, 2, 2))
    assert budget_rows.count_drawn({"Bal": {"drawn": [30, 60], "trained": [10, 15]}}, "Bal") == (3.5, 3, 4)


def test_frontiers_cost_the_same_at_the_equal_c():
    """GRPO draws and trains 16 per step, Balance draws 20 and trains 8, with equal steps: equal at c = 4 / 8."""
    grpo, balance = make_arm(16, 16, 0.01, 1.0), make_arm(20, 8, 0.01, 1.25)
    assert budget_rows.find_equal_cost(grpo, balance)[0] == pytest.approx(0.5)
    assert budget_rows.compare_costs(grpo, balance, 0.5)[0] == pytest.approx(1)
    assert budget_rows.compare_costs(grpo, balance, 0.0)[0] == pytest.approx(20 / 16)
    assert budget_rows.compare_costs(grpo, balance, 4.0)[0] == pytest.approx(52 / 80)
    faster = make_arm(20, 8, 0.02, 1.25)
    assert budget_rows.compare_costs(grpo, faster, 0.0)[0] == pytest.approx(10 / 16)
    data = {"arms": dict(zip("abcd", (grpo, balance, grpo, balance), strict=True))}
    text = budget_rows.conclude_frontiers(data)
    assert "+0.250 (+0.250 to +0.250)" in text
    assert "entropy shows" in text


def test_measured_costs_are_seconds_of_update_per_second_of_the_rest():
    assert budget_rows.MEASURED_COSTS["1.5B"] == pytest.approx(15 / 87)
    assert budget_rows.MEASURED_COSTS["7B"] == pytest.approx(85 / 151)
