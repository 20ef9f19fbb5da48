"""The passes of a step over one mini-batch: functions that return frozen records.

Shapes: ``n`` sequences of this rank, ``T`` packed tokens of a micro-batch, ``L`` MoE layers, ``K`` experts of a token.
All functions are collective calls of a model copy. Outputs exist on the last pipeline stage only.

Advantages by token need log-probabilities of policy and reference for whole groups, which may span several ranks. Ranks
exchange the lengths of responses and, if a group spans ranks, two floats per generated token.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.core import objectives
from megarl.core.devices import DeviceChecks, to_device
from megarl.core.measures import mismatch_metrics
from megarl.core.metrics import Stat, merge
from megarl.core.ratios import log_ratio, segment_expand, segment_sum, usable_mask
from megarl.errors import AgreementError, MegarlError, ReplayError
from megarl.megatron import distributed
from megarl.megatron.checkpoints.checkpoint import FrozenModel
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import MicroBatch, to_tokens
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import gather_shared
from megarl.replay import Recording
from megarl.routes import Disagreement
from megarl.trainer.mini_batch import FirstPass, Judged, MiniBatch, StepPlan, collect_sequences
from megarl.watch.tripwires import COLUMNS, Column, count_flips, count_k3

Routing = AbstractContextManager[Recording | None]


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass over a mini-batch brings."""

    micros: list[forward.MicroOutput]
    """By micro-batch; empty before the last pipeline stage."""
    recording: Recording | None
    """What the routers did; None without recording or replay."""
    mistake: AgreementError | None = None
    """Routes that agree too little with the routers, if the tripwires judge routes."""
    metrics: dict[str, Stat] = field(default_factory=dict)
    """Of the whole pass."""

    @property
    def logprobs(self) -> list[torch.Tensor]:
        """fp32 [T] by micro-batch."""
        return [micro.logprobs for micro in self.micros]


def run_pass(
    policy: Policy, mini: MiniBatch, routing: Routing | None = None, *,
    chunks: Sequence[torch.nn.Module] | None = None, leaves_mistakes: bool = False, checks: DeviceChecks | None = None,
    **options: Any,
) -> PassOutput:  # fmt: skip
    """Run micro-batches through the model, inside ``routing`` (default: replay the mini-batch's routes, if any).

    chunks: another model than the policy's; options: of ``forward.run``. An error when the routing closes is raised on
    all ranks, and so is an error of ``checks``, which are required at the end. leaves_mistakes: routes that agree too
    little are returned, not raised, for the tripwires to judge.
    """
    outputs: list[forward.MicroOutput] | None = None
    recording: Recording | None = None
    mistake: AgreementError | None = None
    failure: MegarlError | None = None
    try:
        with routing or replayed(policy, mini) as recording:
            options |= {"temperature": policy.config.rollout.temperature, "vocab_size": policy.shape.vocab_size}
            outputs = forward.run(policy.chunks if chunks is None else chunks, mini.micro_batches, **options)
    except ReplayError as error:
        if outputs is None:  # during the pass, ranks are in different collective calls
            raise
        if leaves_mistakes and isinstance(error, AgreementError):
            mistake = error
        else:
            failure = error
    try:
        if checks is not None:
            checks.require()
    except MegarlError as error:
        failure = failure or error
    if policy.replay is not None or checks is not None:
        distributed.fail_together(failure, "the pass")
    return PassOutput(outputs or [], recording, mistake)


def replayed(policy: Policy, mini: MiniBatch, checks: DeviceChecks | None = None) -> Routing:
    """Return the routing of later passes: the mini-batch's routes if any, or the routers' own choice."""
    if policy.replay is None or mini.replayed is None:
        return nullcontext()
    return policy.replay.replay(mini.replayed, min_agreement=0.0, checked=True, checks=checks)


def compared(
    policy: Policy, mini: MiniBatch, plan: StepPlan, checks: DeviceChecks | None = None, scored: bool = False
) -> Routing:
    """Return the routing of the first pass: replay (r3) or record, and compare the routers with the engine.

    scored: record the routers' scores of the experts in use.
    """
    if policy.replay is None:
        return nullcontext()
    if mini.routes is not None:
        options: dict[str, Any] = {"compared": mini.routes, "checked": True, "checks": checks, "scored": scored}
        return policy.replay.replay(mini.routes, plan.writes_traces, **options)
    keep = policy.config.train.replay == "r2" or plan.writes_traces
    return policy.replay.record(keep=keep, compared=mini.engine_routes, scored=scored)


def replaced_experts(policy: Policy, mini: MiniBatch, recording: Recording | None) -> dict[str, Stat]:
    """Return the share of replayed experts that ``train.replay_min_score`` replaced in a pass; a collective call."""
    if not policy.config.train.replay_min_score or policy.replay is None or recording is None or mini.replayed is None:
        return {}
    counts = np.concatenate(gather_shared([recording.replaced], mini.micro_batches, policy.replay.layers))
    share = float(counts.sum()), float(counts.size * policy.shape.topk)
    return Stat.means_of({"router/replaced_fraction": share})


def router_drift(policy: Policy, mini: MiniBatch, has_moved: bool) -> list[torch.Tensor]:
    """Return ``mean |ln r_theta - ln r_old|`` over all layers and the experts of the first pass, fp32 [T] by
    micro-batch: for each token, of the predicting position. A collective call, with a forward pass if the weights
    have moved; else 0.
    """
    device, micros = torch.cuda.current_device(), mini.micro_batches
    drift = [torch.zeros(micro.batch.num_tokens, device=device) for micro in micros]
    if not has_moved:
        return drift
    assert policy.replay is not None, "check_fit refuses models and settings without the hook"
    assert mini.first is not None, "passes before the first update have recorded scores"
    scored = mini.first.scores
    routing = policy.replay.record(keep=False, scored=scored)
    if mini.replayed is not None:
        routing = policy.replay.replay(mini.replayed, min_agreement=0.0, checked=True, scored=scored)
    recording = run_pass(policy, mini, routing).recording
    assert recording is not None
    # On a pipeline stage of dense layers, no scores.
    for index, (now, old) in enumerate(zip(recording.scores, scored, strict=True)):
        by_row = (now.log_probs - old.log_probs).abs().mean(2).sum(1) / len(policy.shape.moe_layers)
        drift[index] = to_tokens(by_row, micros[index])
    lengths = [len(of_micro) for of_micro in drift]
    total = distributed.all_sum(torch.cat(drift), parallel_state.get_pipeline_model_parallel_group())
    return list(total.split(lengths))


def ref_pass(policy: Policy, reference: FrozenModel, mini: MiniBatch) -> list[torch.Tensor]:
    """Return the log-probabilities of the reference, fp32 [T] by micro-batch.

    The reference routes natively unless ``train.replay_reference`` lets it replay the policy's routes.
    """
    routing: Routing = nullcontext()
    if reference.replay is not None:
        assert mini.replayed is not None, "routes are known before this pass"
        routing = reference.replay.replay(mini.replayed, min_agreement=0.0, checked=True)
    else:
        native = [replace(micro, packing=replace(micro.packing, replayed={})) for micro in mini.micro_batches]
        mini = replace(mini, micro_batches=native)
    return run_pass(policy, mini, routing, chunks=reference.chunks).logprobs


def compare_engines(policy: Policy, mini: MiniBatch, output: PassOutput, plan: StepPlan) -> FirstPass:
    """Compare the rollout with the first pass over its mini-batch."""
    metrics: list[dict[str, Stat]] = []
    gaps, counts = np.zeros((len(mini.keys), COLUMNS)), []
    gaps[:, : Column.LARGEST_K3] = mini.keys
    for micro, of_micro in zip(mini.micro_batches, output.micros, strict=False):  # no outputs on earlier stages
        batch, device = micro.batch, of_micro.logprobs.device
        columns = (batch.rollout_logprobs, batch.loss_mask, batch.cu_seqlens)
        rollout_logprobs, loss_mask, cu_seqlens = (to_device(column, device) for column in columns)
        compared_columns = of_micro.logprobs, rollout_logprobs, loss_mask, cu_seqlens
        metrics += [mismatch_metrics(*compared_columns), {"rollout/entropy": Stat.mean(of_micro.entropies, loss_mask)}]
        counts.append(count_k3(*compared_columns))
    if counts:
        order = [sequence for micro in mini.micro_batches for sequence in micro.sequences]
        gaps[order, Column.LARGEST_K3 : Column.FLIPS] = torch.cat(counts).cpu()
    native_routes, flips = _compare_routes(policy, mini, output.recording, plan, gaps)
    own_routes, scores = (None, []) if (record := output.recording) is None else (record.routes, record.scores)
    routes = own_routes if policy.config.train.replay == "r2" else mini.routes
    return FirstPass(output.logprobs, routes, native_routes, gaps, output.mistake, merge([*metrics, *flips]), scores)


def _compare_routes(
    policy: Policy, mini: MiniBatch, recording: Recording | None, plan: StepPlan, gaps: np.ndarray
) -> tuple[list[Any] | None, list[dict[str, Stat]]]:
    """Fill the columns of ``gaps`` from FLIPS on; return the routers' own routes, if the plan keeps them, and flips."""
    if policy.replay is None or recording is None or mini.engine_routes is None:
        return None, []
    layers, topk, replays = policy.replay.layers, policy.shape.topk, mini.routes is not None
    counts = gather_shared((recording.shared, recording.native_shared)[: 1 + replays], mini.micro_batches, layers)
    for micro, of_micro in zip(mini.micro_batches, counts, strict=True):
        gaps[list(micro.sequences), Column.FLIPS :] = count_flips(of_micro[..., -1], topk, micro.batch)
    all_counts = np.concatenate(counts)
    uses = (("router", 0), ("router/native", -1))
    flips = [Disagreement.of(all_counts[..., column], topk).stats(prefix) for prefix, column in uses]
    own_choice = (recording.native if replays else recording.routes) if layers else mini.engine_routes
    return own_choice if plan.writes_traces else None, flips


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
    objective: objectives.Objective, judged: Judged, minis: Sequence[MiniBatch], logprobs: Sequence[torch.Tensor]
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


def _compute(
    objective: objectives.Objective, judged: Judged, local: _Columns, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the advantages of the rank's loss tokens, float64 [T], from whole groups."""
    columns, begin = _gather_groups(local, torch.from_numpy(judged.groups), group)
    ids = columns.ids.numpy()
    # In float64: if all rewards of a group are equal, only small differences of the KL are left to standardise.
    policy, ref = columns.logprobs.double()
    mask = torch.ones_like(policy, dtype=torch.bool)
    of_tokens: dict[str, Any] = {"logprobs": policy, "ref_logprobs": ref, "loss_mask": mask}
    bounds, groups = torch.nn.functional.pad(columns.lengths.cumsum(0), (1, 0)), judged.groups[ids]
    values = objectives.token_advantages(objective, judged.rewards[ids], groups, cu_seqlens=bounds, **of_tokens)
    return values[begin : begin + local.logprobs.size(1)]


def _gather_groups(local: _Columns, groups: torch.Tensor, ranks: dist.ProcessGroup) -> tuple[_Columns, int]:
    """Return the columns of every response of the rank's groups, and the place of the rank's first token."""
    if ranks.size() == 1:
        return local, 0
    # All ranks have equally many sequences, so ids and lengths need no padding.
    device = torch.cuda.current_device()
    heads = distributed.all_gather(to_device(torch.stack([local.ids, local.lengths]), device), ranks).cpu()
    totals = [int(head[1].sum()) for head in heads]
    padded = torch.nn.functional.pad(local.logprobs, (0, max(totals) - local.logprobs.size(1)))
    of_ranks = distributed.all_gather(to_device(padded, device), ranks).cpu()
    logprobs = [column[:, :total] for column, total in zip(of_ranks, totals, strict=True)]
    ids, lengths = torch.cat(list(heads), 1)
    is_needed = torch.isin(groups[ids], groups[local.ids])
    tokens = segment_expand(is_needed, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
    begin = int(tokens[: sum(totals[: ranks.rank()])].sum())
    return _Columns(ids[is_needed], lengths[is_needed], torch.cat(logprobs, 1)[:, tokens]), begin
