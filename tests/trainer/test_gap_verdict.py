"""What ``megarl gap`` makes of its numbers: limits, causes, text."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from megarl.watch.gap_verdict import Gap, PairGap, judge
from megarl.watch.limits import GAP as LIMITS

SMALL = Gap(1e-9, 1e-12, 0.0)
CONTROL = PairGap("fp32", "fp32", False, 100, SMALL, SMALL, (0.0, 0.0))


def row(k3: float, r3: float | None = None, extreme: float = 0.0, **changed: object) -> PairGap:
    replayed = None if r3 is None else Gap(0.0, r3, 0.0)
    flips = None if r3 is None else (0.1, 0.3)
    return replace(PairGap("fp8", "bf16", True, 100, Gap(0.0, k3, extreme), replayed, flips), **changed)


def above(limit: float) -> float:
    return math.nextafter(limit, 1.0)


@pytest.mark.parametrize(
    ("configured", "healthy"),
    [
        (row(LIMITS.k3), True),
        (row(above(LIMITS.k3)), False),
        (row(0.0, extreme=LIMITS.extreme), True),
        (row(0.0, extreme=above(LIMITS.extreme)), False),
        (row(0.0), True),
    ],
)
def test_a_gap_at_its_limit_is_healthy_and_above_it_is_bad(configured: PairGap, healthy: bool) -> None:
    verdict = judge([configured, CONTROL], "none", LIMITS)
    assert verdict.is_healthy is healthy
    assert verdict.findings[0].startswith("healthy: " if healthy else "BAD: the gap is too large")


@pytest.mark.parametrize(
    ("k3", "flip", "healthy"),
    [
        (LIMITS.control_k3, LIMITS.control_flip, True),
        (above(LIMITS.control_k3), 0.0, False),
        (0.0, above(LIMITS.control_flip), False),
    ],
)
def test_engines_that_disagree_in_fp32_are_wrong_whatever_else_is_measured(
    k3: float, flip: float, healthy: bool
) -> None:
    control = replace(CONTROL, native=Gap(0.0, k3, 0.0), flips=(flip,))
    verdict = judge([row(1e-6, 1e-9), control], "r3", LIMITS)
    assert verdict.is_healthy is healthy
    assert ("disagree even in fp32" in verdict.findings[0]) is not healthy


def test_the_configured_pair_in_fp32_is_its_own_control() -> None:
    alone = replace(CONTROL, is_configured=True, native=Gap(0.0, 1e-5, 0.0))
    assert not judge([alone], "r3", LIMITS).is_healthy
    assert judge([alone], "r3", replace(LIMITS, control_k3=1e-5)).is_healthy


def test_the_way_of_replay_that_is_configured_is_judged() -> None:
    configured = row(0.05, 0.001)
    assert judge([configured], "r3", LIMITS).is_healthy
    for replay in ("none", "r2"):
        verdict = judge([configured], replay, LIMITS)
        assert not verdict.is_healthy
        assert 'within the limits with train.replay = "r3": k3 1.0e-03' in verdict.findings
        assert any("removes 98% of the gap: set train.replay" in finding for finding in verdict.findings)
    assert not judge([row(0.05)], "r3", LIMITS).is_healthy  # a dense model has nothing to replay


@pytest.mark.parametrize(("r3", "is_named"), [(0.25, True), (0.26, False), (0.5, False), (0.9, False)])
def test_replay_is_named_where_it_removes_half_of_the_gap(r3: float, is_named: bool) -> None:
    findings = judge([row(0.5, r3)], "none", LIMITS).findings
    assert any("replay of the rollout's routes removes" in finding for finding in findings) is is_named
    assert any("neither replay nor" in finding for finding in findings) is not is_named


@pytest.mark.parametrize(("exact", "is_named"), [(0.25, True), (0.26, False)])
def test_precision_is_named_where_fp32_rollouts_have_half_of_the_gap(exact: float, is_named: bool) -> None:
    other = row(exact, rollout="fp32", is_configured=False)
    findings = judge([row(0.5), other, CONTROL], "none", LIMITS).findings
    assert any("rollout precision explains 50% of the gap" in finding for finding in findings) is is_named
    elsewhere = replace(other, training="fp32", native=SMALL, flips=None)  # other training: no evidence
    assert not any(
        "rollout precision explains" in finding for finding in judge([row(0.5), elsewhere], "none", LIMITS).findings
    )


def test_text_and_json_say_the_same() -> None:
    rows = [row(0.05, 0.001), CONTROL]
    verdict = judge(rows, "none", LIMITS)
    text = verdict.to_text()
    assert "fp8 *" in text
    assert "20.00%" in text  # mean over layers
    assert verdict.findings[0] in text
    found = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert found["healthy"] is False
    assert found["findings"] == list(verdict.findings)
    assert found["gaps"][0]["native"]["k3"] == 0.05
    assert found["gaps"][0]["flip"] == pytest.approx(0.2)
    assert len(found["gaps"][0]["flips"]) == 2
