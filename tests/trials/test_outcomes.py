"""Rules of docs/evidence/preregistered.md: collapses, intervals, verdicts."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from trials import verdicts
from trials.grids import SETTING, Cell
from trials.intervals import bound_share, compare_pairs, cover_median
from trials.outcomes import Outcome, from_line, to_line
from trials.results import Results, count_collapsed, read_archive, write_archive


def make_run(rewards: list[float], seed: int = 0, code: int = 0, arm: str = "minirl_c5", **axes: object) -> Outcome:
    cell = Cell(
        arm,
        **{"replay": "none", "gap": "strong_noise", "updates": 4, "lr": SETTING["lr"], "steps": 40, "cold_start": 320}
        | axes,
    )
    return Outcome(cell, seed, code, {"reward": rewards, "k3": [0.1] * len(rewards)}, [0.5])


@pytest.mark.parametrize(
    ("rewards", "code", "has_collapsed"),
    [
        ([0.4] * 40, 0, False),
        ([0.4] * 30 + [0.2] * 10, 0, False),  # exactly half of the best ten
        ([0.4] * 30 + [0.199] * 10, 0, True),
        ([0.1, *[0.6] * 10, *[0.31] * 29], 0, False),
        ([0.1, *[0.6] * 9, *[0.2] * 30], 0, True),
        ([0.7, *[0.3] * 39], 0, True),  # below half of the first reward, and never better
        ([0.59, *[0.3] * 39], 0, False),
        ([0.4] * 40, 1, True),
        ([0.4] * 35, 0, False),
    ],
)
def test_a_collapse(rewards: list[float], code: int, has_collapsed: bool) -> None:
    run = make_run(rewards, code=code)
    assert run.has_collapsed == has_collapsed
    assert len(run.rewards) == 40


def test_missing_steps_have_reward_0() -> None:
    assert make_run([0.4] * 35).final == pytest.approx(0.2)


def test_outcomes_survive_their_line() -> None:
    run = make_run([0.25] * 40)
    assert from_line(to_line(run)) == run


def test_wilson_interval() -> None:
    # Newcombe 1998, table 1, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    for count, total, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert bound_share(count, total) == pytest.approx((low, high), abs=6e-5)
    assert bound_share(6, 6)[1] == 1


@pytest.mark.parametrize("n", [2, 3, 5, 6, 9])
def test_coverage_of_the_median_by_enumeration(n: int) -> None:
    for k in range(1, n // 2 + 1):
        # Each value lies above the median or below it, independently.
        inside = sum(k <= sum(signs) <= n - k for signs in product((0, 1), repeat=n))
        assert cover_median(n, k) == inside / 2**n


def test_paired_differences() -> None:
    six = compare_pairs([1, 2, 3, 4, 5, 6.5], [0, 0, 0, 0, 0, 0])
    assert (six.median, six.low, six.high, six.coverage, six.pairs) == (3.5, 1, 6.5, 0.96875, 6)
    assert six.is_shown
    assert not compare_pairs([1, 2, 3, 4, 5], [0] * 5).is_shown  # 93.75 %
    assert not compare_pairs([0, 2, 3, 4, 5, 6], [0] * 6).is_shown
    nine = compare_pairs([-5, 1, 2, 3, 4, 5, 6, 7, 9], [0] * 9)
    assert (nine.low, nine.high) == (1, 7)
    assert nine.coverage == pytest.approx(1 - 2 * 10 / 512)


def results_of(finals: dict[tuple[str, str], list[float]]) -> Results:
    return Results(
        make_run([0.5] * 30 + [value] * 10, seed, arm=arm, replay=replay)
        for (arm, replay), values in finals.items()
        for seed, value in enumerate(values)
    )


def test_verdicts_follow_the_intervals() -> None:
    better = results_of({("minirl_c5", "none"): [0.3] * 6, ("minirl_c5", "r3"): [0.31, 0.4, 0.5, 0.6, 0.7, 0.8]})
    measured, verdict = verdicts.JUDGES["P5"](better)
    assert verdict == "shown"
    assert "+0.25 [+0.01, +0.50], 6 pairs" in measured
    mixed = results_of({("minirl_c5", "none"): [0.3] * 6, ("minirl_c5", "r3"): [0.29, 0.4, 0.5, 0.6, 0.7, 0.8]})
    assert verdicts.JUDGES["P5"](mixed)[1] == "not shown"
    worse = results_of({("minirl_c5", "none"): [0.3] * 6, ("minirl_c5", "r3"): [0.1] * 6})
    assert verdicts.JUDGES["P5"](worse)[1] == "opposite"
    assert count_collapsed(worse.runs("minirl_c5", "r3")).startswith("6 of 6 [61%")
    assert verdicts.JUDGES["P4"](better)[1] == "as expected"
    assert (
        verdicts.JUDGES["P4"](results_of({("minirl_c5", "none"): [0.1, 0.1, 0.1, 0.5, 0.5, 0.5]}))[1]
        == "not as expected"
    )


def test_an_archive_has_every_outcome_and_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "outcomes").mkdir()
    for seed in range(3):
        (tmp_path / "outcomes" / f"x.seed{seed}.json").write_text(to_line(make_run([0.5] * 40, seed)))
    write_archive(tmp_path, tmp_path / "a.gz")
    write_archive(tmp_path, tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert [*read_archive(tmp_path / "a.gz").runs("minirl_c5", "none")] == [0, 1, 2]
