"""Rows 4, 13 and 16 of the evidence page: their parts against other ways to compute the same."""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from trials.rows import ratio_rows, replay_effects, tool_episodes
from trials.rows.source_row import Data, SourceRow

from megarl.core.objectives import TokenColumns, coefficients

ROWS = {row.number: row for row in ratio_rows.ROWS}
FEW: dict[str, Any] = {"NUM_MODELS": 1, "NUM_SEEDS": 2, "NUM_RESPONSES": 300, "DRIFT_SEEDS": 2}


@pytest.fixture(scope="module", autouse=True)
def _leave_groups() -> None:
    """Other files of a process may keep Megatron's groups; the tiny trainer joins its own."""
    if "megarl.megatron.distributed" in sys.modules:
        sys.modules["megarl.megatron.distributed"].shutdown()


@pytest.fixture(scope="module")
def measured() -> dict[int, Data]:
    """The data of each row from few seeds, as they come back from JSON."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(ratio_rows, name, value)
        return {number: json.loads(json.dumps(row.measure())) for number, row in ROWS.items()}


@pytest.mark.parametrize("row", ratio_rows.ROWS, ids=lambda row: f"row {row.number}")
def test_each_row_has_a_picture_and_a_sentence(row: SourceRow, measured: dict[int, Data]) -> None:
    figure = Figure(figsize=(7, 3.2))
    row.draw(figure, measured[row.number])
    assert all(axes.get_xlabel() and axes.has_data() for axes in figure.axes)
    assert figure.axes[0].get_legend() is not None
    assert row.conclude(measured[row.number]).endswith(".")


def test_r2_leaves_the_first_mini_batch_alone_to_the_bit_and_r3_leaves_none_alone(measured: dict[int, Data]) -> None:
    r2, r3 = measured[4]["r2"], measured[4]["r3"]
    assert r2["largest_gap"][0] == r2["flip"][0] == [0.0, 0.0, 0.0]
    assert all(
        gap[0] > 1e-3 and flip[0] > 1e-3 for gap, flip in zip(r2["largest_gap"][1:], r2["flip"][1:], strict=True)
    )
    assert all(gap[0] > 1e-3 and flip[0] > 1e-3 for gap, flip in zip(r3["largest_gap"], r3["flip"], strict=True))
    assert all(gap == [0.0, 0.0, 0.0] for mode in (r2, r3) for gap in mode["repeat_gap"])


def test_the_share_of_changed_routes_is_that_of_sets_and_the_gap_that_of_loss_tokens() -> None:
    with replay_effects.tiny_trainer("r3", 1) as (step, rollouts):
        from megarl.trainer import passes
        from megarl.trainer.mini_batch import StepPlan

        minis = [step.prepare(rollouts[:8], np.ones(8))]
        [mini] = step.look(StepPlan(old_passes=1), minis)
        effect = replay_effects.compare_replayed(step, mini)
        native = passes.run_pass(step.policy, mini, step.policy.replay.record())
        replayed = passes.run_pass(step.policy, mini)
    differs, gaps = [], []
    for index, (chosen, routes) in enumerate(zip(native.recording.routes, mini.engine_routes, strict=True)):
        for one, two in zip(chosen.experts.flatten(0, 1).tolist(), routes.experts.flatten(0, 1).tolist(), strict=True):
            differs.append(set(one) != set(two))
        mask = mini.micro_batches[index].batch.loss_mask.tolist()
        pairs = zip(native.logprobs[index].tolist(), replayed.logprobs[index].tolist(), mask, strict=True)
        gaps += [abs(one - two) for one, two, is_trained in pairs if is_trained]
    assert effect.flip == pytest.approx(np.mean(differs))
    assert effect.largest_gap == pytest.approx(max(gaps))
    assert 0.01 < effect.flip < 0.5


def test_the_sentence_about_replay_follows_the_data(measured: dict[int, Data]) -> None:
    data = copy.deepcopy(measured[4])
    assert "R2 leaves the first mini-batch unaltered" in ROWS[4].conclude(data)
    data["r2"]["largest_gap"][0] = [0.0, 0.0, 1e-6]
    assert "R2 leaves no mini-batch unaltered" in ROWS[4].conclude(data)


def test_the_laws_of_products_and_means_are_those_of_the_specification() -> None:
    assert ratio_rows.weight_law("product", 100) == pytest.approx([1.7182818284590453, 0.36787944117144233], rel=1e-12)
    assert ratio_rows.weight_law("product", 1000)[0] == pytest.approx(22025.465794806718, rel=1e-12)


@pytest.mark.parametrize("kind", ratio_rows.KINDS)
@pytest.mark.parametrize("length", [1, 10, 100])
def test_the_laws_are_the_integrals_over_the_normal_log_ratio(kind: str, length: int) -> None:
    points, chances = np.polynomial.hermite_e.hermegauss(80)
    chances = chances / chances.sum()
    spread = 0.1 * math.sqrt(length) if kind == "product" else 0.1 / math.sqrt(length)
    weights = np.exp(spread * points - 0.1**2 / 2 * (length if kind == "product" else 1))
    mean, square = chances @ weights, chances @ weights**2
    assert ratio_rows.weight_law(kind, length) == pytest.approx([square - mean**2, mean**2 / square], rel=1e-9)
    constant = torch.full((4,), float(mean), dtype=torch.float64)
    assert ratio_rows.spread_of(kind, length, constant) == pytest.approx((0.0, 1.0), abs=1e-12)


def test_weights_are_products_and_roots_of_the_same_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratio_rows, "NUM_RESPONSES", 5)
    monkeypatch.setattr(ratio_rows, "LENGTHS", (1, 3, 7))
    weights = ratio_rows.response_weights(3)
    for length in (1, 3, 7):
        powers = weights["geometric"][length] ** length
        assert torch.allclose(powers, weights["product"][length], rtol=1e-12)
    noise = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).numpy()
    assert weights["product"][7].numpy() == pytest.approx(np.prod(np.exp(0.1 * noise - 0.005), axis=1))
    _, fraction = ratio_rows.spread_of("product", 1, torch.tensor([1.0, 1.0, 1.0, 7.0], dtype=torch.float64))
    assert fraction == pytest.approx(0.4807692307692308)


def test_a_mean_over_the_future_holds_no_past_and_one_over_the_sequence_does() -> None:
    changes = ratio_rows.past_in_future_means()
    assert changes["past_in_future_mean"] == 0.0
    assert changes["past_in_sequence_mean"] > 1e-3


def test_the_windows_drop_the_tokens_of_the_specification() -> None:
    """lp - lp_old = [.02, .05, (.7 of the tool), -.01, .10]: token 4 leaves the upper bound, whatever the tool says."""
    log_ratios = torch.tensor([0.02, 0.05, 0.7, -0.01, 0.10], dtype=torch.float64)
    old, mask = torch.full((5,), -2.0, dtype=torch.float64), torch.tensor([True, True, False, True, True])
    dropped = {}
    for sign in (1.0, -1.0):
        columns = TokenColumns(old + log_ratios, old, old, torch.full_like(old, sign), mask, torch.tensor([0, 5]))
        for name, objective in ratio_rows.WINDOWS.items():
            zero = coefficients(objective, columns).values == 0
            dropped[name, sign] = [t for t in range(5) if mask[t] and zero[t]]
    assert dropped[ratio_rows.RELEASED, 1.0] == dropped[ratio_rows.PRINTED, 1.0] == [4]
    assert dropped[ratio_rows.RELEASED, -1.0] == [4]
    assert dropped[ratio_rows.PRINTED, -1.0] == []
    assert dropped[ratio_rows.FIXED, 1.0] == dropped[ratio_rows.FIXED, -1.0] == []


def drops(name: str, cum: float, t: int, sign: float) -> bool:
    """Whether a window drops a token, by the formulas of its name."""
    if name == ratio_rows.FIXED:
        return math.exp(cum) > 5 if sign > 0 else math.exp(cum) < 0.5
    high, low = 0.05 * math.sqrt(t), -0.025 * math.sqrt(t)
    if sign > 0:
        return cum > high
    return cum < low or (name == ratio_rows.RELEASED and cum > high)


def test_shares_are_counted_over_the_tokens_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ratio_rows, tool_episodes):
        monkeypatch.setattr(module, "NUM_EPISODES", 6)
    monkeypatch.setattr(tool_episodes, "NUM_TURNS", 8)
    monkeypatch.setattr(ratio_rows, "EDGES", (0, 16, 512))
    columns = tool_episodes.make_episodes(0.08, 4)
    length = len(columns.logprobs) // 6
    expected = np.zeros((len(ratio_rows.WINDOWS), 3))
    for row, name in enumerate(ratio_rows.WINDOWS):
        flags = []
        for episode in range(6):
            cum, t = 0.0, 0
            for token in range(episode * length, (episode + 1) * length):
                if columns.loss_mask[token]:
                    cum, t = cum + float(columns.logprobs[token] - columns.old_logprobs[token]), t + 1
                    flags.append((t, drops(name, cum, t, float(columns.advantages[token]))))
        early, late = [flag for t, flag in flags if t <= 16], [flag for t, flag in flags if t > 16]
        expected[row] = np.mean(early), np.mean(late), np.mean([flag for _, flag in flags])
    shares = ratio_rows.clipped_shares(0.08, 4)
    assert shares == pytest.approx(expected)
    assert (shares[:, 1] > 0.05).all()


def test_the_drift_has_the_wanted_deviation_and_ratios_of_mean_1() -> None:
    old, log_ratios = tool_episodes.drifted_policy(0.0387, torch.Generator().manual_seed(0))
    chances = old.exp() / len(old)
    mean = float((chances * log_ratios).sum())
    assert math.sqrt(float((chances * log_ratios**2).sum()) - mean**2) == pytest.approx(0.0387, rel=1e-6)
    assert float((chances * log_ratios.exp()).sum()) == pytest.approx(1.0, rel=1e-12)
    assert mean < 0


def test_the_implied_share_is_that_of_two_normal_tails() -> None:
    tail = statistics.NormalDist(0, 0.0387).cdf
    assert ratio_rows.normal_share(0.0387) == pytest.approx((tail(-0.05) + tail(-0.025)) / 2, rel=1e-12)
