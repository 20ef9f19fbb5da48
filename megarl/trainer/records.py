"""What a run records of its samples: trained samples (samples.jsonl), texts, and routes."""

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from megarl.config import Config
from megarl.megatron import distributed
from megarl.megatron.policy import Policy
from megarl.run.audit import Audit
from megarl.run.samples import SampleFile, pack
from megarl.trainer.mini_batch import MiniBatch
from megarl.trainer.sampling.excerpts import complete
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.step_plan import StepPlan
from megarl.trainer.trace_dump import TraceDump
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
