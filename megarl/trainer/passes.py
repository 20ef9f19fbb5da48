"""The passes of a step over one mini-batch: functions that return frozen records.

Shapes: ``n`` sequences of this rank, ``T`` packed tokens of a micro-batch, ``L`` MoE layers, ``K`` experts of a token.
All functions are collective calls of a model copy. Outputs exist on the last pipeline stage only.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.core.devices import to_device
from megarl.core.measures import mismatch_metrics
from megarl.core.metrics import Stat, merge
from megarl.errors import AgreementError, MegarlError, ReplayError
from megarl.megatron import distributed
from megarl.megatron.frozen import FrozenModel
from megarl.megatron.passes import forward
from megarl.megatron.passes.forward import MicroOutput
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import gather_shared
from megarl.replay import Recording
from megarl.routes import Disagreement
from megarl.trainer.mini_batch import FirstPass, MiniBatch
from megarl.trainer.step_plan import StepPlan
from megarl.watch.tripwires import COLUMNS, Column, count_flips, count_k3

Routing = AbstractContextManager[Recording | None]


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass over a mini-batch brings."""

    micros: list[MicroOutput]
    """By micro-batch; empty before the last pipeline stage."""
    recording: Recording | None
    """What the routers did; None without recording or replay."""
    mistake: AgreementError | None = None
    """Routes that agree too little with the routers, if the tripwires judge routes."""

    @property
    def logprobs(self) -> list[torch.Tensor]:
        """fp32 [T] by micro-batch."""
        return [micro.logprobs for micro in self.micros]


def run_pass(
    policy: Policy,
    mini: MiniBatch,
    routing: Routing | None = None,
    *,
    chunks: Sequence[torch.nn.Module] | None = None,
    leaves_mistakes: bool = False,
    **options: Any,
) -> PassOutput:
    """Run micro-batches through the model, inside ``routing`` (default: replay the mini-batch's routes, if any).

    chunks: another model than the policy's; options: of ``forward.run``. An error when the routing closes is raised on
    all ranks. leaves_mistakes: routes that agree too little are returned, not raised, for the tripwires to judge.
    """
    outputs: list[MicroOutput] = []
    recording: Recording | None = None
    mistake: AgreementError | None = None
    failure: MegarlError | None = None
    has_run = False
    try:
        with routing or replayed(policy, mini) as recording:
            outputs = forward.run(
                policy.chunks if chunks is None else chunks,
                mini.micro_batches,
                temperature=policy.config.rollout.temperature,
                vocab_size=policy.shape.vocab_size,
                **options,
            )
            has_run = True
    except ReplayError as error:
        if not has_run:  # during the pass, ranks are in different collective calls
            raise
        if leaves_mistakes and isinstance(error, AgreementError):
            mistake = error
        else:
            failure = error
    if policy.replay is not None:
        distributed.fail_together(failure, "replay")
    return PassOutput(outputs, recording, mistake)


def replayed(policy: Policy, mini: MiniBatch) -> Routing:
    """Return the routing of later passes: the mini-batch's routes if any, or the routers' own choice."""
    if policy.replay is None or mini.replayed is None:
        return nullcontext()
    return policy.replay.replay(mini.replayed, min_agreement=0.0, checked=True)


def compared(policy: Policy, mini: MiniBatch, plan: StepPlan) -> Routing:
    """Return the routing of the first pass: replay (r3) or record, and compare the routers with the engine."""
    if policy.replay is None:
        return nullcontext()
    if mini.routes is not None:
        return policy.replay.replay(mini.routes, plan.writes_traces, compared=mini.routes, checked=True)
    keep = policy.config.train.replay == "r2" or plan.writes_traces
    return policy.replay.record(keep=keep, compared=mini.engine_routes)


def ref_pass(policy: Policy, reference: FrozenModel, mini: MiniBatch) -> list[torch.Tensor]:
    """Return the log-probabilities of the reference, fp32 [T] by micro-batch.

    The reference routes natively unless ``train.replay_reference`` lets it replay the policy's routes.
    """
    routing: Routing = nullcontext()
    if reference.replay is not None:
        assert mini.replayed is not None, "routes are known before this pass"
        routing = reference.replay.replay(mini.replayed, min_agreement=0.0, checked=True)
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
        entropy = {"rollout/entropy": Stat.mean(of_micro.entropies, loss_mask)}
        metrics += [mismatch_metrics(*compared_columns), entropy]
        counts.append(count_k3(*compared_columns))
    if counts:
        order = [sequence for micro in mini.micro_batches for sequence in micro.sequences]
        gaps[order, Column.LARGEST_K3 : Column.FLIPS] = torch.cat(counts).cpu()
    native_routes, flips = _compare_routes(policy, mini, output.recording, plan, gaps)
    own_routes = None if output.recording is None else output.recording.routes
    return FirstPass(
        logprobs=output.logprobs,
        routes=own_routes if policy.config.train.replay == "r2" else mini.routes,
        native_routes=native_routes,
        gaps=gaps,
        mistake=output.mistake,
        metrics=merge([*metrics, *flips]),
    )


def _compare_routes(
    policy: Policy, mini: MiniBatch, recording: Recording | None, plan: StepPlan, gaps: np.ndarray
) -> tuple[list[Any] | None, list[dict[str, Stat]]]:
    """Fill the columns of ``gaps`` from FLIPS on; return the routers' own routes, if the plan keeps them, and flips."""
    if policy.replay is None or recording is None or mini.engine_routes is None:
        return None, []
    layers, topk, replays = policy.replay.layers, policy.shape.topk, mini.routes is not None
    shared_by_use = (recording.shared, recording.native_shared)[: 1 + replays]
    counts = gather_shared(shared_by_use, mini.micro_batches, layers)
    for micro, of_micro in zip(mini.micro_batches, counts, strict=True):
        gaps[list(micro.sequences), Column.FLIPS :] = count_flips(of_micro[..., -1], topk, micro.batch)
    all_counts = np.concatenate(counts)
    uses = (("router", 0), ("router/native", -1))
    flips = [Disagreement.of(all_counts[..., column], topk).stats(prefix) for prefix, column in uses]
    native_routes = None
    if plan.writes_traces:
        own_choice = recording.native if replays else recording.routes
        native_routes = own_choice if layers else mini.engine_routes
    return native_routes, flips
