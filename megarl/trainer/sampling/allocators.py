"""Rules that set the number of samples per prompt before a step: Ada-Est, and GVM."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megarl.config import Config
from megarl.core.choices.stopping import Allotted
from megarl.core.metrics import Stat
from megarl.core.packing import drop_routes
from megarl.core.sampling.allocation import allocate_by_weights, budget_weights
from megarl.core.sampling.gvm import gvm_allocate, gvm_estimates
from megarl.core.sampling.pass_rates import PassRateCounts
from megarl.core.types import Rollout
from megarl.data.prompts import Prompt
from megarl.engines.player import Sample
from megarl.megatron import distributed
from megarl.trainer.sampling.assignment import Key
from megarl.trainer.sampling.gradient_norms import gradient_norms
from megarl.trainer.step import TrainStep

Presample = Callable[[int, Sequence[Key]], dict[Key, Sample]]
"""Draws samples of a step's prompts: (step, keys of the rank) -> samples. A collective call."""


class AdaEst:
    """Allocates by estimates of pass rates that are kept from step to step (Ada-Est, arXiv 2510.04996v3).

    All methods are collective calls with equal arguments on all ranks.
    """

    def __init__(self, config: Config, num_prompts: int) -> None:
        estimate = config.estimate
        self._config = config
        self._estimator = PassRateCounts(
            num_prompts, estimate.decay, estimate.prior_positives, estimate.prior_negatives, pooled=estimate.pooled
        )
        self._last_rates = np.zeros(0)

    def allot(self, step: int, prompts: Sequence[Prompt]) -> Allotted:
        """Return the number of samples by prompt; the sum is prompts_per_step * group_size."""
        self._last_rates = rates = self._estimator.rates([prompt.index for prompt in prompts])
        estimate, sampling, size = self._config.estimate, self._config.sampling, self._config.rollout.group_size
        total, bounds = size * len(prompts), (estimate.min_samples, sampling.max_samples)
        counts = allocate_by_weights(budget_weights(rates, estimate.objective, estimate.eps), total, *bounds)
        keep = sampling.subsample or "balance"
        return Allotted(tuple(counts.tolist()), self._config.reward.threshold, sampling.train_size, keep)

    def learn(self, prompts: Sequence[Prompt], samples: np.ndarray, positives: np.ndarray) -> dict[str, Stat]:
        """Update the estimates from samples with a reward and positive samples, int64 [B] by prompt. Return metrics."""
        gaps = np.abs(self._last_rates - positives / np.maximum(samples, 1))
        self._estimator.update([prompt.index for prompt in prompts], samples, positives)
        return {"estimate/rate_mean": Stat.mean(self._last_rates), "estimate/error": Stat.mean(gaps, samples > 0)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; plain, and equal on all ranks."""
        return {"counts": {name: column.tolist() for name, column in self._estimator.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._estimator.load_state_dict(state["counts"])


class Gvm:
    """Allocates by acceptance rates and gradient norms. A first stage estimates both for several steps.

    GVM, arXiv 2505.02391. Methods as in ``AdaEst``.
    """

    def __init__(
        self, config: Config, train_step: TrainStep, prompts_of: Callable[[int], Sequence[Prompt]], presample: Presample
    ) -> None:
        self._config, self._train_step = config, train_step
        self._prompts_of, self._presample = prompts_of, presample
        self._until = 0
        """The first step without estimates."""
        self._estimates: dict[int, tuple[float, float]] = {}
        """Acceptance rate and gradient norm, by the prompt's index in the data."""
        self.spent = np.zeros(3)
        """Cost of the first stage before the step: samples, tokens, samples without a reward. 0 without a first
        stage."""

    def allot(self, step: int, prompts: Sequence[Prompt]) -> Allotted:
        """Also runs a first stage if the step has no estimates."""
        gvm = self._config.gvm
        self.spent = np.zeros(3)
        if step >= self._until:
            self._refresh(step)
        rates, norms = np.array([self._estimates[prompt.index] for prompt in prompts]).T
        total = self._config.rollout.group_size * len(prompts)
        high = gvm.max_samples or 4 * self._config.rollout.group_size
        counts = gvm_allocate(rates, norms, total, gvm.alpha, gvm.beta, high=high)
        return Allotted(tuple(counts.tolist()), self._config.reward.threshold)

    def learn(self, prompts: Sequence[Prompt], samples: np.ndarray, positives: np.ndarray) -> dict[str, Stat]:
        """Return metrics only: a first stage makes the estimates. samples, positives: int64 [B] by prompt."""
        rates, norms = np.array([self._estimates[prompt.index] for prompt in prompts]).T
        # The sums are equal on all ranks: a single model copy reports them.
        spent = (self.spent if distributed.dp_rank() == 0 else np.zeros(3)).tolist()
        totals = zip(("samples", "tokens", "failed"), spent, strict=True)
        return {
            **{f"gvm/first_stage_{name}": Stat.total(number) for name, number in totals},
            "gvm/acceptance_rate": Stat.mean(rates),
            "gvm/gradient_norm": Stat.mean(norms, rates > 0),
            "gvm/hopeless_fraction": Stat.mean(rates == 0),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"gvm": {"until": self._until, "estimates": [[i, *pair] for i, pair in sorted(self._estimates.items())]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``."""
        self._until = int(state["gvm"]["until"])
        self._estimates = {int(index): (rate, norm) for index, rate, norm in state["gvm"]["estimates"]}

    def _refresh(self, step: int) -> None:
        """Estimate the prompts of the next steps. Step by step, to free the routes of each step."""
        until = min(step + self._config.gvm.refresh_every, self._config.run.steps)
        estimates: dict[int, tuple[float, float]] = {}
        for later in range(step, until):
            prompts = self._prompts_of(later)
            rates, norms = self._run_stage(later, len(prompts))
            estimates |= {
                prompt.index: (float(rate), float(norm))
                for prompt, rate, norm in zip(prompts, rates, norms, strict=True)
            }
        # All or nothing: if the engine fails, the next checkpoint must not hold half of a stage.
        self._until, self._estimates = until, estimates

    def _run_stage(self, step: int, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
        """Return acceptance rates [B] and gradient norms [B] of a step's prompts."""
        gvm = self._config.gvm
        copy, copies = distributed.dp_rank(), distributed.dp_size()
        keys = [(prompt, sample) for prompt in range(copy, num_prompts, copies) for sample in range(gvm.pre_samples)]
        group = distributed.model_group()
        samples = self._presample(step, keys[group.rank() :: group.size()])
        accepted = self._gather_accepted(samples)
        norms = gradient_norms(self._train_step, [rollout for _, rollout in accepted], gvm.block)
        norm_of = {key: norm for (key, _), norm in zip(accepted, norms.tolist(), strict=True)}
        rows = []
        for key, sample in samples.items():
            tokens = 0 if sample.rollout is None else sample.rollout.num_tokens
            rows.append([*key, sample.reward is not None, key in norm_of, norm_of.get(key, 0.0), tokens])
        table = distributed.gather_rows(np.array(rows, dtype=np.float64).reshape(-1, 6))
        judged = table[:, 2] > 0
        self.spent += [len(table), table[:, 5].sum(), (~judged).sum()]
        table, missing = table[judged], np.setdiff1d(np.arange(num_prompts), table[judged, 0])
        # A prompt without rewards has acceptance rate 0.
        table = np.concatenate([table, np.pad(missing[:, None], ((0, 0), (0, 5)))])
        return gvm_estimates(table[:, 0].astype(np.int64), table[:, 3] > 0, table[:, 4], num_prompts)

    def _gather_accepted(self, samples: Mapping[Key, Sample]) -> list[tuple[Key, Rollout]]:
        """Return the model copy's accepted responses in order; local responses with routes."""
        threshold = self._config.reward.threshold
        good = {
            key: sample.rollout
            for key, sample in samples.items()
            if sample.reward is not None and sample.reward > threshold and sample.rollout is not None
        }
        gathered = distributed.gather_rollouts([drop_routes(rollout) for rollout in good.values()])
        accepted = {(rollout.group, rollout.sample): rollout for rollout in gathered}
        return sorted((accepted | good).items(), key=lambda item: item[0])
