"""How many samples each prompt of a step gets, where that is decided from estimates: Ada-Est and GVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from megarl.config import Config
from megarl.core.metrics import Stat
from megarl.core.packing import without_routes
from megarl.core.sampling.allocation import ada_est_weights, allocate, allocate_by_weights
from megarl.core.sampling.gvm import NormMean, gvm_allocate, gvm_estimates
from megarl.core.sampling.pass_rates import PassRateCounts
from megarl.core.types import Rollout
from megarl.data.prompts import Prompt
from megarl.errors import CheckpointError, ConfigError
from megarl.megatron import distributed
from megarl.megatron.block_gradients import block_parameters
from megarl.rollout.player import Sample
from megarl.train.sampling.assignment import Key
from megarl.train.sampling.gradient_norms import gradient_norms
from megarl.train.sampling.value_head import ValueHead
from megarl.train.step import TrainStep

Presample = Callable[[int, Sequence[Key]], dict[Key, Sample]]
"""(step, samples) -> those of them that this rank drew, of the step's prompts; a collective call."""


class Allotment(Protocol):
    """Decides counts before a step, and learns from what was drawn; collective calls with equal arguments."""

    def counts(self, step: int, prompts: Sequence[Prompt]) -> np.ndarray:
        """int64 [B], adding up to prompts_per_step * group_size."""
        ...

    def learn(self, prompts: Sequence[Prompt], samples: np.ndarray, positives: np.ndarray) -> dict[str, Stat]:
        """Take in what was drawn of each prompt; returns metrics, equal on all ranks."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds; plain, and equal on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; CheckpointError if it is of something else."""
        ...


class AdaEst:
    """By estimates of pass rates that last from step to step (Ada-Est, arXiv 2510.04996, third version)."""

    def __init__(self, config: Config, num_prompts: int, train_step: TrainStep | None) -> None:
        """``train_step``: whose policy a value head sits on."""
        estimate = config.estimate
        self._config = config
        self._counts: PassRateCounts | None = None
        self._head: ValueHead | None = None
        if estimate.by == "counts":
            self._counts = PassRateCounts(
                num_prompts, estimate.decay, estimate.prior_positives, estimate.prior_negatives
            )
        else:
            assert train_step is not None, "a value head sits on a policy"
            self._head = ValueHead(
                train_step.policy,
                micro_batch_tokens=config.train.micro_batch_tokens,
                lr=estimate.head_lr,
                decay=min(estimate.decay, 0.99),
                prior=estimate.prior_positives / (estimate.prior_positives + estimate.prior_negatives),
            )
        self._last = np.zeros(0)

    def counts(self, step: int, prompts: Sequence[Prompt]) -> np.ndarray:
        """See ``Allotment.counts``."""
        self._last = rates = self._rates(prompts)
        estimate, rollout = self._config.estimate, self._config.rollout
        total, high = rollout.group_size * len(prompts), self._config.sampling.max_samples
        if estimate.objective == "ada_est":
            return allocate_by_weights(ada_est_weights(rates, estimate.eps), total, estimate.min_samples, high)
        return allocate(rates, total, estimate.objective, estimate.min_samples, high)

    def learn(self, prompts: Sequence[Prompt], samples: np.ndarray, positives: np.ndarray) -> dict[str, Stat]:
        """See ``Allotment.learn``."""
        found = {"estimate/rate_mean": Stat.mean(torch.from_numpy(self._last))}
        drawn = samples > 0
        if self._last.shape == drawn.shape:
            gaps = np.abs(self._last - positives / np.maximum(samples, 1))
            found["estimate/error"] = Stat.mean(torch.from_numpy(gaps), torch.from_numpy(drawn))
        if self._head is not None:
            loss = self._head.update([prompt.tokens for prompt in prompts], samples, positives)
            found["estimate/loss"] = Stat.mean(torch.tensor([loss], dtype=torch.float64))
        elif self._counts is not None:
            self._counts.update([prompt.index for prompt in prompts], samples, positives)
        return found

    def _rates(self, prompts: Sequence[Prompt]) -> np.ndarray:
        if self._head is not None:
            return self._head.rates([prompt.tokens for prompt in prompts])
        assert self._counts is not None
        return self._counts.rates([prompt.index for prompt in prompts])

    def state_dict(self) -> dict[str, Any]:
        """See ``Allotment.state_dict``."""
        if self._head is not None:
            return {"value_head": self._head.state_dict()}
        assert self._counts is not None
        return {"counts": {name: column.tolist() for name, column in self._counts.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Allotment.load_state_dict``."""
        kind, taker = ("value_head", self._head) if self._head is not None else ("counts", self._counts)
        if kind not in state:
            raise CheckpointError(
                f'the checkpoint holds estimates of the kind {", ".join(state) or "none"}, expected "{kind}"; set '
                "[estimate] as it was, or begin a new run"
            )
        assert taker is not None
        taker.load_state_dict(state[kind])


class Gvm:
    """By acceptance rates and gradient norms of a first stage, for the prompts of several steps (arXiv 2505.02391)."""

    def __init__(
        self, config: Config, train_step: TrainStep, prompts_of: Callable[[int], Sequence[Prompt]], presample: Presample
    ) -> None:
        try:
            block_parameters(train_step.policy, config.gvm.block)  # a wrong one is refused before anything is drawn
        except ConfigError as error:
            raise ConfigError(f"gvm.block: {error}") from error
        self._config, self._train_step = config, train_step
        self._prompts_of, self._presample = prompts_of, presample
        self._until = 0
        """The first step that the estimates do not reach."""
        self._estimates: dict[int, tuple[float, float]] = {}
        """Acceptance rate and gradient norm, by the prompt's index in the data."""
        self._spent = np.zeros(3)
        """Samples, tokens and samples without a reward of the first stage that came before this step, if one did."""

    def counts(self, step: int, prompts: Sequence[Prompt]) -> np.ndarray:
        """See ``Allotment.counts``; draws a first stage where the last one does not reach this step."""
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
        """See ``Allotment.learn``; estimates are those of the first stage alone."""
        rates, norms = np.array([self._estimates[prompt.index] for prompt in prompts]).T
        # What adds up is told by one model copy alone.
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
        """See ``Allotment.state_dict``."""
        return {"gvm": {"until": self._until, "estimates": [[i, *pair] for i, pair in sorted(self._estimates.items())]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Allotment.load_state_dict``."""
        if "gvm" not in state:
            raise CheckpointError('the checkpoint holds no estimates of rule = "gvm"; begin a new run, or set its rule')
        self._until = int(state["gvm"]["until"])
        self._estimates = {int(index): (rate, norm) for index, rate, norm in state["gvm"]["estimates"]}

    def _refresh(self, step: int) -> None:
        """A first stage for all prompts up to the next one; step by step, for its traces are dropped at once."""
        until = min(step + self._config.gvm.refresh_every, self._config.run.steps)
        estimates: dict[int, tuple[float, float]] = {}
        for later in range(step, until):
            prompts = self._prompts_of(later)
            rates, norms = self._stage(later, len(prompts))
            estimates |= {
                prompt.index: (float(rate), float(norm))
                for prompt, rate, norm in zip(prompts, rates, norms, strict=True)
            }
        # All or nothing: if the engine fails, the checkpoint that follows must not hold half of a stage.
        self._until, self._estimates = until, estimates

    def _stage(self, step: int, num_prompts: int) -> tuple[np.ndarray, np.ndarray]:
        """Acceptance rates and gradient norms, [B] each, of one step's prompts."""
        gvm = self._config.gvm
        copy, copies = distributed.dp_rank(), distributed.dp_size()
        keys = [(prompt, sample) for prompt in range(copy, num_prompts, copies) for sample in range(gvm.pre_samples)]
        group = distributed.model_group()
        mine = self._presample(step, keys[group.rank() :: group.size()])
        accepted = self._accepted(mine)
        norms = gradient_norms(self._train_step, [rollout for _, rollout in accepted], gvm.block)
        norm_of = {key: norm for (key, _), norm in zip(accepted, norms.tolist(), strict=True)}
        rows = [
            [*key, sample.reward is not None, key in norm_of, norm_of.get(key, 0.0), _tokens(sample)]
            for key, sample in mine.items()
        ]
        found = distributed.gather_rows(np.array(rows, dtype=np.float64).reshape(-1, 6))
        judged = found[:, 2] > 0
        self._spent += [len(found), found[:, 5].sum(), (~judged).sum()]
        return _estimates(found[judged], num_prompts, gvm.average)

    def _accepted(self, mine: Mapping[Key, Sample]) -> list[tuple[Key, Rollout]]:
        """The model copy's accepted responses, in their order; this rank's with routes."""
        threshold = self._config.reward.threshold
        good = {
            key: sample.rollout
            for key, sample in mine.items()
            if sample.reward is not None and sample.reward > threshold and sample.rollout is not None
        }
        gathered = distributed.gather_rollouts([without_routes(rollout) for rollout in good.values()])
        found = {(rollout.group, rollout.sample): rollout for rollout in gathered}
        return sorted((found | good).items(), key=lambda item: item[0])


def _tokens(sample: Sample) -> int:
    return 0 if sample.rollout is None else sample.rollout.num_tokens


def _estimates(rows: np.ndarray, num_prompts: int, average: NormMean) -> tuple[np.ndarray, np.ndarray]:
    """From rows of (prompt, sample, judged, accepted, norm, ...); a prompt without rewards is never accepted."""
    prompts = rows[:, 0].astype(np.int64)
    missing = np.setdiff1d(np.arange(num_prompts), prompts)
    return gvm_estimates(
        np.concatenate([prompts, missing]),
        np.concatenate([rows[:, 3] > 0, np.zeros(len(missing), bool)]),
        np.concatenate([rows[:, 4], np.zeros(len(missing))]),
        num_prompts,
        average,
    )
