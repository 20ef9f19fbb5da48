from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from trials.rows import cost_rows
from trials.rows.prompt_bandit import fit_mixture

from megarl.core.sampling import expected_samples


@pytest.mark.parametrize(
    ("half", "rate", "mean"), [(1, 0.5, 3), (4, 0.5, 10.1875), (4, 0.8, 20.07328), (4, 0.1, 40.00506444444444)]
)
def test_simulated_balance_has_the_exact_mean(half: int, rate: float, mean: float):
    """The clip of 256 changes these means by less than 1e-6."""
    counts = cost_rows.simulate_balance(rate, half, 20_000, seed=1)
    assert counts.mean() == pytest.approx(mean, abs=4 * counts.std() / np.sqrt(counts.size))
    assert expected_samples(rate, half, half) == pytest.approx(mean, abs=1e-9)


def test_simulated_balance_stops_at_the_clip():
    assert cost_rows.simulate_balance(0.0, 1, 10, seed=0).tolist() == [cost_rows.CLIP] * 10


def test_law_of_rounds_is_that_of_the_specification():
    rules = cost_rows.TIMED_RULES
    base = cost_rows.BASE_SIZE
    assert base * cost_rows.count_drawn(rules["Pos"], np.array([0.1])) == pytest.approx(13.564285375696443, abs=1e-9)
    balance = [20.96248198548135, 8.56667423248291, 27.31465819273196]
    for rate, mean in zip((0.1, 0.5, 0.05), balance, strict=True):
        assert base * cost_rows.count_drawn(rules["Bal"], np.array([rate])) == pytest.approx(mean, abs=1e-9)


def test_pos_at_the_start_follows_from_pass_at_k(monkeypatch: pytest.MonkeyPatch):
    """E[n] = M sum_r P(no positive among r M samples), and that probability is 1 - pass@(r M)."""
    monkeypatch.setattr(cost_rows, "SEEDS", range(1))
    monkeypatch.setattr(cost_rows, "TIMED_STEPS", (0, 1))
    start = cost_rows.measure_step_times()["start"]
    mixture = fit_mixture()
    expected = 8 * (1 + sum(1 - mixture.pass_at_k(8 * rounds) for rounds in (1, 2, 3)))
    assert start["Pos"] == pytest.approx(expected / 4, abs=1e-6)
    assert start["Bal"] > start["Pos"]


def test_step_time_counts_passes():
    """Sampling that costs nothing leaves the training; sampling alone leaves the samples."""
    assert cost_rows.predict_step_time(3.0, 0.0) == 1
    assert cost_rows.predict_step_time(3.0, 1e9) == pytest.approx(3)
    assert cost_rows.predict_step_time(1.0, 7.0) == 1
    # 12 samples and 4 trained against 4 and 4, at one pass per sample: (12 + 16) / (4 + 16).
    assert cost_rows.predict_step_time(3.0, 1.0) == pytest.approx(28 / 20)
    passes = cost_rows.find_sample_passes(3.4, 2.2)
    assert cost_rows.predict_step_time(3.4, passes) == pytest.approx(2.2)


def test_the_posts_costs_belong_to_different_readings():
    """383 = 128 trained + 255 drawn; 512 = 256 drawn and trained; an average of 128 drawn and trained is 256."""
    data = {
        "balance_drawn": {"16": 100.0},
        "log_at_clip": {"128": 0.1, "256": 1.0},
        "simulated": [(1.0, 0.5, 1.5), (1.0, 0.5, 1.5)],
        "law_at_simulated": [1.2, 1.7],
    }
    text = cost_rows.conclude_clipped_costs(data)
    assert "costs 132 " in text
    assert "against 200 " in text
    assert "1 of " in text
