"""A bandit of prompts with known pass rates, trained with megarl's sampling rules, advantages and coefficients.

A prompt has A possible answers of one token, some of which are right. The policy is a softmax over answers with logits
``offsets + features @ weights``, so prompts of a topic learn from each other. Pass rate and entropy are exact sums. At
the start, pass rates follow the mixture of ``fit_mixture``: like those of a published model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from megarl.core.choices.credit import Credit
from megarl.core.choices.stopping import SamplingRule
from megarl.core.objectives import OBJECTIVES, TokenColumns, advantages_of, coefficients
from megarl.core.sampling.collector import Collector, Selection
from megarl.core.sampling.credit_assignment import assign
from megarl.core.sampling.pass_rates import PassRateCounts

PUBLISHED_PASS_AT_K = {4: 0.627, 32: 0.796, 256: 0.813}
"""Share of prompts solved in k tries: a post on adaptive sampling, Qwen2.5-Math-1.5B."""
NUM_PROMPTS, NUM_TOPICS, NUM_FEATURES = 256, 16, 64
NUM_ANSWERS, NUM_RIGHT = 8, 2
LOWEST_RATE = 1e-4
"""A softmax has no pass rate of exactly 0 or 1."""
LEARNING_RATE = 0.03
"""Of Adam, so that the scale of an advantage does not set the size of a step."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Pass rates of prompts: 0 with probability ``unsolvable``, else drawn from Beta(a, b)."""

    unsolvable: float
    a: float
    b: float

    def pass_at_k(self, k: int) -> float:
        """Return ``(1 - u) (1 - B(a, b + k) / B(a, b))``: the probability of a right answer in k tries."""
        return (1 - self.unsolvable) * (1 - miss_rate(self.a, self.b, k))

    def draw(self, size: int, generator: np.random.Generator) -> np.ndarray:
        """Return float64 [size], from LOWEST_RATE to 1 - LOWEST_RATE."""
        rates = generator.beta(self.a, self.b, size)
        rates[generator.random(size) < self.unsolvable] = 0
        return np.clip(rates, LOWEST_RATE, 1 - LOWEST_RATE)

    def points(self, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
        """Return pass rates and probabilities, float64 [size + 1] each, for means over the mixture.

        Gauss-Legendre in t with p = t^3, because the density has a root at 0. The first point is the pass rate 0.
        """
        nodes, widths = np.polynomial.legendre.leggauss(size)
        t = (nodes + 1) / 2
        log_beta = math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)
        rates = t**3
        density = np.exp((self.a - 1) * np.log(rates) + (self.b - 1) * np.log1p(-rates) - log_beta)
        weights = density * 3 * t**2 * widths / 2
        return np.append(0.0, rates), np.append(self.unsolvable, (1 - self.unsolvable) * weights / weights.sum())


def miss_rate(a: float, b: float, k: int) -> float:
    """Return ``E[(1 - p)^k] = B(a, b + k) / B(a, b)`` for p from Beta(a, b)."""
    return math.exp(math.lgamma(a + b) + math.lgamma(b + k) - math.lgamma(b) - math.lgamma(a + b + k))


@cache
def fit_mixture() -> Mixture:
    """Return the mixture that has the three published pass@k: three equations, three unknowns, no residual."""
    (k0, k1, k2), (s0, s1, s2) = PUBLISHED_PASS_AT_K.keys(), PUBLISHED_PASS_AT_K.values()

    def find_b(a: float) -> float:
        """The ratio of the two gains in pass@k does not depend on the unsolvable share, and falls as b grows."""

        def excess(b: float) -> float:
            misses = [miss_rate(a, b, k) for k in (k0, k1, k2)]
            return (misses[0] - misses[1]) / (misses[1] - misses[2]) - (s1 - s0) / (s2 - s1)

        return bisect(excess, 1e-3, 100.0)

    def find_solvable(a: float) -> float:
        b = find_b(a)
        return (s1 - s0) / (miss_rate(a, b, k0) - miss_rate(a, b, k1))

    def excess_solved(a: float) -> float:
        return find_solvable(a) * (1 - miss_rate(a, find_b(a), k0)) - s0

    a = bisect(excess_solved, 1.15, 3.0)
    return Mixture(1 - find_solvable(a), a, find_b(a))


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Return a root of a function that is positive at ``low`` and negative at ``high``. ValueError for other signs."""
    if not function(low) > 0 > function(high):
        raise ValueError(f"the function is {function(low)} at {low} and {function(high)} at {high}, expected + and -")
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


@dataclass(slots=True, eq=False)
class PromptBandit:
    """Prompts with answers, and a policy over the answers. P prompts, A answers, D features."""

    features: torch.Tensor
    """float64 [P, D], rows of length 1."""
    offsets: torch.Tensor
    """float64 [P, A], logits of the untrained policy."""
    is_right: np.ndarray
    """bool [P, A]."""
    weights: torch.Tensor = field(init=False)
    """float64 [D, A], trained from 0."""

    def __post_init__(self) -> None:
        self.weights = torch.zeros(self.features.shape[1], self.offsets.shape[1], dtype=torch.float64)
        self.weights.requires_grad_()

    @classmethod
    def make(cls, seed: int, size: int = NUM_PROMPTS) -> PromptBandit:
        """Return a bandit with ``size`` prompts whose pass rates are drawn from ``fit_mixture``.

        Right answers depend on the topic, so topics compete for the weights.
        """
        generator = np.random.default_rng([seed, 0])
        rates = fit_mixture().draw(size, generator)
        topics = generator.integers(NUM_TOPICS, size=size)
        features = generator.normal(size=(NUM_TOPICS, NUM_FEATURES))[topics]
        features += generator.normal(size=features.shape)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        is_right = (np.arange(NUM_ANSWERS) - topics[:, None]) % NUM_ANSWERS < NUM_RIGHT
        masses = np.exp(generator.normal(size=is_right.shape))
        right_masses = np.where(is_right, masses, 0.0)
        wrong_masses = np.where(is_right, 0.0, masses)
        probabilities = rates[:, None] * right_masses / right_masses.sum(1, keepdims=True)
        probabilities += (1 - rates[:, None]) * wrong_masses / wrong_masses.sum(1, keepdims=True)
        return cls(torch.from_numpy(features), torch.from_numpy(np.log(probabilities)), is_right)

    def log_policy(self, prompts: np.ndarray | slice = slice(None)) -> torch.Tensor:
        """Return log pi, float64 [B, A], of these prompts; with gradient."""
        return torch.log_softmax(self.offsets[prompts] + self.features[prompts] @ self.weights, 1)

    def pass_rates(self) -> np.ndarray:
        """Return the exact pass rates, float64 [P]."""
        with torch.no_grad():
            return np.where(self.is_right, self.log_policy().exp().numpy(), 0.0).sum(1)

    def entropy(self) -> float:
        """Return the exact mean over prompts of ``-sum pi log pi``, in nats."""
        with torch.no_grad():
            log_policy = self.log_policy()
            return float(-(log_policy.exp() * log_policy).sum(1).mean())


@dataclass(frozen=True, slots=True)
class Recipe:
    """A sampling rule with its objective and credit."""

    name: str
    num_prompts: int
    """Prompts of a step."""
    make_rule: Callable[[np.ndarray], SamplingRule]
    """From estimated pass rates [B] of the step's prompts to the rule."""
    objective: str = "grpo"
    """A row of OBJECTIVES: aggregation, and the advantage where ``credit`` is None."""
    credit: Credit | None = None
    """Advantages of selected samples; None for those of the objective."""


@dataclass(slots=True)
class Course:
    """What a training run was after each of S steps; the first three also before the first step, [S + 1]."""

    pass_rates: list[np.ndarray] = field(default_factory=list)
    """Exact, float64 [P] each."""
    accuracy: list[float] = field(default_factory=list)
    """Their mean."""
    entropy: list[float] = field(default_factory=list)
    """Exact mean entropy over all prompts."""
    drawn: list[int] = field(default_factory=list)
    """Samples drawn so far; ``trained`` alike."""
    trained: list[int] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)
    """Share of the step's prompts whose training samples differ in reward."""
    batch_reward: list[float] = field(default_factory=list)
    """Mean reward over the step's drawn samples."""
    prompt_reward: list[float] = field(default_factory=list)
    """Mean over the step's prompts of the mean reward of a prompt's drawn samples."""
    covariance: list[float] = field(default_factory=list)
    """``sum (n - mean n) (r - mean r) / sum n`` over prompts, with r of a prompt's n samples: the gap of the two."""

    def measure(self, bandit: PromptBandit) -> None:
        self.pass_rates.append(bandit.pass_rates())
        self.accuracy.append(float(self.pass_rates[-1].mean()))
        self.entropy.append(bandit.entropy())

    def count(self, selection: Selection) -> None:
        """Record the samples of a step."""
        _, num_asked, judged, positives = selection.drawn
        shares = positives / judged
        self.drawn.append((self.drawn[-1] if self.drawn else 0) + int(num_asked.sum()))
        self.trained.append((self.trained[-1] if self.trained else 0) + len(selection.prompts))
        self.mixed.append(share_of_mixed(selection))
        self.batch_reward.append(float(positives.sum() / judged.sum()))
        self.prompt_reward.append(float(shares.mean()))
        self.covariance.append(float(((judged - judged.mean()) * (shares - shares.mean())).sum() / judged.sum()))


def share_of_mixed(selection: Selection) -> float:
    """Return the share of prompts with different rewards among the samples that train."""
    positives = np.bincount(selection.prompts, weights=selection.rewards)
    sizes = np.bincount(selection.prompts)
    return float(((positives > 0) & (positives < sizes)).sum() / len(selection.pools))


def train(
    bandit: PromptBandit, recipe: Recipe, num_steps: int, seed: int, learning_rate: float = LEARNING_RATE
) -> Course:
    """Train the bandit on-policy, with one update per step.

    All recipes of a seed see the same prompts in the same order, and the same random numbers.
    """
    size = len(bandit.offsets)
    estimates = PassRateCounts(size, pooled=True)
    optimizer = torch.optim.Adam([bandit.weights], lr=learning_rate)
    course = Course()
    course.measure(bandit)
    for step in range(num_steps):
        generator = np.random.default_rng([seed, 1, step])
        prompts = generator.permutation(size)[: recipe.num_prompts]
        answers, selection = draw_step(bandit, recipe, prompts, estimates.rates(prompts), generator)
        numbers, num_asked, _, positives = selection.drawn
        estimates.update(prompts[numbers], num_asked, positives)
        loss = -objective_value(bandit, recipe, selection, prompts, answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        course.measure(bandit)
        course.count(selection)
    return course


def draw_step(
    bandit: PromptBandit, recipe: Recipe, prompts: np.ndarray, rates: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, Selection]:
    """Return answers drawn ahead, int64 [B, M], and what megarl's collector selects of them.

    prompts: int64 [B]; rates: estimated pass rates [B], for rules that divide a budget.
    """
    rule = recipe.make_rule(rates)
    num_ahead = max(getattr(rule, "counts", ()) or [getattr(rule, "max_samples", 0), getattr(rule, "num_samples", 0)])
    with torch.no_grad():
        cumulative = bandit.log_policy(prompts).exp().numpy().cumsum(1)
    uniforms = generator.random((num_ahead, len(prompts))).T
    answers = (uniforms[:, :, None] > cumulative[:, None, :-1]).sum(2)
    rewards = np.take_along_axis(bandit.is_right[prompts], answers, 1).astype(float).tolist()
    by_key: dict[tuple[int, int], float | None] = {
        (prompt, sample): reward for prompt, row in enumerate(rewards) for sample, reward in enumerate(row)
    }
    return answers, Collector(rule, len(prompts)).replay(by_key)


def objective_value(
    bandit: PromptBandit, recipe: Recipe, selection: Selection, prompts: np.ndarray, answers: np.ndarray
) -> torch.Tensor:
    """Return a number whose gradient is megarl's policy gradient: ``sum_t coefficient_t log pi(y_t)``.

    prompts: int64 [B]; answers: int64 [B, M], of ``draw_step``.
    """
    rows = selection.prompts
    log_policy = bandit.log_policy(prompts)
    logprobs = log_policy[torch.from_numpy(rows), torch.from_numpy(answers[rows, selection.samples])]
    constant = logprobs.detach()
    loss_mask = torch.ones(len(rows), dtype=torch.bool)
    columns = TokenColumns(
        constant, constant, constant, advantages_of_step(recipe, selection), loss_mask, torch.arange(len(rows) + 1)
    )
    return (coefficients(OBJECTIVES[recipe.objective], columns).values * logprobs).sum()


def advantages_of_step(recipe: Recipe, selection: Selection) -> torch.Tensor:
    """Return the advantages of the samples that train, weights included, float64 [N]."""
    if recipe.credit is None:
        return advantages_of(recipe.objective, selection.rewards, selection.prompts)
    advantages, weights = assign(recipe.credit, selection)
    return torch.from_numpy(advantages * weights)
