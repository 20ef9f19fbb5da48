"""Allocators decide before a step how many samples each prompt gets. Here: the protocol, and Ada-Est."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from megarl.config import Config
from megarl.core.metrics import Stat
from megarl.core.sampling.allocation import ada_est_weights, allocate, allocate_by_weights
from megarl.core.sampling.pass_rates import PassRateCounts
from megarl.data.prompts import Prompt
from megarl.errors import CheckpointError
from megarl.train.sampling.value_head import ValueHead
from megarl.train.step import TrainStep


class Allocator(Protocol):
    """Allocates samples to prompts before a step, and learns from their outcomes.

    All methods are collective calls with equal arguments on all ranks.
    """

    def counts(self, step: int, prompts: Sequence[Prompt]) -> np.ndarray:
        """Return the number of samples of each prompt, int64 [B]; the sum is prompts_per_step * group_size."""
        ...

    def learn(self, prompts: Sequence[Prompt], samples: np.ndarray, positives: np.ndarray) -> dict[str, Stat]:
        """Update the estimates: of each prompt, samples with a reward and positive ones. Returns metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds; plain, and equal on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; CheckpointError if it is of another allocator."""
        ...


class AdaEst:
    """Allocates by estimates of pass rates that are kept from step to step (Ada-Est, arXiv 2510.04996v3)."""

    def __init__(self, config: Config, num_prompts: int, train_step: TrainStep | None) -> None:
        """``train_step``: for a value head, which needs the policy."""
        estimate = config.estimate
        self._config = config
        self._estimator: PassRateCounts | ValueHead
        if estimate.by == "counts":
            self._estimator = PassRateCounts(
                num_prompts, estimate.decay, estimate.prior_positives, estimate.prior_negatives
            )
        else:
            assert train_step is not None, "a value head needs a policy"
            self._estimator = ValueHead(
                train_step.policy,
                micro_batch_tokens=config.train.micro_batch_tokens,
                lr=estimate.head_lr,
                decay=min(estimate.decay, 0.99),  # without any decay, its statistics would not follow the policy
                prior=estimate.prior_positives / (estimate.prior_positives + estimate.prior_negatives),
            )
        self._last_rates = np.zeros(0)

    def counts(self, step: int, prompts: Sequence[Prompt]) -> np.ndarray:
        """See ``Allocator.counts``."""
        if isinstance(self._estimator, ValueHead):
            rates = self._estimator.rates([prompt.tokens for prompt in prompts])
        else:
            rates = self._estimator.rates([prompt.index for prompt in prompts])
        self._last_rates = rates
        estimate, rollout = self._config.estimate, self._config.rollout
        total, high = rollout.group_size * len(prompts), self._config.sampling.max_samples
        if estimate.objective == "ada_est":
            return allocate_by_weights(ada_est_weights(rates, estimate.eps), total, estimate.min_samples, high)
        return allocate(rates, total, estimate.objective, estimate.min_samples, high)

    def learn(self, prompts: Sequence[Prompt], samples: np.ndarray, positives: np.ndarray) -> dict[str, Stat]:
        """See ``Allocator.learn``."""
        found = {"estimate/rate_mean": Stat.mean(torch.from_numpy(self._last_rates))}
        drawn = samples > 0
        if self._last_rates.shape == drawn.shape:
            gaps = np.abs(self._last_rates - positives / np.maximum(samples, 1))
            found["estimate/error"] = Stat.mean(torch.from_numpy(gaps), torch.from_numpy(drawn))
        if isinstance(self._estimator, ValueHead):
            loss = self._estimator.update([prompt.tokens for prompt in prompts], samples, positives)
            found["estimate/loss"] = Stat.mean(torch.tensor([loss], dtype=torch.float64))
        else:
            self._estimator.update([prompt.index for prompt in prompts], samples, positives)
        return found

    def state_dict(self) -> dict[str, Any]:
        """See ``Allocator.state_dict``."""
        if isinstance(self._estimator, ValueHead):
            return {"value_head": self._estimator.state_dict()}
        return {"counts": {name: column.tolist() for name, column in self._estimator.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Allocator.load_state_dict``."""
        kind = "value_head" if isinstance(self._estimator, ValueHead) else "counts"
        if kind not in state:
            raise CheckpointError(
                f'the checkpoint holds estimates of the kind {", ".join(state) or "none"}, expected "{kind}"; set '
                "[estimate] as it was, or begin a new run"
            )
        self._estimator.load_state_dict(state[kind])
