"""Advantages by token, for groups that may span several ranks.

The formula needs log-probabilities of policy and reference for whole groups, while a rank has its own responses. Ranks
exchange the lengths of responses and, if a group spans ranks, two floats per generated token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core import objectives
from megarl.core.devices import to_device
from megarl.core.metrics import Stat
from megarl.core.objectives import Objective
from megarl.core.ratios import log_ratio, segment_sum, usable_mask
from megarl.core.segments import segment_expand
from megarl.megatron.distributed import all_gather
from megarl.megatron.passes.micro_batches import MicroBatch
from megarl.trainer.mini_batch import Judged, MiniBatch, collect_sequences


@dataclass(frozen=True, slots=True)
class _Columns:
    """Loss tokens of some sequences back to back, on the host."""

    ids: torch.Tensor
    """int64 [N], the sequences."""
    lengths: torch.Tensor
    """int64 [N], their loss tokens; may be 0."""
    logprobs: torch.Tensor
    """float32 [2, T]: of the policy and the reference."""


def token_advantages(
    objective: Objective, judged: Judged, minis: Sequence[MiniBatch], logprobs: Sequence[torch.Tensor]
) -> tuple[list[MiniBatch], Stat | None]:
    """Return mini-batches of whole groups with the objective's advantage of every token; a collective call.

    logprobs: [T] by micro-batch, of the policy whose KL counts. Also returns mean(log pi - log pi_ref); None before the
    last pipeline stage, where the loss is computed.
    """
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return list(minis), None
    micros = [micro for mini in minis for micro in mini.micro_batches]
    ref = [column for mini in minis for column in mini.ref_logprobs or []]
    keeps = [usable_mask(micro.batch.loss_mask, micro.batch.rollout_logprobs) for micro in micros]
    lengths = [segment_sum(keep, micro.batch.cu_seqlens) for keep, micro in zip(keeps, micros, strict=True)]
    # A single transfer to the host, for few operations on whole groups.
    both_logprobs = torch.stack([torch.cat(list(logprobs)), torch.cat(ref)]).cpu()
    ids = torch.tensor(collect_sequences(minis, judged.owned))
    local = _Columns(ids, torch.cat(lengths), both_logprobs[:, torch.cat(keeps)])
    values = _compute(objective, judged, local, parallel_state.get_data_parallel_group()).float()
    of_micros = zip(micros, keeps, values.split([int(keep.sum()) for keep in keeps]), strict=True)
    filled = (_set_advantages(micro, keep, advantages) for micro, keep, advantages in of_micros)
    minis = [replace(mini, micro_batches=[next(filled) for _ in mini.micro_batches]) for mini in minis]
    possible = ~torch.isneginf(local.logprobs[0])
    return minis, Stat.mean(log_ratio(local.logprobs[0], local.logprobs[1], possible), possible)


def _set_advantages(micro: MicroBatch, keep: torch.Tensor, values: torch.Tensor) -> MicroBatch:
    advantages = torch.zeros_like(micro.batch.advantages).masked_scatter(keep, values)
    return replace(micro, batch=replace(micro.batch, advantages=advantages))


def _compute(objective: Objective, judged: Judged, local: _Columns, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the advantages of the rank's loss tokens, float64 [T], from whole groups."""
    columns, begin = _gather_groups(local, torch.from_numpy(judged.groups), group)
    ids = columns.ids.numpy()
    # In float64: if all rewards of a group are equal, only small differences of the KL are left to standardise.
    policy, ref = columns.logprobs.double()
    values = objectives.token_advantages(
        objective,
        judged.rewards[ids],
        judged.groups[ids],
        logprobs=policy,
        ref_logprobs=ref,
        loss_mask=torch.ones_like(policy, dtype=torch.bool),
        cu_seqlens=torch.nn.functional.pad(columns.lengths.cumsum(0), (1, 0)),
    )
    return values[begin : begin + local.logprobs.size(1)]


def _gather_groups(local: _Columns, groups: torch.Tensor, ranks: dist.ProcessGroup) -> tuple[_Columns, int]:
    """Return the columns of every response of the rank's groups, and the place of the rank's first token."""
    if ranks.size() == 1:
        return local, 0
    # All ranks have equally many sequences, so ids and lengths need no padding.
    device = torch.cuda.current_device()
    heads = all_gather(to_device(torch.stack([local.ids, local.lengths]), device), ranks).cpu()
    groups_by_rank = torch.cat([torch.unique(groups[head[0]]) for head in heads])
    if torch.unique(groups_by_rank).numel() == groups_by_rank.numel():  # no group spans two ranks
        return local, 0
    totals = [int(head[1].sum()) for head in heads]
    padded = torch.nn.functional.pad(local.logprobs, (0, max(totals) - local.logprobs.size(1)))
    of_ranks = all_gather(to_device(padded, device), ranks).cpu()
    logprobs = [column[:, :total] for column, total in zip(of_ranks, totals, strict=True)]
    ids, lengths = torch.cat(list(heads), 1)
    is_needed = torch.isin(groups[ids], groups[local.ids])
    tokens = segment_expand(is_needed, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    begin = int(tokens[: sum(totals[: ranks.rank()])].sum())
    return _Columns(ids[is_needed], lengths[is_needed], torch.cat(logprobs, 1)[:, tokens]), begin
