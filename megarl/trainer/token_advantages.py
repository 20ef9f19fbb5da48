"""Advantages that differ between the tokens of a response, for groups that may span several ranks.

They need log-probabilities of policy and reference of whole groups, and each rank has those of its own responses.
Ranks exchange the lengths of responses and, if a group spans ranks, two floats per generated token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core.devices import to_device
from megarl.core.metrics import Stat
from megarl.core.objectives import Objective, token_advantages
from megarl.core.ratios import log_ratio, segment_sum, usable_mask
from megarl.core.segments import segment_expand
from megarl.megatron.distributed import all_gather
from megarl.megatron.passes.micro_batches import MicroBatch
from megarl.trainer.mini_batch import Judged, MiniBatch


@dataclass(frozen=True, slots=True)
class _Columns:
    """Loss tokens of some sequences back to back, on the host."""

    ids: torch.Tensor
    """int64 [N], the sequences."""
    lengths: torch.Tensor
    """int64 [N], their loss tokens; may be 0."""
    logprobs: torch.Tensor
    """float32 [2, T]: of the policy and the reference."""


def set_token_advantages(
    objective: Objective, judged: Judged, minis: Sequence[MiniBatch], logprobs: Sequence[torch.Tensor], name: str
) -> None:
    """Set the objective's advantage of every token in mini-batches of whole groups; a collective call.

    ``logprobs``: [T] per micro-batch, of the policy whose KL it is; ``name``: the metric mean(log pi - log pi_ref).
    """
    if objective.kl_at == "theta":
        for mini, owned in zip(minis, judged.owned, strict=True):
            mini.judged = replace(judged, owned=[owned])
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):  # only that stage computes the loss
        return
    micros = [micro for mini in minis for micro in mini.micro_batches]
    ref = [column for mini in minis for column in mini.ref_logprobs or []]
    owned = zip(judged.owned, minis, strict=True)
    ids = [mine[index] for mine, mini in owned for micro in mini.micro_batches for index in micro.sequences]
    keeps = [usable_mask(micro.batch.loss_mask, micro.batch.rollout_logprobs) for micro in micros]
    lengths = [segment_sum(keep, micro.batch.cu_seqlens) for keep, micro in zip(keeps, micros, strict=True)]
    # One transfer to the host, which computes the advantages: they are few operations on whole groups.
    both = torch.stack([torch.cat(list(logprobs)), torch.cat(ref)]).cpu()
    own = _Columns(torch.tensor(ids), torch.cat(lengths), both[:, torch.cat(keeps)])
    values = _compute_own(objective, judged, own, parallel_state.get_data_parallel_group())
    counts = [int(keep.sum()) for keep in keeps]
    parts = iter(zip(keeps, values.float().split(counts), strict=True))
    for mini in minis:
        mini.micro_batches = [_set_advantages(micro, *next(parts)) for micro in mini.micro_batches]
    possible = ~torch.isneginf(own.logprobs[0])
    drift = log_ratio(own.logprobs[0], own.logprobs[1], possible)
    minis[0].metrics[name] = Stat.mean(drift, possible)


def _set_advantages(micro: MicroBatch, keep: torch.Tensor, values: torch.Tensor) -> MicroBatch:
    advantages = torch.zeros_like(micro.batch.advantages).masked_scatter(keep, values)
    return replace(micro, batch=replace(micro.batch, advantages=advantages))


def _compute_own(objective: Objective, judged: Judged, own: _Columns, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the advantages of this rank's loss tokens, float64 [T], from all responses of their groups."""
    groups = torch.from_numpy(judged.groups)
    columns, first = _gather_groups(own, groups, group)
    ids = columns.ids.numpy()
    # In float64: if all rewards of a group are equal, only small differences of the KL are left to standardise.
    policy, ref = columns.logprobs.double()
    values = token_advantages(
        objective,
        judged.rewards[ids],
        judged.groups[ids],
        logprobs=policy,
        ref_logprobs=ref,
        loss_mask=torch.ones_like(policy, dtype=torch.bool),
        cu_seqlens=torch.nn.functional.pad(columns.lengths.cumsum(0), (1, 0)),
    )
    return values[first : first + own.logprobs.size(1)]


def _gather_groups(own: _Columns, groups: torch.Tensor, ranks: dist.ProcessGroup) -> tuple[_Columns, int]:
    """Return the columns of every response of this rank's groups, and where its own first token is in them."""
    if ranks.size() == 1:
        return own, 0
    # All ranks have equally many sequences, so ids and lengths need no padding.
    device = torch.cuda.current_device()
    heads = all_gather(to_device(torch.stack([own.ids, own.lengths]), device), ranks).cpu()
    spread = torch.cat([torch.unique(groups[head[0]]) for head in heads])
    if torch.unique(spread).numel() == spread.numel():  # no group spans two ranks; all ranks agree on this
        return own, 0
    totals = [int(head[1].sum()) for head in heads]
    padded = torch.nn.functional.pad(own.logprobs, (0, max(totals) - own.logprobs.size(1)))
    everywhere = all_gather(to_device(padded, device), ranks).cpu()
    logprobs = [column[:, :total] for column, total in zip(everywhere, totals, strict=True)]
    ids, lengths = torch.cat(list(heads), 1)
    wanted = torch.isin(groups[ids], groups[own.ids])
    tokens = segment_expand(wanted, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    first = int(tokens[: sum(totals[: ranks.rank()])].sum())
    return _Columns(ids[wanted], lengths[wanted], torch.cat(logprobs, 1)[:, tokens]), first
