"""One optimizer step's share of a rank, and the steps of making it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core import parallel_state

from megarl.config import Config
from megarl.core.devices import to_device
from megarl.core.measures import replay_bias_metrics
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import Denominators, TokenColumns
from megarl.core.types import Rollout, TrainBatch
from megarl.errors import AgreementError, TraceError
from megarl.megatron.distributed import all_sum
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import MicroBatch, split_micro_batches
from megarl.replay import MicroRoutes


@dataclass(frozen=True, slots=True)
class Judged:
    """The rewards of a global step, equal on all ranks, and which sequences this rank trains on."""

    rewards: np.ndarray
    """float64 [S], 0 where the reward function failed; such a response has no loss token."""
    groups: np.ndarray
    """int64 [S]."""
    owned: list[list[int]]
    """By mini-batch, the sequences of this data-parallel rank, in the order of its rollouts."""


@dataclass(slots=True)
class MiniBatch:
    """This rank's share of one optimizer step. The passes over it fill in the fields that are None at first."""

    micro_batches: list[MicroBatch]
    denominators: Denominators
    """Over all ranks."""
    gaps: np.ndarray
    """float64 [n, COLUMNS] by sequence: how far the engines are apart (``megarl.watch.tripwires``)."""
    mistake: AgreementError | None = None
    """What replay found wrong with the routes of this rank, for the tripwires."""
    rollout_routes: list[MicroRoutes] | None = None
    """The engine's routes, this rank's rows and layers. None if it recorded none, or no router here can use them."""
    routes: list[MicroRoutes] | None = None
    """The routes that training replays; None routes natively."""
    native_routes: list[MicroRoutes] | None = None
    """What the routers chose, or would have chosen, in the first pass. Kept only for trace files."""
    old_logprobs: list[torch.Tensor] | None = None
    """[T] per micro-batch, of the first pass, on the last pipeline stage (elsewhere empty). None before that pass,
    which may be the update's own."""
    old_updates: int = 0
    """The number of updates before the first pass; until then before the step."""
    old_is_rollout: bool = False
    """Whether objectives see rollout_logprobs in the place of these."""
    ref_logprobs: list[torch.Tensor] | None = None
    """As ``old_logprobs``, of the reference policy; None without one."""
    judged: Judged | None = None
    """Its part of the step, for advantages with a KL of the current policy; else None."""
    metrics: dict[str, Stat] = field(default_factory=dict)
    """The gap between the engines; part of the step's record."""

    def columns(self, index: int, batch: TrainBatch, logprobs: torch.Tensor) -> TokenColumns:
        """What an objective reads of one micro-batch; in the first pass over it, the policy is the old one."""
        device = logprobs.device
        rollout = to_device(batch.rollout_logprobs, device)
        own = logprobs if self.old_logprobs is None else self.old_logprobs[index]
        ref = None if self.ref_logprobs is None else self.ref_logprobs[index]
        return TokenColumns(
            logprobs,
            rollout if self.old_is_rollout else own,
            rollout,
            to_device(batch.advantages, device),
            to_device(batch.loss_mask, device),
            to_device(batch.cu_seqlens, device),
            ref,
        )

    def replay_bias(
        self, replayed: Sequence[forward.MicroOutput], native: Sequence[forward.MicroOutput]
    ) -> list[dict[str, Stat]]:
        """What replay changes, by micro-batch; none if ``native`` is empty."""
        found: list[dict[str, Stat]] = []
        for micro, mine, own in zip(self.micro_batches, replayed, native, strict=False):
            assert mine.divergence is not None
            mask = to_device(micro.batch.loss_mask, mine.logprobs.device)
            found.append(replay_bias_metrics(mine.divergence, mine.logprobs, own.logprobs, mask))
        return found


def split(config: Config, batch: TrainBatch, max_tokens: int | None = None) -> list[MicroBatch]:
    """Split a batch as the layout needs it, by default at ``train.micro_batch_tokens``; a collective call."""
    parallel = config.parallel
    return split_micro_batches(
        batch,
        config.train.micro_batch_tokens if max_tokens is None else max_tokens,
        parallel.equal_micro_batches,
        parallel.micro_batch_multiple,
    )


def make_rollout(tokens: np.ndarray, loss_mask: np.ndarray | None = None) -> Rollout:
    """Return tokens that no engine sampled as a rollout without routes; by default without loss."""
    return Rollout(
        group=0,
        sample=0,
        tokens=np.asarray(tokens, np.int32),
        loss_mask=np.zeros(len(tokens), bool) if loss_mask is None else loss_mask,
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        routed_experts=None,
        routed_mask=None,
        weight_versions=np.zeros(len(tokens), np.int32),
        finish_reason="abort",
    )


def over_ranks(local: Denominators) -> Denominators:
    """The sum over data-parallel ranks."""
    own = to_device(torch.tensor([local.num_tokens, local.num_sequences]), torch.cuda.current_device())
    counts = all_sum(own, parallel_state.get_data_parallel_group())
    return Denominators(*counts.tolist())


def check_missing_rows(batch: TrainBatch, limit: float) -> None:
    """TraceError if a larger share of the tokens than ``limit`` has no recorded route."""
    assert batch.routed_mask is not None
    missing = ~batch.routed_mask.numpy()
    # Engines have no row for the last token: they never processed it. Nothing is predicted from it either.
    missing[batch.cu_seqlens[1:].numpy() - 1] = False
    share = np.count_nonzero(missing) / len(missing)
    if share > limit:
        raise TraceError(
            f"{share:.1%} of the tokens have no recorded route, more than train.max_missing_rows = {limit:.1%}; "
            "find out why the engine lost them, or raise the limit: missing rows route natively"
        )
