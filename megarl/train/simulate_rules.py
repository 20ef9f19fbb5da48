"""Rules of sampling on imagined rewards: what each draws, trains on, and how noisy its gradient is.

Rules, collector, credit and allocations are those of ``megarl.core.sampling``; only the engine is imagined. What is
measured: ``simulate_outcome``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megarl.core.sampling import (
    Allotted,
    Collector,
    Credit,
    PassRateCounts,
    SamplingRule,
    Selection,
    Sequential,
    Uniform,
    ada_est_weights,
    ada_seq_balance,
    ada_seq_pos,
    allocate,
    allocate_by_weights,
    assign,
    gvm_allocate,
    gvm_estimates,
    gvm_raft_weights,
)
from megarl.train.simulate_outcome import Outcome, Record

Random = np.random.Generator
ADA_EST_MOST = 32
"""Most samples of a prompt in Ada-Est; its paper prints no bound."""
_REFILL_LIMIT = 16
"""Prompts that a step may begin where dynamic sampling replaces them, per place in the batch."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Numbers that the rules share."""

    samples: int = 8
    """Per prompt, of rules that know beforehand: uniform, allotted."""
    train_size: int = 4
    """Of a prompt that train, where a rule draws more than it trains on."""
    round_size: int = 8
    """Of a round of Ada-Seq."""
    max_samples: int = 32
    """Cap of Ada-Seq."""
    passes: int = 4
    """Earlier passes over the prompts that estimates of pass rates are from; they trained, and cost nothing here."""
    refresh: int = 10
    """Steps that share one first stage of GVM, whose samples do not train."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One row of the table."""

    name: str
    rule: Callable[[np.ndarray, Random], SamplingRule]
    """(pass rates of the step's prompts, noise) -> rule; rates are only for drawing the samples it estimates from."""
    coefficients: Callable[[Selection], np.ndarray]
    """Advantage times weight of what trains, float64 [N]."""
    fixed: Sequential | Uniform | None = None
    """The rule, where it needs no estimates: then its law is known."""
    unbiased: bool = False
    """Whether the credit is the unbiased combination."""
    refill: bool = False
    """Whether prompts without contrast are replaced."""
    overhead: float = 0.0
    """Samples per prompt drawn for estimates beside what the rule draws."""


def arms(budget: Budget) -> list[Arm]:
    """Return the rules that are compared; ConfigError if a number is out of range."""
    n, keep = budget.samples, budget.train_size
    limits = {"round_size": budget.round_size, "max_samples": budget.max_samples}
    stage = min(n, 8)  # samples of GVM's first stage
    unbiased = Credit(combination="unbiased")
    found = [
        *(_fixed(f"uniform {size}", Uniform(size)) for size in sorted({keep, n, 2 * n})),
        _fixed("ada-seq-pos", ada_seq_pos(keep, **limits)),
        _fixed("ada-seq-balance", ada_seq_balance(keep, **limits)),
        _fixed("ada-seq-balance, unbiased", ada_seq_balance(keep, **limits), unbiased),
        _fixed(f"dapo {n}", Uniform(n), refill=True),
        Arm("ada-est", _ada_est(budget), _product(Credit(scale="root_rate", rate_eps=1e-3))),
        Arm("allotted, linear", _allotted(budget, "linear"), _product(Credit(weigh="prompt"))),
        Arm("allotted, log", _allotted(budget, "log"), _product(Credit(weigh="prompt", objective="log"))),
    ]
    overhead = stage / budget.refresh
    if n > overhead:
        stage_two = _gvm(budget, stage, overhead)
        found.append(Arm("gvm-raft", stage_two, _raft, overhead=overhead))
        found.append(Arm("gvm-grpo", stage_two, _product(Credit(scale="std")), overhead=overhead))
    return found


def matched(arm: Arm, cost: float, budget: Budget) -> Arm:
    """Return the uniform rule with the nearest whole number of samples that trains on as many as the arm."""
    samples = max(round(cost), budget.train_size)
    return _fixed(f"uniform {samples}, {budget.train_size} train", Uniform(samples, budget.train_size, "balance"))


def run(arm: Arm, steps: list[np.ndarray], seed: int) -> Outcome:
    """Drive the arm over steps of prompts with these pass rates, each twice.

    The same samples are behind all arms: sample s of a prompt has the same reward under each rule.
    """
    record = Record(arm.overhead)
    for number, rates in enumerate(steps):
        estimates = np.random.default_rng((seed, 1, number))
        rule = arm.rule(rates, estimates)
        candidates = _candidates(rates, steps, number) if arm.refill else rates
        for draw in range(2):
            rewards = SimulatedRewards(candidates, (seed, 2, number, draw))
            options = {"refill": True, "max_prompts": candidates.size} if arm.refill else {}
            selection = drive(Collector(rule, rates.size, **options), rewards)
            record.take(draw, candidates, selection, arm.coefficients(selection), rates.size)
        record.close_step(candidates)
    return record.outcome()


def drive(collector: Collector, reward: Callable[[int, int], float]) -> Selection:
    """Give the collector all it asks for, first asked first, and return what it selects."""
    waiting = deque(collector.start())
    while waiting and not collector.done:
        ask = waiting.popleft()
        for sample in ask.samples:
            waiting.extend(collector.add(ask.prompt, sample, reward(ask.prompt, sample)))
    return collector.select()


class SimulatedRewards:
    """(prompt, sample) -> 1.0 with the prompt's probability, else 0.0; made for as many samples as are asked for."""

    _BLOCK = 32

    def __init__(self, rates: np.ndarray, seed: tuple[int, ...]) -> None:
        self._rates, self._seed = rates, seed
        self._blocks: list[list[list[float]]] = []

    def __call__(self, prompt: int, sample: int) -> float:
        block, place = divmod(sample, self._BLOCK)
        while len(self._blocks) <= block:
            rng = np.random.default_rng((*self._seed, len(self._blocks)))
            chances = rng.random((self._rates.size, self._BLOCK))
            self._blocks.append((chances < self._rates[:, None]).astype(np.float64).tolist())
        return self._blocks[block][prompt][place]


def _fixed(name: str, rule: Sequential | Uniform, credit: Credit | None = None, *, refill: bool = False) -> Arm:
    unbiased = credit is not None and credit.combination == "unbiased"
    return Arm(name, lambda rates, rng: rule, _product(credit or Credit()), rule, unbiased, refill)


def _product(credit: Credit) -> Callable[[Selection], np.ndarray]:
    return lambda found: np.multiply(*assign(credit, found))


def _candidates(rates: np.ndarray, steps: list[np.ndarray], number: int) -> np.ndarray:
    """The step's prompts, and those of the following steps, over and over, to replace some."""
    others = np.concatenate([*steps[number + 1 :], *steps[: number + 1]])
    return np.concatenate([rates, np.resize(others, (_REFILL_LIMIT - 1) * rates.size)])


def _ada_est(budget: Budget) -> Callable[[np.ndarray, Random], SamplingRule]:
    def counts(estimates: np.ndarray) -> np.ndarray:
        high = max(ADA_EST_MOST, budget.samples)
        return allocate_by_weights(ada_est_weights(estimates), budget.samples * estimates.size, 1, high)

    return lambda rates, rng: _after_passes(rates, rng, budget, counts)


def _allotted(budget: Budget, objective: str) -> Callable[[np.ndarray, Random], SamplingRule]:
    low = min(2, budget.samples)  # a group of one has no contrast

    def counts(estimates: np.ndarray) -> np.ndarray:
        return allocate(estimates, budget.samples * estimates.size, objective, low)

    return lambda rates, rng: _after_passes(rates, rng, budget, counts)


def _after_passes(
    rates: np.ndarray, rng: Random, budget: Budget, counts: Callable[[np.ndarray], np.ndarray]
) -> Allotted:
    """Allot by lasting estimates, from earlier passes that were allotted in the same way."""
    prompts, lasting = np.arange(rates.size), PassRateCounts(rates.size)
    for _ in range(budget.passes):
        drawn = counts(lasting.rates())
        lasting.update(prompts, drawn, rng.binomial(drawn, rates))
    return Allotted(tuple(counts(lasting.rates()).tolist()))


def _gvm(budget: Budget, stage: int, overhead: float) -> Callable[[np.ndarray, Random], SamplingRule]:
    def rule(rates: np.ndarray, rng: Random) -> SamplingRule:
        prompts = np.repeat(np.arange(rates.size), stage)
        accepted = rng.random(prompts.size) < rates[prompts]
        # The score of an accepted sample: 1 - p of the outcome, and 1 of the wording.
        norms = np.sqrt((1 - rates[prompts]) ** 2 + 1)
        estimates = gvm_estimates(prompts, accepted, norms, rates.size)
        return Allotted(tuple(gvm_allocate(*estimates, round(rates.size * (budget.samples - overhead))).tolist()))

    return rule


def _raft(found: Selection) -> np.ndarray:
    """GVM-RAFT: the mean over a prompt's accepted samples, whatever their number."""
    accepted = found.rewards > found.rule.threshold
    return gvm_raft_weights(found.prompts, accepted) * len(found.prompts) / max(len(found.pools), 1)
