"""Rows 14, 15 and 17 of the evidence page: their parts against enumeration, automatic and finite differences."""

from __future__ import annotations

import itertools
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from trials.intervals import cover_median
from trials.rows import allocation_bandit, chain_problem, credit_rows, stopping_problem
from trials.rows.source_row import Data, SourceRow

from megarl.core.choices.parts import Scope

ROWS = {row.number: row for row in credit_rows.ROWS}
FEW: dict[str, Any] = {"NUM_PROBLEMS": 4, "NUM_BANDITS": 8, "STALENESS": (1, 2, 4)}
FEW["SHOWN"] = ((2, 300.0), (4, 300.0), (4, 1000.0))
SCOPES: tuple[Scope, ...] = ("token", "sequence_mean", "prefix", "future_mean")


@pytest.fixture(scope="module")
def measured() -> dict[int, Data]:
    """The data of each row from few problems and short training, as they come back from JSON."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(credit_rows, name, value)
        patch.setattr(chain_problem, "NUM_UPDATES", 4)
        return {number: json.loads(json.dumps(row.measure())) for number, row in ROWS.items()}


@pytest.mark.parametrize("row", credit_rows.ROWS, ids=lambda row: f"row {row.number}")
def test_each_row_has_a_picture_and_a_sentence(
    row: SourceRow, measured: dict[int, Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in FEW.items():
        monkeypatch.setattr(credit_rows, name, value)
    figure = Figure(figsize=(7, 3.2))
    row.draw(figure, measured[row.number])
    assert all(axes.has_data() for axes in figure.axes)
    assert row.conclude(measured[row.number]).endswith(".")


@pytest.mark.parametrize(("size", "k", "missing"), [(16, 4, 0.02127), (20, 6, 0.04139), (24, 7, 0.02266)])
def test_intervals_of_the_median_are_those_of_the_sign_test(size: int, k: int, missing: float) -> None:
    values = np.random.default_rng(0).permutation(size).astype(float)
    assert credit_rows.median_span(values) == [k - 1, (size - 1) / 2, size - k]
    assert 1 - cover_median(size, k) == pytest.approx(missing, abs=1e-5)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of three tokens, two seeds."""
    monkeypatch.setattr(chain_problem, "LENGTH", 3)
    monkeypatch.setattr(chain_problem, "NUM_SEEDS", 2)
    monkeypatch.setattr(chain_problem, "_POSITIONS", torch.arange(3))


def random_logits(seed: int) -> torch.Tensor:
    shape = chain_problem.NUM_SEEDS, chain_problem.LENGTH, chain_problem.VOCABULARY, chain_problem.VOCABULARY
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("short")
def test_the_pass_rate_is_the_sum_over_all_right_responses() -> None:
    allowed, logits = chain_problem.make_allowed(torch.Generator().manual_seed(1)), random_logits(2)
    assert allowed.sum(-1).unique().tolist() == [3]
    chances = logits.softmax(-1)
    expected = [0.0, 0.0]
    for seed, response in itertools.product(range(2), itertools.product(range(4), repeat=3)):
        steps = list(enumerate(pairwise((0, *response))))
        if all(allowed[seed, position, before, token] for position, (before, token) in steps):
            expected[seed] += math.prod(float(chances[seed, position, a, b]) for position, (a, b) in steps)
    assert chain_problem.pass_rates(logits, allowed).tolist() == pytest.approx(expected)


@pytest.mark.usefixtures("short")
def test_samples_have_the_probabilities_and_rewards_of_their_tokens() -> None:
    allowed, logits = chain_problem.make_allowed(torch.Generator().manual_seed(1)), random_logits(2)
    batch = chain_problem.sample(logits, allowed, 4000, torch.Generator().manual_seed(0))
    log_chances = logits.log_softmax(-1)
    for seed, n in itertools.product(range(2), range(5)):
        steps = list(enumerate(pairwise((0, *batch.tokens[seed, n].tolist()))))
        logprobs = [float(log_chances[seed, position, a, b]) for position, (a, b) in steps]
        assert batch.old_logprobs[seed, n].tolist() == pytest.approx(logprobs)
        assert bool(batch.rewards[seed, n]) == all(allowed[seed, position, a, b] for position, (a, b) in steps)
    rates = chain_problem.pass_rates(logits, allowed)
    assert torch.allclose(batch.rewards.mean(1), rates, atol=0.03)


def surrogate(scope: Scope, power: float, is_clipped: bool, batch: chain_problem.Batch, lps: torch.Tensor) -> Any:
    """The objective of one seed, spelled out: mean over responses of mean_t sg[M rho^q] A lp, A = 1[R = 1]."""
    total, size = torch.zeros((), dtype=torch.float64), batch.tokens.size(1)
    for n in range(size):
        logs = (lps[n] - batch.old_logprobs[0, n]).detach().tolist()
        for t in range(len(logs)):
            terms = {"token": logs[t : t + 1], "prefix": logs[: t + 1], "future_mean": logs[t:], "sequence_mean": logs}
            log_rho = sum(terms[scope]) / (len(terms[scope]) if scope.endswith("mean") else 1)
            weight = 0.0 if is_clipped and math.exp(log_rho) > 1.28 else math.exp(power * log_rho)
            total = total + weight * batch.rewards[0, n] * lps[n, t] / len(logs) / size
    return total


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("arm", ["clip", "half", "full"])
def test_the_gradient_is_that_of_the_spelled_out_objective(scope: Scope, arm: str) -> None:
    allowed, old = chain_problem.make_allowed(torch.Generator().manual_seed(1)), random_logits(2)
    batch = chain_problem.sample(old, allowed, 6, torch.Generator().manual_seed(0))
    logits = old + 0.5 * random_logits(3)
    power = 0.5 if arm == "half" else 1.0
    objective = credit_rows.clipped(scope) if arm == "clip" else credit_rows.powered(scope, power)
    values = chain_problem.gradient(objective, logits, batch)
    table = logits.clone().requires_grad_()
    lps = chain_problem.pick(table.log_softmax(-1), batch.previous, batch.tokens)[0]
    surrogate(scope, power, arm == "clip", batch, lps).backward()
    assert torch.allclose(values[0], table.grad[0], atol=1e-12)
    assert values[0].abs().max() > 1e-3


def test_on_policy_all_weights_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_problem, "NUM_UPDATES", 4)
    baseline = chain_problem.train(credit_rows.powered("token", 0.0), 1, 300.0)
    for scope in SCOPES:
        for objective in (credit_rows.clipped(scope), credit_rows.powered(scope, 1.0)):
            assert torch.allclose(chain_problem.train(objective, 1, 300.0), baseline, rtol=1e-12)
    stale = chain_problem.train(credit_rows.powered("token", 1.0), 4, 300.0)
    assert not torch.allclose(stale, baseline, rtol=1e-2)


def enumerated_objective(seed: int, logits: torch.Tensor, beta: float, horizon: int | None) -> float:
    """E[R - beta / H ln(pi / pi_ref)] by a loop over responses."""
    problem = stopping_problem.make_problem(seed)
    total = 0.0
    for n, (start, end) in enumerate(pairwise(problem.bounds.tolist())):
        rows, tokens = problem.places[0][start:end], problem.places[1][start:end]
        lps = [float(logits[row].log_softmax(-1)[token]) for row, token in zip(rows, tokens, strict=True)]
        kl = sum(lps) - float(problem.ref_logprobs[start:end].sum())
        total += math.exp(sum(lps)) * (float(problem.rewards[n]) - beta / (horizon or len(lps)) * kl)
    return total


def test_the_responses_are_all_there_are() -> None:
    problem = stopping_problem.make_problem(0)
    chances = problem.by_response(problem.logprobs(problem.logits)).exp()
    assert len(chances) == 1 + 2 + 4 + 8 * 3
    assert float(chances.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("horizon", [None, stopping_problem.MAX_TOKENS])
def test_the_true_gradient_is_that_of_finite_differences(horizon: int | None) -> None:
    problem = stopping_problem.make_problem(3)
    truth = stopping_problem.true_gradient(problem, 0.7, horizon)
    for row, token in [(0, 0), (0, 2), (1, 1), (5, 0), (14, 2)]:
        step = torch.zeros_like(problem.logits)
        step[row, token] = 1e-5
        ahead, behind = (enumerated_objective(3, problem.logits + s * step, 0.7, horizon) for s in (1, -1))
        assert float(truth[row, token]) == pytest.approx((ahead - behind) / 2e-5, abs=1e-9)


def test_the_printed_form_is_biased_and_the_complete_one_is_not(measured: dict[int, Data]) -> None:
    largest = measured[15]["largest"]
    assert min(largest["printed"]) > 0.01
    assert min(largest["explicit"]) > 1e-4
    assert max(*largest["complete"], *largest["constant"]) < 1e-14


def test_the_printed_estimate_is_the_score_times_returns_to_go() -> None:
    problem = stopping_problem.make_problem(2)
    estimate = stopping_problem.estimated_gradient(problem, "printed", 0.7)
    chances, expected = problem.logits.softmax(-1), torch.zeros_like(problem.logits)
    for n, (start, end) in enumerate(pairwise(problem.bounds.tolist())):
        places = [(problem.places[0][t], problem.places[1][t]) for t in range(start, end)]
        gaps = [math.log(chances[place]) - float(problem.ref_logprobs[start + j]) for j, place in enumerate(places)]
        probability = math.prod(float(chances[place]) for place in places)
        for j, (row, token) in enumerate(places):
            score = -chances[row].clone()
            score[token] += 1
            expected[row] += probability * (float(problem.rewards[n]) - 0.7 / len(places) * sum(gaps[j:])) * score
    assert torch.allclose(estimate, expected, atol=1e-12)


def test_the_gradients_of_right_responses_are_those_of_finite_differences() -> None:
    generator = np.random.default_rng(0)
    outcome, style = generator.normal(size=(2, 1, 16)), generator.normal(size=(2, 4, 16))
    bias, levels = generator.normal(size=2), generator.normal(size=(2, 4))

    def log_chance(theta: np.ndarray, prompt: int, kind: int) -> float:
        logits = levels[prompt] + style[prompt] @ theta
        logit = bias[prompt] + float(outcome[prompt, 0] @ theta)
        return -math.log1p(math.exp(-logit)) + logits[kind] - math.log(np.exp(logits).sum())

    styles = np.exp(levels) / np.exp(levels).sum(1, keepdims=True)
    gradients = allocation_bandit.accepted_gradients(1 / (1 + np.exp(-bias)), styles, outcome, style)
    for prompt, kind in itertools.product(range(2), range(4)):
        steps = 1e-6 * np.eye(16)
        slopes = [(log_chance(s, prompt, kind) - log_chance(-s, prompt, kind)) / 2e-6 for s in steps]
        assert gradients[prompt, kind] == pytest.approx(slopes, abs=1e-8)


def test_the_error_is_that_of_all_possible_samples() -> None:
    """Three prompts with 1, 2 and 0 samples: each sample is wrong, or right in one of four styles."""
    bandit, counts = allocation_bandit.make_bandit(5, 3, 0.5), np.array([1, 2, 0])
    whole, expected = bandit.means.sum(0), 0.0
    owners = np.repeat(np.arange(3), counts)
    for outcomes in itertools.product(range(-1, 4), repeat=len(owners)):
        chance, estimate = 1.0, np.zeros(16)
        for prompt, kind in zip(owners, outcomes, strict=True):
            rate = bandit.rates[prompt]
            chance *= 1 - rate if kind < 0 else rate * bandit.styles[prompt, kind]
            if kind >= 0:
                estimate += bandit.gradients[prompt, kind] / (counts[prompt] * rate)
        expected += chance * float(((estimate - whole) ** 2).sum())
    assert allocation_bandit.gradient_error(bandit, counts) == pytest.approx(expected)


def test_estimates_of_many_samples_are_the_exact_rates_and_norms() -> None:
    bandit = allocation_bandit.make_bandit(1, 4, 0.8)
    rates, norms = allocation_bandit.estimate(bandit, 40_000, np.random.default_rng(0))
    assert rates == pytest.approx(bandit.rates, abs=0.01)
    assert norms == pytest.approx(bandit.norms, rel=0.05)


def test_the_numbers_of_samples_follow_their_laws() -> None:
    bandit = allocation_bandit.make_bandit(0, credit_rows.NUM_PROMPTS, 0.8)
    counts = credit_rows.allocations(bandit, 0)
    total = credit_rows.TOTAL
    weights = bandit.norms / np.sqrt(bandit.rates + 1e-3 / bandit.rates)
    assert abs(counts["gvm"] - total * weights / weights.sum()).max() < 1.5
    roots = np.sqrt(1 / bandit.rates)
    assert np.corrcoef(counts["root"], roots)[0, 1] > 0.99
    paid = {"gvm_8_paid": total - 38, "gvm_32_paid": total - 153}
    assert {arm: int(counts[arm].sum()) for arm in credit_rows.ARMS} == dict.fromkeys(credit_rows.ARMS, total) | paid
    assert credit_rows.error_ratio(bandit, np.full(credit_rows.NUM_PROMPTS, 8)) == 1.0
    others = [credit_rows.error_ratio(bandit, counts[arm]) for arm in ("gvm", "root")]
    assert credit_rows.error_ratio(bandit, counts["ideal"]) < min(others)


@pytest.mark.parametrize(
    ("interval", "above", "below"),
    [
        ([0.001, 0.01, 0.3], True, False),
        ([0.001, 0.009, 0.3], False, False),
        ([0.0, 0.1, 0.3], False, False),
        ([-0.3, -0.01, -0.001], False, True),
        ([-0.3, -0.1, 0.0], False, False),
    ],
)
def test_a_difference_is_apart_from_0_by_its_interval_and_a_point(
    interval: list[float], above: bool, below: bool
) -> None:
    assert (credit_rows.is_apart(interval, 1), credit_rows.is_apart(interval, -1)) == (above, below)
