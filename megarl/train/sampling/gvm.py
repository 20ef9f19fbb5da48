"""GVM: allocates samples by acceptance rates and gradient norms of a first stage (arXiv 2505.02391)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megarl.config import Config
from megarl.core.metrics import Stat
from megarl.core.packing import drop_routes
from megarl.core.sampling.gvm import NormMean, gvm_allocate, gvm_estimates
from megarl.core.types import Rollout
from megarl.data.prompts import Prompt
from megarl.errors import CheckpointError, ConfigError
from megarl.megatron import distributed
from megarl.megatron.block_gradients import block_parameters
from megarl.rollout.player import Sample
from megarl.train.sampling.assignment import Key
from megarl.train.sampling.gradient_norms import gradient_norms
from megarl.train.step import TrainStep

Presample = Callable[[int, Sequence[Key]], dict[Key, Sample]]
"""Draws samples of a step's prompts: (step, this rank's keys) -> samples. A collective call."""


class Gvm:
    """Allocates by acceptance rates and gradient norms, which one first stage estimates for several steps."""

    def __init__(
        self, config: Config, train_step: TrainStep, prompts_of: Callable[[int], Sequence[Prompt]], presample: Presample
    ) -> None:
        try:
            block_parameters(train_step.policy, config.gvm.block)  # refuse a wrong name before anything is sampled
        except ConfigError as error:
            raise ConfigError(f"gvm.block: {error}") from error
        self._config, self._train_step = config, train_step
        self._prompts_of, self._presample = prompts_of, presample
        self._until = 0
        """The first step without estimates."""
        self._estimates: dict[int, tuple[float, float]] = {}
        """Acceptance rate and gradient norm, by the prompt's index in the data."""
        self._spent = np.zeros(3)
        """Cost of the first stage before this step: samples, tokens, samples without a reward. 0 if there was none."""

    def counts(self, step: int, prompts: Sequence[Prompt]) -> np.ndarray:
        """See ``Allocator.counts``; runs a first stage if there are no estimates for this step."""
        gvm = self._config.gvm
        self._spent = np.zeros(3)
        if step >= self._until:
            self._refresh(step)
        rates, norms = np.array([self._estimates[prompt.index] for prompt in prompts]).T
        return gvm_allocate(
            rates,
            norms,
            self._config.rollout.group_size * len(prompts),
            gvm.alpha,
            gvm.beta,
            solved_above=gvm.solved_above,
            min_accepted=gvm.min_accepted,
        )

    def learn(self, prompts: Sequence[Prompt], samples: np.ndarray, positives: np.ndarray) -> dict[str, Stat]:
        """See ``Allocator.learn``; returns metrics only, since only a first stage makes estimates."""
        rates, norms = np.array([self._estimates[prompt.index] for prompt in prompts]).T
        # These are sums, and equal on all ranks: one model copy reports them.
        spent = (self._spent if distributed.dp_rank() == 0 else np.zeros(3)).tolist()
        return {
            "gvm/first_stage_samples": Stat.total(spent[0]),
            "gvm/first_stage_tokens": Stat.total(spent[1]),
            "gvm/first_stage_failed": Stat.total(spent[2]),
            "gvm/acceptance_rate": Stat.mean(torch.from_numpy(rates)),
            "gvm/gradient_norm": Stat.mean(torch.from_numpy(norms), torch.from_numpy(rates > 0)),
            "gvm/hopeless_fraction": Stat.mean(torch.from_numpy((rates == 0).astype(np.float64))),
        }

    def state_dict(self) -> dict[str, Any]:
        """See ``Allocator.state_dict``."""
        return {"gvm": {"until": self._until, "estimates": [[i, *pair] for i, pair in sorted(self._estimates.items())]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Allocator.load_state_dict``."""
        if "gvm" not in state:
            raise CheckpointError('the checkpoint holds no estimates of rule = "gvm"; begin a new run, or set its rule')
        self._until = int(state["gvm"]["until"])
        self._estimates = {int(index): (rate, norm) for index, rate, norm in state["gvm"]["estimates"]}

    def _refresh(self, step: int) -> None:
        """Estimate the prompts of the next steps. Step by step, so that the routes of one step can be freed."""
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
        """Return acceptance rates and gradient norms, [B] each, of one step's prompts."""
        gvm = self._config.gvm
        copy, copies = distributed.dp_rank(), distributed.dp_size()
        keys = [(prompt, sample) for prompt in range(copy, num_prompts, copies) for sample in range(gvm.pre_samples)]
        group = distributed.model_group()
        mine = self._presample(step, keys[group.rank() :: group.size()])
        accepted = self._gather_accepted(mine)
        norms = gradient_norms(self._train_step, [rollout for _, rollout in accepted], gvm.block)
        norm_of = {key: norm for (key, _), norm in zip(accepted, norms.tolist(), strict=True)}
        rows = [
            [*key, sample.reward is not None, key in norm_of, norm_of.get(key, 0.0), _tokens(sample)]
            for key, sample in mine.items()
        ]
        found = distributed.gather_rows(np.array(rows, dtype=np.float64).reshape(-1, 6))
        judged = found[:, 2] > 0
        self._spent += [len(found), found[:, 5].sum(), (~judged).sum()]
        return _estimate(found[judged], num_prompts, gvm.average)

    def _gather_accepted(self, mine: Mapping[Key, Sample]) -> list[tuple[Key, Rollout]]:
        """Return the model copy's accepted responses in their order; this rank's with routes."""
        threshold = self._config.reward.threshold
        good = {
            key: sample.rollout
            for key, sample in mine.items()
            if sample.reward is not None and sample.reward > threshold and sample.rollout is not None
        }
        gathered = distributed.gather_rollouts([drop_routes(rollout) for rollout in good.values()])
        found = {(rollout.group, rollout.sample): rollout for rollout in gathered}
        return sorted((found | good).items(), key=lambda item: item[0])


def _tokens(sample: Sample) -> int:
    return 0 if sample.rollout is None else sample.rollout.num_tokens


def _estimate(rows: np.ndarray, num_prompts: int, average: NormMean) -> tuple[np.ndarray, np.ndarray]:
    """``rows`` are (prompt, sample, judged, accepted, norm, ...). A prompt without rewards has acceptance rate 0."""
    prompts = rows[:, 0].astype(np.int64)
    missing = np.setdiff1d(np.arange(num_prompts), prompts)
    return gvm_estimates(
        np.concatenate([prompts, missing]),
        np.concatenate([rows[:, 3] > 0, np.zeros(len(missing), bool)]),
        np.concatenate([rows[:, 4], np.zeros(len(missing))]),
        num_prompts,
        average,
    )
