"""Rules of docs/evidence/preregistered.md: collapses, intervals, verdicts."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from trials import page, verdicts
from trials.grids import AXES, TABLES, cells_of, make_cell
from trials.intervals import bound_share, compare_pairs, cover_median
from trials.outcomes import Outcome, from_line, to_line
from trials.results import NotRunError, Results, count_collapsed, read_archive, write_archive


def make_run(rewards: list[float], seed: int = 0, broke_off: bool = False, **axes: Any) -> Outcome:
    cell = make_cell(**{"arm": "minirl_c5", "replay": "none"} | axes)
    return Outcome(cell, seed, "digest", broke_off, {"reward": rewards, "k3": [0.1] * len(rewards)}, [0.5])


@pytest.mark.parametrize(
    ("rewards", "broke_off", "has_collapsed"),
    [
        ([0.4] * 40, False, False),
        ([0.4] * 30 + [0.2] * 10, False, False),  # exactly half of the best quarter
        ([0.4] * 30 + [0.199] * 10, False, True),
        ([0.1, *[0.6] * 10, *[0.31] * 29], False, False),
        ([0.1, *[0.6] * 9, *[0.2] * 30], False, True),
        ([0.7, *[0.3] * 39], False, True),  # below half of the first reward, and never better
        ([0.59, *[0.3] * 39], False, False),
        ([0.4] * 15, True, True),
    ],
)
def test_a_collapse(rewards: list[float], broke_off: bool, has_collapsed: bool) -> None:
    run = make_run(rewards, broke_off=broke_off)
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


def results_of(finals: dict[tuple[str, str], list[float]], **axes: Any) -> Results:
    return Results(
        make_run([0.5] * 30 + [value] * 10, seed, arm=arm, replay=replay, **axes)
        for (arm, replay), values in finals.items()
        for seed, value in enumerate(values)
    )


BETTER, MIXED = [0.31, 0.4, 0.5, 0.6, 0.7, 0.8], [0.29, 0.4, 0.5, 0.6, 0.7, 0.8]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("P5", ("minirl_c5", "r2"), ("minirl_c5", "none")),
        ("P6", ("pg_is", "none"), ("uncorrected", "none")),
        ("P7", ("minirl", "none"), ("pg_is", "none")),
        ("P10", ("minimal", "none"), ("pg_is", "none")),
        ("P11", ("minirl", "none"), ("minirl_c3", "none")),  # a cap of 3 harms
    ],
)
def test_verdicts_follow_the_intervals(name: str, first: tuple[str, str], second: tuple[str, str]) -> None:
    def verdict(values: list[float], others: list[float]) -> tuple[str, str]:
        return verdicts.JUDGES[name](results_of({first: values, second: others}))

    assert verdict(BETTER, [0.3] * 6) == ("+0.25 [+0.01, +0.50]", "shown")
    assert verdict(MIXED, [0.3] * 6)[1] == "not shown"
    assert verdict([0.3] * 6, BETTER)[1] == "opposite"
    with pytest.raises(NotRunError):  # the seeds so far would have shown something
        verdict(BETTER[:5], [0.3] * 6)


def test_a_favoured_anchor_is_a_difference_of_differences() -> None:
    arms = {
        ("dppo_tv_mu", "none"): 0.5,
        ("dppo_tv_old", "none"): 0.4,
        ("grpo_mu", "none"): 0.5,
        ("minirl", "none"): 0.4,
    }
    arms |= {("dppo_tv_mu", "r3"): 0.6, ("dppo_tv_old", "r3"): 0.59, ("grpo_mu", "r3"): 0.6, ("minirl", "r3"): 0.59}
    results = results_of({cell: [value] * 6 for cell, value in arms.items()})
    assert verdicts.JUDGES["P9"](results) == ("without minus with R3: +0.09 [+0.09, +0.09]", "shown")
    assert verdicts.JUDGES["P8"](results)[1] == "window shown; TV shown"


def test_the_crossover_turns_its_sign_at_two_updates() -> None:
    runs = [
        make_run([0.5] * (160 // n), seed, replay=replay, updates=n)
        for n in (4, 8)
        for replay in ("r2", "r3")
        for seed in range(6)
    ]
    runs += [make_run([0.6] * 80, seed, replay="r2", updates=2) for seed in range(6)]
    runs += [make_run([0.5] * 80, seed, replay="r3", updates=2) for seed in range(6)]
    words, verdict = verdicts.JUDGES["P13"](Results(runs))
    assert verdict == "N = 2 shown; N = 4 not shown; N = 8 not shown"
    assert "N = 2 +0.10 [+0.10, +0.10]" in words


def test_growth_compares_the_last_quarter_with_the_first_step() -> None:
    run = make_run([0.5] * 40)
    series = run.series | {"k3": [0.1] + [9.0] * 29 + [0.3] * 10}
    assert replace(run, series=series).growth == pytest.approx(3)


def test_every_prediction_has_a_judge() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evidence" / "preregistered.md").read_text()
    assert [name for name, *_ in page.ROW.findall(text)] == [*verdicts.JUDGES]


def test_collapses_are_counted_with_an_interval() -> None:
    runs = results_of({("minirl_c5", "r3"): [0.1] * 6}).runs("minirl_c5", "r3")
    assert count_collapsed(runs) == "6 of 6 [61%, 100%]"


def test_an_archive_has_every_outcome_and_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "outcomes").mkdir()
    for seed in range(3):
        (tmp_path / "outcomes" / f"x.seed{seed}.json").write_text(to_line(make_run([0.5] * 40, seed)))
    write_archive(tmp_path, tmp_path / "a.gz")
    write_archive(tmp_path, tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert [*read_archive(tmp_path / "a.gz").runs("minirl_c5", "none")] == [0, 1, 2]


def test_contested_cells_have_five_seeds() -> None:
    stored = read_archive(page.STORE / "outcomes.jsonl.gz")
    for cell in {cell for grid in TABLES["grids"] if grid != "calibration" for cell, _ in cells_of(grid)}:
        axes = {axis: getattr(cell, axis) for axis in AXES}
        runs = stored.runs(cell.arm, cell.replay, **axes)
        is_contested = 0 < sum(run.has_collapsed for run in runs.values()) < len(runs)
        assert len(runs) >= (5 if is_contested else 3), cell.name
