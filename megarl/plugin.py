"""The plug-in for your own training loop around Megatron-Core: all that the loop needs, in one import.

It needs torch, numpy and megatron-core, and importing it changes nothing in the process. On a machine without CUDA,
call ``megarl.enable_cpu()`` before Megatron is imported. The lines that it adds to a loop (docs/plugin.md):

>>> replay = RoutingReplay(model_chunks)                                   # once, after the model is built
>>> routes = [replay.rows(b["routed_experts"], b["routed_mask"], b["tokens"]) for b in micro_batches]     # R3
>>> with replay.replay(routes): ...                                        # R3, old log-probabilities
>>> with replay.record() as recording: ...                                 # R2, old log-probabilities
>>> step_loss = StepLoss.of(OBJECTIVES["minirl"], [b["loss_mask"] for b in micro_batches])
>>> with replay.replay(routes or recording.routes): ...                    # the update: forward and backward
>>> loss, statistics = step_loss(TokenColumns.of_padded(logprobs, b))      # in Megatron's loss function
>>> metrics = reduce_metrics(all_statistics)                               # once per step
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.core.choices.table import find_objective
from megarl.core.metrics import Stat, finalize, merge, to_host
from megarl.core.objectives import OBJECTIVES, Denominators, Objective, TokenColumns, policy_loss
from megarl.core.objectives.columns import count_loss_tokens
from megarl.errors import ConfigError, refusal, refuse_if
from megarl.files.hf_config import MoeShape
from megarl.replay import MicroRoutes, Recording, RoutingReplay, stack_routes
from megarl.replay.megatron_state import cp_position, tp_position
from megarl.routes import RoutingTrace
from megarl.routes.answers import routes_from_sglang

__all__ = ["OBJECTIVES", "Denominators", "Objective", "StepLoss", "TokenColumns", "policy_loss", "reduce_metrics"]
__all__ += ["MicroRoutes", "MoeShape", "Recording", "RoutingReplay", "RoutingTrace"]
__all__ += ["routes_from_sglang", "stack_routes"]


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
        cls, objective: Objective | str, loss_masks: Sequence[Tensor], cu_seqlens: Sequence[Tensor] | None = None
    ) -> "StepLoss":
        """Count what the loss is divided by; a collective call of the data-parallel ranks, once per optimizer step.

        objective: a row of ``OBJECTIVES``, or its name. loss_masks: of each micro-batch of this rank, bool ``[b, s]``,
        or packed ``[T]`` with ``cu_seqlens`` int64 ``[N+1]``. UnknownNameError for an unknown name. ConfigError for a
        mask of another dtype or shape, for objectives that must know all tokens of the step beforehand, without
        micro-batches, and if ranks have different numbers of micro-batches.
        """
        objective = find_objective(objective)
        refuse_if(objective.beforehand, ConfigError, "beforehand")
        if cu_seqlens is not None and len(cu_seqlens) != len(loss_masks):
            raise ConfigError(f"{len(cu_seqlens)} cu_seqlens for {len(loss_masks)} loss masks: give one for each")
        group, num_micros = parallel_state.get_data_parallel_group(), len(loss_masks)
        counts = torch.zeros(4, dtype=torch.int64, device="cuda" if torch.cuda.is_available() else "cpu")
        for index, mask in enumerate(loss_masks):
            _check_mask(f"loss mask {index}", mask, is_packed=cu_seqlens is not None)
            ends = torch.arange(0, mask.numel() + 1, mask.size(-1)) if cu_seqlens is None else cu_seqlens[index]
            counts[:2] += count_loss_tokens(mask.flatten(), ends.to(mask.device)).to(counts.device)
        counts[2], counts[3] = num_micros, num_micros * num_micros
        dist.all_reduce(counts, group=group)
        num_tokens, num_sequences, total, squares = counts.tolist()
        refuse_if(not total, ConfigError, "no_loss_masks")
        if total != num_micros * group.size() or squares * group.size() != total * total:
            raise ConfigError(refusal("micro_batches_of_ranks", num=num_micros, others=total - num_micros))
        return cls(objective, Denominators(num_tokens, num_sequences), num_micros * group.size())

    def __call__(self, columns: TokenColumns) -> tuple[Tensor, dict[str, Stat]]:
        """Return the scalar that Megatron's loss function returns for a micro-batch, and its statistics.

        The sum of the statistic "loss" over micro-batches and ranks is the loss of the step. Megatron's
        ``calculate_per_token_loss`` stays off.
        """
        loss, statistics = policy_loss(self.objective, columns, self.denominators)
        return loss * self.scale, statistics


def _check_mask(label: str, mask: Tensor, is_packed: bool) -> None:
    refuse_if(mask.dtype is not torch.bool, ConfigError, "mask_of_bools", label=label, mask=mask)
    if mask.dim() != (1 if is_packed else 2):
        expected = "[T], because cu_seqlens were given" if is_packed else "[b, s]; packed [T] needs cu_seqlens"
        raise ConfigError(f"{label} is {list(mask.shape)}, expected {expected}")


def reduce_metrics(statistics: Iterable[Mapping[str, Stat]]) -> dict[str, float]:
    """Merge the statistics of this rank's micro-batches with those of all ranks; a collective call of all ranks.

    Ranks without the last pipeline stage pass none. Every rank gets all numbers. NumericsError if a number is not
    finite.
    """
    is_first_copy = tp_position()[1] == cp_position()[1] == 0  # the other ranks of a model copy hold the same numbers
    mine = to_host(merge(statistics)) if is_first_copy else {}
    of_ranks: list[dict[str, Stat]] = [mine] * dist.get_world_size()
    if len(of_ranks) > 1:
        dist.all_gather_object(of_ranks, mine)
    return finalize(merge(of_ranks))
