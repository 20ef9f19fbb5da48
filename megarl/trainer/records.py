"""What a run records of its samples: trained samples (samples.jsonl), texts, and routes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.core.types import Rollout
from megarl.errors import ConfigError, TraceError
from megarl.megatron import distributed
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import Placement, exchange
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, from_rollout, write_traces
from megarl.run.audit import Audit
from megarl.run.samples import SampleFile, pack
from megarl.trainer.mini_batch import MiniBatch
from megarl.trainer.sampling.excerpts import complete
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.step_plan import StepPlan
from megarl.watch.tripwires import Drops


class SampleRecords:
    """Writes the records of a run. The main rank writes samples.jsonl and texts, every rank the traces it sampled."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self._is_main, self._count = distributed.is_main_rank(), config.log.samples_per_step
        self._audit, self._texts = Audit(config.run_dir), SampleFile(config.run_dir)
        self._traces = TraceDump(config.run_dir / "traces", policy) if config.log.traces_every else None

    def resume(self, done: int) -> None:
        """Undo the records of steps after ``done``."""
        if self._is_main:
            self._audit.record_resume(done)
            self._texts.truncate_after(done)

    def write(
        self, done: int, plan: StepPlan, rollouts: StepRollouts, minis: Sequence[MiniBatch], drops: Drops | None
    ) -> None:
        """Write the records of step ``done``; a collective call. drops: None if the tripwires are off."""
        reasons = {} if drops is None else drops.reasons()
        if self._traces is not None and plan.writes_traces:
            self._traces.write(done, rollouts.mini_batches, minis)
        if self._count:
            gaps = [mini.first.gaps for mini in minis if mini.first is not None and distributed.holds_outputs()]
            gaps = gaps if drops is None else [drops.gaps]  # of all ranks
            self._store_texts(done, rollouts, gaps, reasons)
        if self._is_main:
            versions = [micro.batch.weight_versions for mini in minis for micro in mini.micro_batches]
            oldest = min(int(of_micro.min()) for of_micro in versions if of_micro is not None)
            first = rollouts.first_prompt
            dropped = {(first + prompt, sample): reason for (prompt, sample), reason in reasons.items()}
            self._audit.record_step(done, oldest, rollouts.trained, dropped)

    def _store_texts(
        self, done: int, rollouts: StepRollouts, gaps: Sequence[np.ndarray], reasons: dict[tuple[int, int], str]
    ) -> None:
        """Decode and pack texts on the ranks that have excerpts; the main rank writes.

        Besides the main rank, ranks have excerpts only if all texts are stored, or after a failed reward.
        """
        place = dist.get_rank(), rollouts.first_prompt
        packed = pack(complete(rollouts.excerpts, done, *place, rollouts.trained, gaps, reasons))
        is_on_all_ranks = self._count == "all" or rollouts.unjudged
        members = distributed.gather_on_main_rank(packed) if is_on_all_ranks else [packed]
        if self._is_main and members:
            self._texts.append(b"".join(members))


class TraceDump:
    """Writes the routes of steps to files: the engine's routes, and the choice of the training routers.

    ``megarl trace diff`` on the two files shows where the engines disagree, layer by layer. Each rank writes its
    sampled sequences. ConfigError if Megatron's settings bypass the replay hook.
    """

    def __init__(self, folder: Path, policy: Policy) -> None:
        if policy.replay is None:
            raise ConfigError(
                "log.traces_every: Megatron's settings bypass the replay hook, so its routers cannot be recorded; "
                "run `megarl doctor` to find the setting, or remove log.traces_every"
            )
        self.folder, self.layers, self.shape = folder, policy.replay.layers, policy.shape
        shape = policy.shape
        self.info = TraceInfo(policy.config.model.path, shape.moe_layers, shape.num_experts, shape.topk)

    def write(self, step: int, rollouts: Sequence[Sequence[Rollout]], minis: Sequence[MiniBatch]) -> None:
        """Write the files of a step after the first pass over all its mini-batches; a collective call of a model copy.

        rollouts: by mini-batch. TraceError if the engine recorded no routes.
        """
        sampled, trained = [], []
        for mini, of_mini in zip(minis, rollouts, strict=True):
            recorded = [index for index, rollout in enumerate(of_mini) if rollout.routed_experts is not None]
            experts = self._gather_routes(mini, of_mini, recorded)
            for index in recorded:
                sequence = from_rollout(of_mini[index], self.shape.num_experts)
                sampled.append(sequence)
                versions = np.full(of_mini[index].num_tokens, step - 1, np.int32)  # the weights before the first update
                trace = RoutingTrace(experts[index], self.shape.num_experts, label=sequence.name)
                trained.append(TracedSequence(sequence.name, trace, sequence.tokens, versions))
        if not sampled:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = torch.distributed.get_rank()
        for engine, sequences in (("rollout", sampled), ("training", trained)):
            file = self.folder / f"step_{step:07d}.{engine}.rank{rank:04d}.safetensors"
            write_traces(file, self.info, sequences)

    def _gather_routes(
        self, mini: MiniBatch, rollouts: Sequence[Rollout], indices: Sequence[int]
    ) -> dict[int, np.ndarray]:
        """Return the routes [T, L, K] of sequences, collected from the ranks of their routers."""
        if mini.first is None or mini.first.native_routes is None:
            raise TraceError("log.traces_every: the engine recorded no routes; expected them with every rollout")
        rows = torch.cat([routes.experts.cpu() for routes in mini.first.native_routes])
        lengths = [rollouts[index].num_tokens for index in indices]
        target = Placement.of_sequences(indices, lengths, self.shape.moe_layers)
        source = Placement.of_micro_batches(mini.micro_batches, self.layers)
        received = exchange(source, rows, target, distributed.model_group())
        experts = received.numpy().view(np.uint8 if received.dtype is torch.uint8 else np.uint16)
        return dict(zip(indices, np.split(experts, np.cumsum(lengths)[:-1]), strict=True)) if indices else {}
