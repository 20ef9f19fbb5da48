"""Verdicts on a run: each check at its limits, runs that were really healthy or not, and where verdicts are shown."""

from __future__ import annotations

import math
import random
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.file import parse
from megarl.config.tables.health import FALLING, HealthConfig
from megarl.core.metrics import finalize
from megarl.core.objectives import OBJECTIVES, TokenColumns, coefficients
from megarl.errors import ConfigError
from megarl.run.metrics_log import read_metrics
from megarl.watch.health import CHECKS, METRICS, Health, HealthVerdict, judge_run

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("health_runs")
"""Records of quickstarts, without the metrics that no check reads: as it is; with a reward that is always 0; with a
learning rate of 8e-4, under which it forgets."""
NAMES = [check.name for check in CHECKS]
CALM = {
    **{"reward/mean": 0.5, "reward/pass_rate": 0.5, "prompts/effective_ratio": 0.75, "sampling/samples_per_prompt": 8},
    **{"reward/error_fraction": 0.0, "episode/failed_fraction": 0.0, "rollout/entropy": 0.5, "rollout/k3": 0.00390625},
    **{"rollout/ess/fraction": 0.75, "router/native/flip": 0.0625, "router/flip": 0.0, "sampling/samples": 256},
    **{"rollout/missing_rows_fraction": 0.0, "sampling/tokens": 4096, "routes/stale_rows_fraction": 0.0},
    "routes/reread_rows_fraction": 0.0,
    **{"response/length_mean": 64.0, "response/truncated_fraction": 0.0, "time/step_s": 1.0, "time/train_s": 0.25},
    "rollout/staleness_mean": 1.0,
    **{f"time/{phase}_s": 0.0 for phase in ("prepare", "old_logprobs", "ref_logprobs", "advantages")},
}
CALM_MINI = {"grad_norm": 2.0, "tis/ess/fraction": 0.75, "tis/truncated": 0.0, "clip/high": 0.0, "clip/low": 0.0}
CALM_MINI |= {"clip/both": 0.0, "clip/negative": 0.0, "clip/own": 0.0, "tis/kept_weight": 0.9375}
ZERO = {"reward/mean": 0.0, "reward/pass_rate": 0.0, "prompts/effective_ratio": 0.0}
READS = {
    "contrast_share": ("prompts/effective_ratio", 1.0),
    "reward_error_share": ("reward/error_fraction", 1.0),
    "entropy_fall_ratio": ("rollout/entropy", 0.5),
    "entropy_rise_ratio": ("rollout/entropy", 0.5),
    "k3_nats": ("rollout/k3", 1.0),
    "k3_ratio": ("rollout/k3", 0.00390625),
    "ess_share": ("rollout/ess/fraction", 1.0),
    "clipped_share": ("clip/low", 1.0),
    "capped_share": ("tis/truncated", 1.0),
    "weight_share": ("tis/kept_weight", 1.0),
    "weight_excess": ("tis/kept_weight", 1.0),
    "flip_share": ("router/native/flip", 1.0),
    "flip_ratio": ("router/native/flip", 0.0625),
    "stale_rows_share": ("routes/stale_rows_fraction", 1.0),
    "reread_share": ("routes/reread_rows_fraction", 1.0),
    "staleness_updates": ("rollout/staleness_mean", 1.0),
    "length_ratio": ("response/length_mean", 64.0),
    "truncated_share": ("response/truncated_fraction", 1.0),
    "gradient_ratio": ("grad_norm", 2.0),
    "sink_failures": ("sinks/failing", 1.0),
}
"""Checks of one metric: this metric, and what it is divided by in a calm run."""
APART = {"zero_reward_steps": "reward/mean", "pass_rate_ratio": "reward/pass_rate", "idle_share": "time/train_s"}
APART |= {"missing_rows_share": "rollout/missing_rows_fraction", "zero_gradient_steps": "grad_norm"}
APART |= {"solved_share": "prompts/effective_ratio"}
"""The others, which have tests of their own, and a metric of each."""


def step(number: int, **metrics: float) -> list[dict[str, Any]]:
    """The records of a calm step with two mini-batches, but for these metrics; None takes a metric away."""
    header = {"step": number, "wall_s": 1.0}
    mini = {name: metrics.get(name, value) for name, value in CALM_MINI.items()}
    whole = CALM | {name: value for name, value in metrics.items() if name not in CALM_MINI}
    rows = [{"kind": "minibatch", "minibatch": index, **header, **mini} for index in (0, 1)]
    rows += [{"kind": "step", "minibatch": None, **header, **whole}]
    return [{name: value for name, value in row.items() if value is not None or name == "minibatch"} for row in rows]


def run(*steps: dict[str, Any], calm: int = 10) -> list[dict[str, Any]]:
    """The records of calm steps and then these."""
    return [row for number, metrics in enumerate([{}] * calm + [*steps], 1) for row in step(number, **metrics)]


def levels(records: list[dict[str, Any]], **limits: Any) -> dict[str, str]:
    return {verdict.check: verdict.level for verdict in judge_run(records, HealthConfig(**limits))}


def only(name: str, **limits: Any) -> dict[str, Any]:
    """Limits with all checks but one off."""
    return {other: "off" for other in NAMES if other != name} | limits


def test_a_calm_run_has_no_verdict() -> None:
    assert judge_run(run(calm=200)) == []
    assert judge_run([]) == []
    assert {*READS} | {*APART} == {*NAMES} == {*HealthConfig.model_fields} - {"patience_steps", "start_steps"}
    assert judge_run([{"kind": "eval", "step": 1, "minibatch": None, "wall_s": 1.0, "eval/pass_rate": 0.0}]) == []


@pytest.mark.parametrize("name", READS)
def test_a_check_speaks_at_its_limits_and_not_before(name: str) -> None:
    metric, over = READS[name]
    for limit, at, before in zip(getattr(HealthConfig(), name), ("warning", "alarm"), (None, "warning"), strict=False):
        closer = limit * (1 + 1e-9) + 1e-9 if name in FALLING else limit * (1 - 1e-9)
        for score, expected in ((limit, at), (closer, before)):
            records = run(*[{metric: score * over}] * 3)
            assert levels(records, **only(name)).get(name) == expected, (score, limit)


def test_one_missing_row_for_each_response_is_normal() -> None:
    # 256 responses of 4096 tokens: a share of 1/16 are last tokens.
    limits = only("missing_rows_share", missing_rows_share=[0.125, 0.25])
    found = [levels(run(*[{"rollout/missing_rows_fraction": 0.0625 + more}] * 3), **limits) for more in (0.12, 0.125)]
    assert found == [{}, {"missing_rows_share": "warning"}]


@pytest.mark.parametrize(
    ("row", "length", "gap", "left", "level"),
    [
        ("seq_mis", 1000, -2.8e-4, 0.756, None),
        ("seq_mis", 10_000, -2.8e-4, 0.0608, "alarm"),
        ("seq_mis", 30_000, -2.8e-4, 0.000225, "alarm"),
        ("seq_mis", 10_000, 2.8e-4, 0.0, "alarm"),  # every product is above 2, and dropped
        ("seq_mis", 4000, -2.8e-4, 0.326, "warning"),
        ("icepop", 30_000, -2.8e-4, 1.0, None),
        ("geo_rs", 30_000, -2.8e-4, 1.0, None),
    ],
)
def test_products_of_a_small_gap_take_the_gradient_away_at_an_effective_sample_size_of_1(
    row: str, length: int, gap: float, left: float, level: str | None
) -> None:
    old = torch.full((2 * length,), -0.5, dtype=torch.float64)
    mask, bounds = torch.ones(2 * length, dtype=torch.bool), torch.tensor([0, length, 2 * length])
    advantages = torch.tensor([1.0, -1.0]).repeat_interleave(length)
    columns = TokenColumns(old, old, old - gap, advantages, mask, bounds)
    found = finalize(coefficients(OBJECTIVES[row], columns).metrics)
    metrics = {name: found[name] for name in ("tis/ess/fraction", "tis/kept_weight")}
    assert metrics == pytest.approx({"tis/ess/fraction": 1.0, "tis/kept_weight": left}, rel=2e-3)
    assert levels(run(*[metrics] * 3)) == ({"weight_share": level} if level else {})
    plain = coefficients(OBJECTIVES["dapo"], columns).values
    assert float(coefficients(replace(OBJECTIVES[row], aggregation="token-mean"), columns).values.abs().sum()) == (
        pytest.approx(left * float(plain.abs().sum()), rel=2e-3)
    )


def test_rewards_that_are_all_zero() -> None:
    for count, expected in ((2, {}), (3, {"zero_reward_steps": "warning"}), (7, {"zero_reward_steps": "warning"})):
        assert levels(run(*[ZERO] * count, calm=0)) == expected
    (verdict,) = judge_run(run(*[ZERO] * 8, calm=0))
    assert (verdict.level, verdict.check, verdict.since) == ("alarm", "zero_reward_steps", 1)
    assert verdict.found == "every reward is 0: 8 steps in a row (warning from 3 steps, alarm from 8 steps)"
    assert levels(run(*[ZERO] * 30, {}, calm=0)) == {}  # one reward ends the row
    # With one response to a prompt, no prompt can have contrast, and rewards of -1 and 1 may have the mean 0.
    single = {"sampling/samples_per_prompt": 1, "prompts/effective_ratio": 0.0}
    assert levels(run(*[{**ZERO, **single}] * 8, calm=0)) == {"zero_reward_steps": "alarm"}
    assert levels(run(*[single] * 8, calm=0)) == {}
    assert levels(run(*[{"reward/mean": 0.0}] * 8, calm=0)) == {}


def test_no_contrast_is_an_alarm_unless_the_task_is_solved() -> None:
    uniform = {"prompts/effective_ratio": 0.0}
    assert levels(run(*[uniform] * 3, calm=0)) == {"contrast_share": "alarm"}
    assert levels(run(*[{**uniform, "reward/mean": -1.0, "reward/pass_rate": 0.0}] * 3, calm=0)) == {
        "contrast_share": "alarm"
    }
    for rate, expected in ((0.89, {"contrast_share": "alarm"}), (0.9, {"solved_share": "warning"})):
        assert levels(run(*[{**uniform, "reward/pass_rate": rate}] * 3, calm=0)) == expected
    assert levels(run(*[{"prompts/effective_ratio": 0.03, "reward/pass_rate": 0.95}] * 9, calm=0)) == {}
    # 4 prompts a step: 48 are 12 steps.
    few = {**uniform, "sampling/samples": 32}
    assert [levels(run(*[few] * count, calm=0)) for count in (11, 12)] == [{}, {"contrast_share": "alarm"}]


def test_entropy_may_fall_where_the_task_is_solved() -> None:
    low = {"rollout/entropy": 0.01}
    assert levels(run(*[low] * 3)) == {"entropy_fall_ratio": "alarm"}
    assert levels(run(*[{**low, "reward/pass_rate": 0.95}] * 30)) == {}
    assert levels(run(*[{"rollout/entropy": 0.0}] * 30, calm=0)) == {}  # nothing to fall from


def test_the_routers_own_choice_counts_where_replay_recorded_it() -> None:
    assert levels(run(*[{"router/native/flip": None, "router/flip": 0.4}] * 9, calm=0)) == {"flip_share": "warning"}
    assert levels(run(*[{"router/native/flip": 0.1, "router/flip": 0.4}] * 9, calm=0)) == {}


def test_a_verdict_needs_patience_to_begin_and_to_end() -> None:
    cut = {"response/truncated_fraction": 0.5}
    worse = {"response/truncated_fraction": 0.7}
    assert levels(run(cut, cut, {}, cut, cut)) == {}
    (verdict,) = judge_run(run(cut, {}, cut, cut, cut))
    assert verdict.since == 13
    assert levels(run(cut, cut, cut, worse, worse)) == {"truncated_share": "warning"}
    (verdict,) = judge_run(run(cut, cut, cut, worse, worse, worse, {}, {}))
    assert (verdict.level, verdict.since) == ("alarm", 11)
    assert levels(run(*[worse] * 3, {}, cut)) == {"truncated_share": "alarm"}
    assert levels(run(*[worse] * 3, {}, {}, cut)) == {"truncated_share": "warning"}
    assert levels(run(*[worse] * 3, cut, cut, cut)) == {"truncated_share": "warning"}
    assert levels(run(*[worse] * 3, {}, {}, {})) == {}
    assert levels(run(*[cut] * 2), patience_steps=2) == {"truncated_share": "warning"}


def test_a_spike_speaks_at_once_and_is_forgotten() -> None:
    spike = {"grad_norm": 20.0}
    (verdict,) = judge_run(run(spike))
    assert (verdict.check, verdict.level, verdict.since) == ("gradient_ratio", "warning", 11)
    assert verdict.found == "largest gradient norm 20, 10 x the usual (warning from 10 x, alarm from 100 x)"
    assert levels(run(spike, *[{}] * 19)) == {"gradient_ratio": "warning"}
    assert levels(run(spike, *[{}] * 20)) == {}
    assert levels(run(*[spike] * 60)) == {"gradient_ratio": "warning"}  # spikes do not become what is usual
    assert levels(run(spike, calm=4)) == {}
    # Of the two mini-batches the larger norm counts; steps without a gradient are not what is usual.
    records = run(calm=11)
    records[-3]["grad_norm"] = 20.0
    assert levels(records) == {"gradient_ratio": "warning"}
    assert levels(run(*[{"grad_norm": 0.0}] * 90, {"grad_norm": 3.0})) == {}


def test_a_gradient_of_exactly_zero_speaks_at_once() -> None:
    none = {"grad_norm": 0.0}
    assert [levels(run(*[none] * count)).get("zero_gradient_steps") for count in (0, 1, 2, 3)] == [
        None, "warning", "warning", "alarm",
    ]  # fmt: skip
    (verdict,) = judge_run(run(none, none))
    assert (verdict.since, verdict.found) == (
        11, "every gradient norm is exactly 0: 2 steps in a row (warning from 1 steps, alarm from 3 steps)"
    )  # fmt: skip
    assert levels(run(*[none] * 9, {"grad_norm": 5e-324})) == {}  # the smallest number is a gradient
    assert levels(run(*[{"grad_norm": None}] * 9)) == {}  # steps without an update
    records = run(none)
    records[-2]["grad_norm"] = 1.0  # one of two updates had a gradient
    assert levels(records) == {}


def test_a_pass_rate_that_falls_is_told_from_noise() -> None:
    chance = random.Random(0)

    def noisy(mean: float, sd: float, count: int) -> list[dict[str, float]]:
        return [{"reward/pass_rate": min(0.89, max(0.01, chance.gauss(mean, sd)))} for _ in range(count)]

    for mean, sd in ((0.3, 0.1), (0.1, 0.08), (0.5, 0.02)):
        for length in range(1, 12):
            assert levels(run(*noisy(mean, sd, 80 * length), calm=0), **only("pass_rate_ratio")) == {}
    fallen = run(*noisy(0.5, 0.05, 30), *noisy(0.2, 0.05, 10), calm=0)
    assert levels(fallen) == {"pass_rate_ratio": "warning"}
    assert levels(run(*noisy(0.5, 0.05, 30), *noisy(0.05, 0.02, 10), calm=0)) == {"pass_rate_ratio": "alarm"}
    # At the limits: means of 5 steps without noise.
    for rate, expected in ((0.25, {"pass_rate_ratio": "warning"}), (0.26, {}), (0.1, {"pass_rate_ratio": "alarm"})):
        assert levels(run(*[{"reward/pass_rate": rate}] * 7), **only("pass_rate_ratio")) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_an_alarm_at_once(name: str, value: float) -> None:
    solved = {"reward/pass_rate": 0.95} if name == "solved_share" else {}
    metric = APART.get(name) or READS[name][0]
    (verdict,) = judge_run(run({**solved, metric: value}), HealthConfig(**only(name)))
    assert verdict.level == "alarm"
    assert verdict.since == 11
    assert verdict.found.endswith(f": found {value}")


def test_every_value_may_be_odd_or_absent() -> None:
    """Whatever a metric is, there is an answer, and a run without it has no verdict."""
    for metric in METRICS:
        assert levels(run(*[{metric: None}] * 20, calm=0)) == {}, metric
        for value in (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 5e-324):
            judge_run(run({metric: value}, {}, {metric: value}, {metric: value}, calm=6))
    assert levels([{"kind": "step", "step": n, "minibatch": None, "reward/mean": 0.0} for n in range(1, 30)]) == {}


def real(name: str) -> list[dict[str, Any]]:
    return read_metrics(RUNS / f"{name}.jsonl")


def every_moment(records: list[dict[str, Any]]) -> Iterator[list[HealthVerdict]]:
    health = Health(HealthConfig())
    for record in records:
        health.add(record)
        yield health.verdicts()


def test_a_healthy_run_is_calm_at_every_moment() -> None:
    assert [found for found in every_moment(real("healthy")) if found] == []


def test_bad_runs_are_alarms() -> None:
    # Rewards that are all equal leave no gradient.
    expected = [(check, "alarm", 1) for check in ("zero_reward_steps", "zero_gradient_steps")]
    assert [(v.check, v.level, v.since) for v in judge_run(real("reward0"))] == expected
    found = {verdict.check: verdict.level for verdict in judge_run(real("collapsing"))}
    assert found == dict.fromkeys(
        ("zero_reward_steps", "pass_rate_ratio", "truncated_share", "zero_gradient_steps"), "alarm"
    )


def test_one_record_after_the_other_is_the_same_as_all_at_once() -> None:
    records = real("collapsing")
    for count, found in enumerate(every_moment(records), 1):
        assert found == judge_run(records[:count])


def test_news_are_told_once() -> None:
    """When a verdict appears, with cause and advice; when it becomes an alarm; and when it has ended."""
    health, told = Health(HealthConfig()), {}
    for number in range(1, 30):
        share = 0.5 if 3 <= number < 9 else 0.9 if 9 <= number < 15 else 0.0
        for record in step(number, **{"response/truncated_fraction": share}):
            health.add(record)
        told[number] = health.news()
    assert {number: len(lines) for number, lines in told.items() if lines} == {5: 3, 11: 1, 17: 1}
    assert told[5][0].startswith("warning since step 3, truncated_share: share of responses that the token limit cuts")
    assert [line.strip().partition(" ")[0] for line in told[5][1:]] == ["cause:", "advice:"]
    assert told[11][0].startswith("alarm since step 3, truncated_share: ")
    assert told[17] == ["truncated_share: within its limits again"]


TABLES: dict[str, Any] = {
    **{"run": {"steps": 1}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "optim": {"lr": 1e-3}},
    "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": 8},
}


def test_limits_are_checked_and_written_back() -> None:
    good = {"k3_nats": [1.0], "ess_share": [0.5, 0.5], "solved_share": "off", "zero_reward_steps": [5]}
    config = parse(TABLES | {"health": good})
    assert config.health == HealthConfig(**good)
    assert parse(TABLES, {"health.k3_nats": [1, 2]}).health.k3_nats == [1.0, 2.0]
    wrong = [("k3_nats", value) for value in ([0.3, 0.05], [], [1.0, 2.0, 3.0], [-1.0], "none", [math.nan])]
    wrong += [("zero_reward_steps", [0]), ("zero_reward_steps", [1.5]), ("patience_steps", 0), ("k4", [1.0])]
    for name, value in [*wrong, ("ess_share", [0.2, 0.5])]:
        with pytest.raises(ConfigError, match=rf"health\.{name}"):
            parse(TABLES | {"health": {name: value}})


def test_the_page_is_what_the_checks_give() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "health_doc.py"))
    assert (ROOT / "docs" / "health.md").read_text() == tool["document"](), "run python tools/health_doc.py"
