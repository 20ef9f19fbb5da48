from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from trials.intervals import describe, first_reach, median_interval
from trials.rows import prompt_bandit
from trials.rows.prompt_bandit import (
    PUBLISHED_PASS_AT_K,
    Course,
    PromptBandit,
    Recipe,
    bisect,
    fit_mixture,
    objective_value,
    share_of_mixed,
    train,
)

from megarl.core.choices.credit import Credit
from megarl.core.choices.stopping import Allotted, Uniform, ada_seq_balance
from megarl.core.sampling.collector import Collector, Selection


def select(rewards: list[list[float]], rule: Uniform) -> Selection:
    """What the collector selects of these rewards, [B][M]."""
    by_key = {(prompt, sample): r for prompt, row in enumerate(rewards) for sample, r in enumerate(row)}
    return Collector(rule, len(rewards)).replay(by_key)


def make_tiny() -> PromptBandit:
    """Two prompts, three answers, two features, weights that are not 0."""
    features = torch.tensor([[0.6, 0.8], [1.0, 0.0]], dtype=torch.float64)
    offsets = torch.tensor([[0.3, -0.2, 0.1], [-1.0, 0.5, 0.0]], dtype=torch.float64)
    bandit = PromptBandit(features, offsets, np.array([[True, False, False], [False, True, True]]))
    with torch.no_grad():
        bandit.weights.copy_(torch.tensor([[0.2, -0.4, 0.1], [0.5, 0.3, -0.7]]))
    return bandit


def test_mixture_has_the_published_pass_at_k():
    mixture = fit_mixture()
    for k, solved in PUBLISHED_PASS_AT_K.items():
        # The Beta moment as a product, where the code has logarithms of the gamma function.
        miss = math.prod((mixture.b + i) / (mixture.a + mixture.b + i) for i in range(k))
        assert mixture.unsolvable + (1 - mixture.unsolvable) * miss == pytest.approx(1 - solved, abs=1e-9)
        rates, weights = mixture.points()
        assert weights @ (1 - (1 - rates) ** k) == pytest.approx(solved, abs=1e-6)
    assert 0.18 < mixture.unsolvable < 1 - PUBLISHED_PASS_AT_K[256]


def test_drawn_rates_have_the_mean_of_the_mixture():
    mixture = fit_mixture()
    mean = (1 - mixture.unsolvable) * mixture.a / (mixture.a + mixture.b)
    rates = mixture.draw(100_000, np.random.default_rng(0))
    assert rates.mean() == pytest.approx(mean, abs=4 * rates.std() / math.sqrt(rates.size))


def test_bisect_refuses_equal_signs():
    assert bisect(lambda x: 2 - x * x, 0.0, 2.0) == pytest.approx(math.sqrt(2), abs=1e-12)
    with pytest.raises(ValueError, match=r"expected \+ and -"):
        bisect(lambda x: x, 1.0, 2.0)


def test_bandit_starts_at_drawn_rates_and_has_exact_entropy():
    bandit = PromptBandit.make(3, size=50)
    generator = np.random.default_rng([3, 0])
    np.testing.assert_allclose(bandit.pass_rates(), fit_mixture().draw(50, generator), atol=1e-12)
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log() + 3
    plain = PromptBandit(torch.zeros(1, 1, dtype=torch.float64), logits, np.array([[True, False, False]]))
    assert plain.entropy() == pytest.approx(1.0397207708399179, abs=1e-12)
    assert plain.pass_rates()[0] == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize(("objective", "credit"), [("reinforce", None), ("dapo", Credit())])
def test_expected_gradient_is_that_of_the_pass_rate(objective: str, credit: Credit | None):
    """Over all pairs of answers: E[grad] = (n - 1) / n grad mean p, because the group's mean includes the sample."""
    bandit = make_tiny()
    recipe = Recipe("n2", 2, lambda rates: Uniform(2), objective, credit)
    prompts = np.array([0, 1])
    policy = bandit.log_policy().exp().detach().numpy()
    expected = torch.zeros_like(bandit.weights)
    for answers in itertools.product(range(3), repeat=4):
        rows = np.reshape(answers, (2, 2))
        chance = policy[0, rows[0]].prod() * policy[1, rows[1]].prod()
        rewards = np.take_along_axis(bandit.is_right, rows, 1).astype(float).tolist()
        value = objective_value(bandit, recipe, select(rewards, Uniform(2)), prompts, rows)
        (gradient,) = torch.autograd.grad(value, bandit.weights)
        expected += chance * gradient
    slopes = torch.zeros_like(bandit.weights)
    for place in itertools.product(range(2), range(3)):
        ends = []
        for shift in (1e-5, -2e-5):
            with torch.no_grad():
                bandit.weights[place] += shift
            ends.append(bandit.pass_rates().mean())
        with torch.no_grad():
            bandit.weights[place] += 1e-5
        slopes[place] = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close(expected, slopes / 2, atol=1e-9, rtol=0)


def test_answers_follow_the_policy():
    bandit = make_tiny()
    recipe = Recipe("many", 2, lambda rates: Uniform(5000))
    answers, _ = prompt_bandit.draw_step(bandit, recipe, np.array([1, 0]), np.zeros(2), np.random.default_rng(1))
    shares = np.stack([np.bincount(row, minlength=3) for row in answers]) / 5000
    np.testing.assert_allclose(
        shares, bandit.log_policy(np.array([1, 0])).exp().detach(), atol=4 * 0.5 / math.sqrt(5000)
    )


def test_course_counts_samples_and_splits_the_batch_reward():
    """Prompts of 2 and 6 samples with mean rewards 1 and 1/2: batch 5/8, prompts 3/4, covariance -1/8."""
    rewards = {(0, sample): 1.0 for sample in range(2)} | {(1, sample): float(sample % 2) for sample in range(6)}
    course = Course()
    course.count(Collector(Allotted((2, 6)), 2).replay(rewards))
    assert (course.drawn, course.trained, course.mixed) == ([8], [8], [0.5])
    assert course.batch_reward == [pytest.approx(5 / 8)]
    assert course.prompt_reward == [pytest.approx(3 / 4)]
    assert course.covariance == [pytest.approx(-1 / 8)]


def test_mixed_groups_are_those_with_both_rewards():
    rewards = [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]]
    assert share_of_mixed(select(rewards, Uniform(3))) == 0.5


def test_training_is_deterministic_and_learns():
    recipe = Recipe("Bal", 16, lambda rates: ada_seq_balance(4), "dapo", Credit())
    first, second = (train(PromptBandit.make(0, size=32), recipe, 20, 0) for _ in range(2))
    assert first.accuracy == second.accuracy
    assert first.accuracy[-1] > first.accuracy[0] + 0.1
    assert first.trained[-1] == 20 * 16 * 4
    assert len(first.accuracy) == len(first.drawn) + 1 == 21


@pytest.mark.parametrize(("size", "low"), [(5, 0), (6, 0), (10, 1), (12, 2), (20, 5)])
def test_median_interval_is_the_narrowest_with_the_level(size: int, low: int):
    """The coverage of ranks r and n + 1 - r is the chance of r to n - r heads of n fair coins."""
    values = [float(value) for value in range(size)]
    assert median_interval(values[::-1]) == ((size - 1) / 2, low, size - 1 - low)
    coverages = [
        sum(math.comb(size, heads) for heads in range(rank, size - rank + 1)) / 2**size for rank in (low + 1, low + 2)
    ]
    assert coverages[1] < 0.95
    assert coverages[0] >= 0.95 or low == 0


def test_first_reach_interpolates():
    assert first_reach([0.0, 0.5, 0.4, 0.9], [0, 10, 20, 40], 0.25) == 5
    assert first_reach([0.0, 0.5, 0.4, 0.9], [0, 10, 20, 40], 0.65) == 30
    assert first_reach([0.3, 0.5], [7, 9], 0.2) == 7
    with pytest.raises(ValueError, match="never reaches"):
        first_reach([0.0, 0.5], [0, 1], 0.6)


def test_interval_in_words():
    assert describe((1.25, -0.5, 2.0), 1, " points", signed=True) == "+1.2 points (-0.5 to +2.0)"
