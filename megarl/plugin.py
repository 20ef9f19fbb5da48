"""All that a training loop of one's own around Megatron-Core needs, in one import: docs/plugin.md.

It needs torch, numpy and megatron-core, and brings nothing else along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.core.metrics import Stat, finalize, merge
from megarl.core.objectives import OBJECTIVES, Denominators, Objective, TokenColumns, policy_loss
from megarl.core.objectives.columns import count_loss_tokens
from megarl.errors import ConfigError
from megarl.megatron.distributed import collect_metrics, from_main_rank
from megarl.models.shapes import MoeShape
from megarl.replay import MicroRoutes, Recording, RoutingReplay, stack_routes
from megarl.routes import RoutingTrace
from megarl.routes.answers import routes_from_sglang, routes_from_vllm

__all__ = [
    "OBJECTIVES",
    "Denominators",
    "MicroRoutes",
    "MoeShape",
    "Objective",
    "Recording",
    "RoutingReplay",
    "RoutingTrace",
    "StepLoss",
    "TokenColumns",
    "policy_loss",
    "reduce_metrics",
    "routes_from_sglang",
    "routes_from_vllm",
    "stack_routes",
]


@dataclass(frozen=True, slots=True)
class StepLoss:
    """The loss of one optimizer step: exact for any split into micro-batches and ranks. Build it with ``of``."""

    objective: Objective
    denominators: Denominators
    """Over all micro-batches and data-parallel ranks."""
    scale: int
    """Micro-batches * data-parallel ranks, by which Megatron divides."""

    @classmethod
    def of(
        cls, objective: Objective, loss_masks: Sequence[Tensor], cu_seqlens: Sequence[Tensor] | None = None
    ) -> StepLoss:
        """Count what the loss is divided by; a collective call of the data-parallel ranks, once per optimizer step.

        loss_masks: of each micro-batch of this rank, bool [b, s], or packed [T] with ``cu_seqlens`` [N+1]. ConfigError
        for objectives that must know all tokens beforehand, and if ranks have different numbers of micro-batches.
        """
        if objective.beforehand:
            raise ConfigError(
                "objective: a part of it must know all tokens of the step beforehand: use gather_facts and policy_loss "
                "of megarl.core.objectives, or choose another objective"
            )
        counts = torch.zeros(4, dtype=torch.int64, device=torch.cuda.current_device())
        for index, mask in enumerate(loss_masks):
            if mask.dtype is not torch.bool or mask.dim() != (2 if cu_seqlens is None else 1):
                raise ConfigError(
                    f"loss mask {index} is {mask.dtype} {list(mask.shape)}, expected bool [b, s], or [T] and cu_seqlens"
                )
            ends = torch.arange(0, mask.numel() + 1, mask.size(-1)) if cu_seqlens is None else cu_seqlens[index]
            counts[:2] += count_loss_tokens(mask.flatten(), ends.to(mask.device)).to(counts.device)
        group, micros = parallel_state.get_data_parallel_group(), len(loss_masks)
        counts[2], counts[3] = micros, micros * micros
        dist.all_reduce(counts, group=group)
        num_tokens, num_sequences, total, squares = counts.tolist()
        if total != micros * group.size() or squares * group.size() != total * total:
            raise ConfigError(f"{micros} micro-batches on this rank, others have {total - micros}: give each as many")
        return cls(objective, Denominators(num_tokens, num_sequences), micros * group.size())

    def __call__(self, columns: TokenColumns) -> tuple[Tensor, dict[str, Stat]]:
        """Return the scalar that Megatron's loss function returns for a micro-batch, and its statistics.

        The sum of the statistic "loss" over micro-batches and ranks is the loss of the step. Megatron's
        ``calculate_per_token_loss`` stays off.
        """
        loss, statistics = policy_loss(self.objective, columns, self.denominators)
        return loss * self.scale, statistics


def reduce_metrics(statistics: Iterable[Mapping[str, Stat]]) -> dict[str, float]:
    """Merge the statistics of this rank's micro-batches with those of all ranks; a collective call of all ranks.

    Ranks without the last pipeline stage give none. Every rank gets all numbers.
    """
    found = collect_metrics(merge(statistics))
    return from_main_rank(lambda: finalize(found or {}))
