"""The exact cost and gain of each sampling rule at given pass rates (docs/simulate.md).

python tools/simulate.py --rates 0:20 0.3:50 0.9:30 --samples 16
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.core.choices.stopping import Allotted, SamplingRule, Uniform, ada_seq_balance, ada_seq_pos
from megarl.core.sampling import allocate, gvm_allocate
from megarl.core.sampling.allocation import allocate_by_weights, budget_weights
from megarl.core.sampling.subsampling import positives_to_keep
from megarl.errors import ConfigError
from megarl.text_table import text_table


@dataclass(frozen=True, slots=True, eq=False)
class StoppingLaw:
    """Where a prompt's sampling ends: one row per possible end."""

    samples: np.ndarray
    """int64 [S], samples drawn."""
    positives: np.ndarray
    """int64 [S], positive samples."""
    probabilities: np.ndarray
    """float64 [S], adds up to 1."""

    @property
    def expected_samples(self) -> float:
        """E[n], what the prompt costs."""
        return float(self.probabilities @ self.samples)

    @property
    def contrast(self) -> float:
        """Probability of a pool with both classes: of a prompt that teaches something."""
        mixed = (self.positives > 0) & (self.positives < self.samples)
        return float(self.probabilities[mixed].sum())


def stopping_law(rule: SamplingRule, pass_rate: float, prompt: int = 0) -> StoppingLaw:
    """Return the law of the samples drawn by ``rule`` for a prompt with the pass rate.

    For rounds of M this gives ``E[n] = M * sum_r P(not done after r rounds)``. Raises ValueError unless
    0 <= pass_rate <= 1.
    """
    if not 0 <= pass_rate <= 1:
        raise ValueError(f"the pass rate is {pass_rate}, expected 0 to 1")
    pending: dict[int, np.ndarray] = {0: np.ones(1)}
    ends: dict[tuple[int, int], float] = {}
    while pending:
        num_asked = min(pending)
        for positives, probability in enumerate(pending.pop(num_asked)):
            if probability == 0:
                continue
            count = rule.next_samples(prompt, num_asked, positives, num_asked - positives)
            if not count:
                ends[num_asked, positives] = probability
                continue
            next_counts = pending.setdefault(num_asked + count, np.zeros(num_asked + count + 1))
            next_counts[positives : positives + count + 1] += probability * binomial(count, pass_rate)
    points = np.array(list(ends), dtype=np.int64)
    return StoppingLaw(points[:, 0], points[:, 1], np.array(list(ends.values())))


def binomial(size: int, rate: float) -> np.ndarray:
    """Return float64 [size + 1], the probabilities of 0..size positives among ``size`` samples."""
    if size == 0:
        return np.ones(1)
    half = binomial(size // 2, rate)
    whole = np.convolve(half, half)
    return np.convolve(whole, [1 - rate, rate]) if size % 2 else whole


DEFAULT_RATES = (
    *("0:19", "0.05:7", "0.15:10", "0.25:11", "0.35:11", "0.45:10"),
    *("0.55:9", "0.65:8", "0.75:7", "0.85:5", "0.95:3"),
)
"""100 prompts like those of a post on adaptive sampling: docs/simulate.md."""
_MAX_PROMPTS = 100_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Numbers shared by the rules, as the options of the command."""

    samples: int = 8
    train_size: int = 4
    round_size: int = 8
    max_samples: int = 32


@dataclass(frozen=True, slots=True)
class Arm:
    """A sampling rule as the table compares it."""

    name: str
    rules: list[SamplingRule]
    """The rule of each prompt [P]; rules that divide a budget draw a different number of samples for each prompt."""
    replaces: bool = False
    """Whether prompts without contrast are replaced by others, as in DAPO."""


@dataclass(frozen=True, slots=True)
class Result:
    """Cost and gain of a rule: averages over the prompts that the rule begins."""

    name: str
    samples: float
    """Samples drawn of a prompt."""
    trained: float
    """Samples of a prompt that are in the batch."""
    contrast: float
    """Chance that the samples of a prompt differ in reward."""
    trains: float
    """Share of the batch's prompts with a gradient: ``contrast``, or 1 where the others are replaced."""
    precision: float
    """Squared expected gradient over the gradient's variance; 0 if nothing has a gradient."""

    @property
    def cost(self) -> float:
        """Samples drawn per prompt with a gradient."""
        return self.samples / self.contrast if self.contrast else float("inf")


def simulate(words: Sequence[str], budget: Budget) -> list[Result]:
    """Print a table for pass rates (``P`` or ``P:PROMPTS``, none for the default). Raises ConfigError."""
    if not 2 <= budget.train_size <= budget.max_samples or budget.samples < 2 or budget.round_size < 1:
        raise ConfigError(
            f"found {budget}, expected at least 2 samples, 1 in a round, and a train size from 2 to max_samples"
        )
    rates = parse_rates(words or DEFAULT_RATES)
    results = [evaluate(arm, rates) for arm in arms(rates, budget)]
    print(f"{rates.size} prompts, mean pass rate {rates.mean():.3f}\n\n{_table(results, f'uniform {budget.samples}')}")
    return results


def parse_rates(words: Sequence[str]) -> np.ndarray:
    """Return the pass rate of every prompt, float64 [P]: ``0.1 0.5:3`` is one prompt at 0.1 and three at 0.5."""
    rates: list[float] = []
    for word in words:
        rate, _, count = word.partition(":")
        try:
            value, prompts = float(rate), int(count or 1)
        except ValueError:
            value, prompts = -1.0, 0
        if not 0 <= value <= 1 or prompts < 1:
            raise ConfigError(f"--rates {word}: expected P or P:PROMPTS, such as 0.25 or 0.25:10, with P from 0 to 1")
        if len(rates) + prompts > _MAX_PROMPTS:
            raise ConfigError(f"--rates: more than {_MAX_PROMPTS} prompts; give fewer prompts at each pass rate")
        rates += [value] * prompts
    return np.array(rates)


def arms(rates: np.ndarray, budget: Budget) -> list[Arm]:
    """Return the rules to compare. rates: [P]; rules that divide a budget get true pass rates, where a run has
    estimates."""
    n, keep, size = budget.samples, budget.train_size, rates.size
    compared = [Arm(f"uniform {m}", [Uniform(m)] * size) for m in sorted({keep, n, 2 * n})]
    for name, make in (("ada-seq-pos", ada_seq_pos), ("ada-seq-balance", ada_seq_balance)):
        arm = Arm(name, [make(keep, round_size=budget.round_size, max_samples=budget.max_samples)] * size)
        # Ada-Seq stops by itself, so no budget can be set: compare with uniform sampling at equal cost.
        same = max(round(evaluate(arm, rates).samples), keep)
        compared += [arm, Arm(f"uniform {same}, {keep} train", [Uniform(same, keep, "balance")] * size)]
    compared.append(Arm(f"dapo {n}", [Uniform(n)] * size, replaces=True))
    total, high = n * size, max(32, n)
    shares = {
        "allotted, linear": allocate(rates, total, "linear", 2),  # at least 2: one sample has no contrast
        "allotted, log": allocate(rates, total, "log", 2),
        "ada-est": allocate_by_weights(budget_weights(rates, "ada_est"), total, 1, high),
        "gvm": gvm_allocate(rates, np.ones(size), total, high=4 * n),
    }
    return compared + [Arm(name, [Allotted((count,)) for count in counts.tolist()]) for name, counts in shares.items()]


def evaluate(arm: Arm, rates: np.ndarray) -> Result:
    """Return the exact averages of a rule over prompts with pass rates ``rates`` [P]."""
    # Many prompts share pass rate and rule, so each pair is computed once.
    pairs = list(zip(arm.rules, rates.tolist(), strict=True))
    results = {pair: moments(*pair) for pair in set(pairs)}
    samples, trained, contrast, variance, signal = np.mean([results[pair] for pair in pairs], axis=0).tolist()
    precision = signal / variance if variance else 0.0
    if not arm.replaces:
        return Result(arm.name, samples, trained, contrast, contrast, precision)
    # Only prompts with contrast reach the batch. Uniform(n) trains on all n samples of a prompt.
    return Result(arm.name, samples, trained * contrast, contrast, 1.0 if contrast else 0.0, precision)


def moments(rule: SamplingRule, rate: float) -> tuple[float, float, float, float, float]:
    """Return samples drawn, samples that train, contrast, and the gradient's variance and squared mean, for one prompt.

    The gradient is the mean of ``A * score`` over the samples that train, with advantage ``A = r - mean(r)`` over all
    drawn samples. A sample's score has two independent parts: ``r - p``, the derivative of the outcome's
    log-probability by the logit of p, and the score of the remaining response, with mean 0 and variance 1. The second
    part adds ``sum A^2 / size^2`` to the variance.
    """
    law = stopping_law(rule, rate)
    drawn, positives = law.samples, law.positives
    size = np.maximum(drawn if rule.train_size is None else np.minimum(drawn, rule.train_size), 1)
    right = np.array([_num_right(rule, k, n - k) for k, n in zip(positives.tolist(), drawn.tolist(), strict=True)])
    wrong = np.where(drawn > 0, size - right, 0)
    mean_reward = positives / np.maximum(drawn, 1)
    up, down = 1 - mean_reward, -mean_reward  # advantages of a right and of a wrong sample
    gradient = (right * up * (1 - rate) + wrong * down * -rate) / size
    squares = (right * up**2 + wrong * down**2) / size**2
    mean = float(law.probabilities @ gradient)
    variance = float(law.probabilities @ ((gradient - mean) ** 2 + squares))
    return law.expected_samples, float(law.probabilities @ (right + wrong)), law.contrast, variance, mean**2


def _num_right(rule: SamplingRule, positives: int, negatives: int) -> int:
    if rule.train_size is None or positives + negatives <= rule.train_size:
        return positives
    return positives_to_keep(positives, negatives, rule.train_size, rule.keeps(positives, negatives))


def _table(results: list[Result], reference: str) -> str:
    base = next(result for result in results if result.name == reference)
    headings = ("rule", "samples", "contrast", "trains", "in batch", "cost", "efficiency drawn", "trained")
    rows = [
        (
            row.name,
            f"{row.samples:.2f}",
            f"{row.contrast:.1%}",
            f"{row.trains:.1%}",
            f"{row.trained:.2f}",
            f"{row.cost:.2f}",
            _ratio(row.precision / row.samples, base.precision / base.samples),
            _ratio(row.precision / row.trained if row.trained else 0.0, base.precision / base.trained),
        )
        for row in results
    ]
    return text_table(rows, headings, words=1)


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "-"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=(), help="pass rates of the prompts, each P or P:PROMPTS")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--train-size", type=int, default=4, help="samples of a prompt that train under Ada-Seq")
    parser.add_argument("--round-size", type=int, default=8, help="samples of a round of Ada-Seq")
    parser.add_argument("--max-samples", type=int, default=32, help="most samples of a prompt under Ada-Seq")
    options = parser.parse_args(words)
    try:
        simulate(options.rates, Budget(options.samples, options.train_size, options.round_size, options.max_samples))
    except ConfigError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
