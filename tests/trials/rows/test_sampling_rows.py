from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from trials.rows import budget_rows, cost_rows, sampling_rows
from trials.rows.source_row import Data

from megarl.core.sampling.allocation import budget_weights

ROWS = {row.number: row for module in (sampling_rows, budget_rows, cost_rows) for row in module.ROWS}


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Make every training run a few steps long."""
    for module in (sampling_rows, budget_rows, cost_rows):
        patch.setattr(module, "SEEDS", range(2))
    for name, value in {"NUM_STEPS": 4, "WINDOW": 2, "SHARE_STEPS": 3, "LAST": 2, "SHARE_RATES": (0.3, 0.4)}.items():
        patch.setattr(sampling_rows, name, value)
    small = {"GROUP_SAMPLES": 1280, "GROUP_RATES": (0.3,), "TARGET": 0.4, "EQUAL_STEPS": 2, "EQUAL_RATES": (0.3, 0.4)}
    for name, value in (small | {"FRONTIER_STEPS": 5, "FRONTIER_RATE": 0.3, "LEVEL": 0.4}).items():
        patch.setattr(budget_rows, name, value)
    small = {"TIMED_STEPS": (0, 2), "HALVES": (8, 16), "CHECK_RATES": (0.1, 0.5), "GRID_SIZE": 3, "NUM_POINTS": 4}
    for name, value in small.items():
        patch.setattr(cost_rows, name, value)


def test_rows_have_the_numbers_of_the_sources():
    assert sorted(ROWS) == [5, 6, 7, 8, 9, 10, 11, 12, 18]
    assert {number for number, row in ROWS.items() if row.is_exact} == {6, 18}


@pytest.mark.parametrize("number", sorted(ROWS))
def test_a_row_goes_from_measurement_to_picture_and_sentence(number: int, monkeypatch: pytest.MonkeyPatch):
    shrink(monkeypatch)
    row = ROWS[number]
    data = json.loads(json.dumps(row.measure()))
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    row.draw(figure, data)
    figure.canvas.draw()
    assert all(axes.get_xlabel() for axes in figure.axes)
    text = row.conclude(data)
    assert text.endswith((".", ".)"))
    assert "nan" not in text


def test_tiers_cost_what_the_specification_says():
    data = sampling_rows.measure_tiers()
    assert data["cost"] == pytest.approx(
        {
            "as in the post: solved only": 12.268,
            "megarl's tiers": 4 + 28 * 0.373 + 224 * 0.204,
            "tiers without reuse": 68.16,
            "256 for all": 256,
        },
        abs=5e-3,
    )
    assert data["cost"]["megarl's tiers"] == pytest.approx(60.14, abs=1e-6)
    assert data["cost_of_never_solved"] == pytest.approx(47.872, abs=1e-9)
    text = sampling_rows.conclude_tiers(data)
    assert "60.14" in text
    assert "23.5%" in text


def test_dead_groups_by_three_ways():
    data = sampling_rows.measure_dead_groups()
    assert data["all_wrong"] == 0.4304672100000001
    for dead in (*data["dead"].values(), data["law"]):
        assert dead == pytest.approx(1 - 0.56953278, abs=1e-12)
    curve = data["curves"]["uniform, n = 4"]
    assert curve[data["rates"].index(0.5)] == pytest.approx(1 - 0.875, abs=1e-12)
    balance = data["curves"]["Ada-Seq-Balance"]
    # Without a stop, 32 samples would leave q^32 + p^32; a stop needs both classes, so the law is the same.
    assert balance[9] == pytest.approx(0.9**32 + 0.1**32, abs=1e-12)


def test_counts_and_credit_of_the_hybrid_make_the_weight_of_one_over_p():
    """1/sqrt(p) in the samples and in the divisor: the weight of 1/p in the samples alone."""
    rates = np.array([0.02, 0.1, 0.5, 1.0])
    hybrid = budget_weights(rates, "ada_est", sampling_rows.RATE_EPS) / np.sqrt(rates + sampling_rows.RATE_EPS)
    np.testing.assert_allclose(hybrid, budget_weights(rates, "inverse:1", sampling_rows.RATE_EPS), rtol=1e-12)
    assert sampling_rows.BY_ROOT.scale == "root_rate"


def test_shares_of_samples_add_up_and_follow_the_rates():
    rule = sampling_rows.share_samples("inverse:1")(np.array([0.1, 0.1, 0.3, 0.9]))
    assert sum(rule.counts) == 32
    # 1 / (p + eps) in units of the sum: 12.77, 12.77, 4.29, 1.43 of 32 samples less rounding.
    assert rule.counts == (13, 13, 4, 2)
    trained = sampling_rows.share_samples("inverse:1", 4, 4)(np.array([0.01, 0.9]))
    assert (trained.counts, trained.train_size, trained.keep) == ((12, 4), 4, "balance")


def test_sentences_follow_the_intervals():
    """The post's order shows if an interval is above 0, and only then."""

    def make(winner: float) -> Data:
        arm = {"prompt_reward": [0.5] * 10, "batch_reward": [0.2] * 10}
        names = [recipe.name for recipe in sampling_rows.SHARE_ARMS]
        arms = {name: arm | {"accuracy": [winner if name == "1/p, 1 trained" else 0.5] * 10} for name in names}
        return {"arms": {"0.03": arms}, "identity_error": 0.0}

    assert "does not show" in sampling_rows.conclude_shares(make(0.49))
    assert "shows in part" in sampling_rows.conclude_shares(make(0.52))
    assert "-30.0 points" in sampling_rows.conclude_shares(make(0.5))


def test_mixed_shares_are_told_by_window():
    uniform, balance = [[0.6, 0.2]] * 10, [[0.8, 0.5]] * 10
    data = {"shares": {"uniform": uniform, "balance": balance}, "samples_per_prompt": {"u": [4] * 3, "b": [16] * 3}}
    text = sampling_rows.conclude_mixed_shares(data)
    assert "falls from 60 % (60 to 60)" in text
    assert "2.5 times" in text
