"""Synchronous reinforcement learning: sample, judge, train, sync; evaluate and checkpoint now and then.

    for each step:  rollouts -> advantages -> [old, reference log-probabilities] -> N optimizer steps -> engine

The engine samples with the weights that the step begins with. With ``rollout.one_step_off`` it samples the next step's
responses while this one is trained, with the weights that this step begins with:

    for each step:  await rollouts -> engine gets the weights, begins the next rollouts -> train

All state that is not in the checkpoint is a pure function of the configuration and the step, so a run that is killed
and started again continues as if nothing happened, but for one step whose responses are then not one step off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.core.metrics import Stat, finalize
from megarl.errors import RolloutError, SaveError, StopError, WeightSyncError
from megarl.megatron import distributed
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints.background_saver import BackgroundSaver
from megarl.megatron.config_errors import as_config_error
from megarl.megatron.policy import Policy, schedule_of
from megarl.run.audit import Audit
from megarl.run.folder import checkpoint_folder, claim
from megarl.run.lock import RunLock
from megarl.run.metrics_log import MetricsLog
from megarl.run.progress import Advance, StepProgress
from megarl.run.reporting import reported
from megarl.run.stop_request import StopRequest
from megarl.run.vitals import Vitals
from megarl.train.engines import make_engine
from megarl.train.sampling.sampler import Sampler
from megarl.train.step import MiniBatch, TrainStep, collect
from megarl.train.token_advantages import Judged
from megarl.train.trace_dump import TraceDump


def train(config: Config) -> None:
    """Run the configuration to its last step, from its newest checkpoint if there is one; a collective call.

    StopError if it was asked to stop, PeerError if another rank is lost.
    """
    distributed.initialize(config)
    folder, rank, ranks = config.run_dir, dist.get_rank(), dist.get_world_size()
    with ExitStack() as held:
        # Under the launcher, which has a lock of its own, the holder is what a killed trainer has left for a moment.
        wait_s = 60.0 if "MEGARL_ATTEMPT" in os.environ else 0.0
        lock = RunLock(folder / "lock", StepProgress(enabled=_main()).line, wait_s=wait_s)

        def begin() -> None:
            held.enter_context(lock)
            claim(config)

        distributed.from_main_rank(begin)
        vitals = Vitals(folder, rank, ranks, steps=config.run.steps, hang_s=config.log.hang_s)
        vitals.keep(lock)
        stop = held.enter_context(StopRequest())
        vitals.listen(stop.ask)
        with vitals, reported(vitals, folder, rank, ranks), _log(config) as log:
            Trainer(config, log, vitals, stop).run()
    distributed.shutdown()


class Trainer:
    """A run on this rank: policy, engine, sampler and log."""

    def __init__(self, config: Config, log: MetricsLog | _NoLog, vitals: Vitals, stop: StopRequest) -> None:
        self.config = config
        self.log = log
        self.vitals = vitals
        self.stop = stop
        self.audit = Audit(config.run_dir) if _main() else None
        self.progress = StepProgress(enabled=_main())
        self.objective = config.train.resolved_objective
        for warning in config.warnings:
            self.progress.line(f"warning: {warning}")
        torch.use_deterministic_algorithms(config.run.deterministic, warn_only=True)
        self.policy = Policy(config, schedule_of(config))
        self.engine = make_engine(config, self.progress.line)
        self.train_step = TrainStep(config, self.policy, self.objective)
        waits = stop.checking(self._moving(lambda count: None))
        self.sampler = Sampler(config, self.engine, self.objective, self.train_step, waits)
        self.traces = TraceDump(config.run_dir / "traces", self.policy) if config.log.traces_every else None
        self.saver = BackgroundSaver(checkpoint_folder(config), config.checkpoint.keep)
        self.seconds: dict[str, float] = {}
        self._eval_is_due = False

    def run(self) -> None:
        """All remaining steps; the engine is closed however they end."""
        try:
            self._run()
        finally:
            self.saver.abandon()
            self.engine.close()
            self.sampler.close()

    def _run(self) -> None:
        config = self.config
        first = self._resume()
        self.vitals.begin(first)
        with self._saved_if_it_fails(first):
            self._sync(first)
        if self._eval_is_due:
            self._evaluate(first)
        for step in range(first, config.run.steps):
            # Some settings are only found out when they are used.
            with as_config_error("train", config.megatron) if step == first and config.megatron else nullcontext():
                self._step(step)
            self._poll_saver()
            self._end_if_asked(step + 1)
        self._poll_saver(wait=True)

    def _resume(self) -> int:
        """Load the newest checkpoint; returns the number of steps that are done."""
        # Asked for on one rank: file systems may show different folders to different nodes for a while.
        found = distributed.from_main_rank(lambda: checkpoint.complete_checkpoints(checkpoint_folder(self.config)))
        if not found or not self.config.checkpoint.resume:
            self.log.truncate_after(-1)
            self._eval_is_due = bool(self.config.eval.every)
            if self.audit is not None:
                self.audit.resumed(0)
            return 0
        with self._timed("load"):
            state = checkpoint.load(found[-1][1], self.policy)
        done = int(state["step"])
        self._eval_is_due = bool(state.get("eval_is_due"))
        self.sampler.load_state_dict(state.get("sampler", {}))
        if self.audit is not None:
            self.audit.resumed(done)
        dropped = self.log.truncate_after(done)
        self.progress.line(f"resumed from {found[-1][1]} after step {done}; dropped {dropped} later records")
        return done

    def _step(self, step: int) -> None:
        """One global step; ``step`` counts from 0, records and checkpoints count finished steps from 1."""
        started = time.perf_counter()
        config = self.config
        begins_next = config.rollout.one_step_off and step + 1 < config.run.steps
        # What a checkpoint of the steps before this one is to say, should this one not be trained.
        sampling = self.sampler.state_dict()
        try:
            with self._timed("rollout"), self.progress.rollout(self._responses_per_rank()) as advance:
                drawn = self.sampler.sample_step(step, self.stop.checking(self._moving(advance)))
            self._drop_if_asked()
            if begins_next:
                self._sync(step)
                self.sampler.begin_step(step + 1)
        except _TOLD_TO_ALL:
            self._save_before_the_end(step, sampling)
            raise
        if drawn.first_error:
            self.progress.line(f"step {step + 1}: responses without a reward, first: {drawn.first_error}")
        if config.sglang.release_memory:
            with self._timed("hand_over"):
                self.engine.rest()
                self.policy.reload()
        with self._timed("prepare"):
            minis = [
                self.train_step.prepare(rollouts, advantages)
                for rollouts, advantages in zip(drawn.mini_batches, drawn.advantages, strict=True)
            ]
        dumps = self.traces is not None and (step + 1) % config.log.traces_every == 0
        if not dumps:
            drawn.drop_routes()
        self.train_step.keeps_native_routes = dumps
        self._passes_before_updates(minis, drawn.judged)
        metrics: dict[str, float] = {}
        with self._timed("train"), self.progress.training(sum(len(m.micro_batches) for m in minis)) as advance:
            for index, mini in enumerate(minis):
                collected = collect([self.train_step.update(mini, self._moving(advance))])
                if collected is not None:
                    metrics = finalize(collected)
                    self.log.write("minibatch", step + 1, metrics, minibatch=index)
        if dumps and self.traces is not None:
            self.traces.write(step + 1, drawn.mini_batches, minis)
        if self.audit is not None:
            self.audit.trained(step + 1, drawn.weights, drawn.trained)
        last = step + 1 == config.run.steps
        self._eval_is_due = bool(config.eval.every) and ((step + 1) % config.eval.every == 0 or last)
        statistics = collect([drawn.metrics, *(mini.metrics for mini in minis)])

        def finish() -> None:
            self._finish_step(step + 1, time.perf_counter() - started, statistics, metrics)
            self.vitals.finished_step(step + 1)

        try:
            if not config.rollout.one_step_off:
                self._sync(step + 1)
        except _TOLD_TO_ALL:
            finish()  # its record belongs to what is saved
            self._save_before_the_end(step + 1)
            raise
        finish()
        if self._eval_is_due:
            self._evaluate(step + 1)
        every = config.checkpoint.every
        if (last and config.checkpoint.at_end) or (every and (step + 1) % every == 0):
            self._checkpoint(step + 1)

    def _sync(self, version: int) -> None:
        """Give the engine the weights that have seen so many steps, unless it has them; it must be at rest."""
        if self.engine.weight_version == version:
            return
        with self._timed("sync"):
            if self.config.sglang.release_memory:
                self.policy.offload()
            self.engine.update_weights(self.policy.export(), version=version)
        self.seconds |= {f"sync_{part}": seconds for part, seconds in self.engine.sync_seconds.items()}

    def _checkpoint(self, done: int, sampling: dict[str, Any] | None = None) -> None:
        """``sampling``: the sampler's state after that step; None if that is the present one."""
        self.log.sync()
        with self._timed("checkpoint"):
            state = {
                "sampler": self.sampler.state_dict() if sampling is None else sampling,
                "eval_is_due": self._eval_is_due,
            }
            if self.config.checkpoint.asynchronous:
                self._poll_saver(wait=True)
                self.saver.begin(done, self.policy, state)
            else:
                folder, keep = checkpoint_folder(self.config), self.config.checkpoint.keep
                self._tell_saved(checkpoint.save(folder, done, self.policy, state, keep))

    def _poll_saver(self, *, wait: bool = False) -> None:
        self._tell_saved(self.saver.poll(wait=wait))

    def _tell_saved(self, path: Path | None) -> None:
        if path is not None:
            self.progress.line(f"saved {path}")

    @contextmanager
    def _saved_if_it_fails(self, done: int) -> Iterator[None]:
        try:
            yield
        except _TOLD_TO_ALL:
            self._save_before_the_end(done)
            raise

    def _save_before_the_end(self, done: int, sampling: dict[str, Any] | None = None) -> None:
        """Keep the steps that are done when the engine cannot go on; StopError if that is because of a request."""
        asked = self.stop.agreed()
        try:
            self._poll_saver(wait=True)
        except SaveError as error:
            if not error.on_all_ranks:
                raise
            self.progress.line(f"warning: {error}")  # there may be room again
        wanted = asked or self.config.checkpoint.every or self.config.checkpoint.at_end
        if wanted and not self._saved(done):
            self._checkpoint(done, sampling)
            self._poll_saver(wait=True)
        kept = f"step {done} is saved in {checkpoint_folder(self.config)}" if done else "no step was finished"
        if asked:
            raise StopError(f"asked to stop; {kept}, start the run again to continue")
        if wanted:
            self.progress.line(f"the engine cannot go on; {kept}, start the run again to continue")

    def _end_if_asked(self, done: int) -> None:
        if done < self.config.run.steps and self.stop.agreed():
            self._save_before_the_end(done)

    def _drop_if_asked(self) -> None:
        """What was drawn while the run was asked to stop is drawn again: the signal may have hit reward workers too."""
        if self.stop.agreed():
            raise StopError("asked to stop")

    def _saved(self, done: int) -> bool:
        found = distributed.from_main_rank(lambda: checkpoint.complete_checkpoints(checkpoint_folder(self.config)))
        return done == 0 or bool(found and int(found[-1][0]) >= done)

    def _passes_before_updates(self, minis: list[MiniBatch], judged: Judged) -> None:
        """What the objective needs to know of the weights before the step's updates, and of the reference's."""
        if self.train_step.needs_old_pass:
            with self._timed("old_logprobs"):
                for mini in minis:
                    self.train_step.old_logprobs(mini)
        if self.train_step.reference is not None:
            with self._timed("ref_logprobs"):
                for mini in minis:
                    self.train_step.ref_logprobs(mini)
        if self.train_step.needs_token_advantages:
            with self._timed("advantages"):
                self.train_step.token_advantages(minis, judged)

    def _finish_step(
        self, done: int, step_s: float, statistics: dict[str, Stat] | None, last_mini_batch: dict[str, float]
    ) -> None:
        if statistics is None:
            return
        metrics = finalize(statistics)
        metrics |= {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        metrics |= {"time/step_s": step_s, "speed/tokens_per_s": metrics["sampling/tokens"] / step_s}
        self.seconds = {}  # what comes after the record of a step, a checkpoint, is told by the next one
        self.log.write("step", done, metrics)
        self.vitals.status.tokens_per_s = metrics["speed/tokens_per_s"]
        shown = {name: last_mini_batch[name] for name in ("loss", "grad_norm") if name in last_mini_batch}
        self.progress.step_line(done, self.config.run.steps, metrics | shown)

    def _evaluate(self, done: int) -> None:
        total = len(self.sampler.heldout) * self.config.eval.samples
        with self._saved_if_it_fails(done):
            self.sampler.settle()
            self._drop_if_asked()
            self._sync(done)
            started = time.perf_counter()
            with (
                self.vitals.phase("evaluate"),
                self.progress.bar("evaluate", -(-total // dist.get_world_size())) as advance,
            ):
                metrics = self.sampler.evaluate(done, self.stop.checking(self._moving(advance)))
            self._drop_if_asked()
        self._eval_is_due = False
        seconds = time.perf_counter() - started
        self.log.write("eval", done, metrics | {"time/eval_s": seconds})
        self.progress.line(
            f"held-out after step {done}: pass rate {metrics['eval/pass_rate']:.1%} of {total} responses, "
            f"{seconds:.1f} s"
        )

    def _responses_per_rank(self) -> int:
        return -(-self.config.responses_per_step // dist.get_world_size())

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.vitals.phase(phase):
            yield
        self.seconds[phase] = time.perf_counter() - started

    def _moving(self, advance: Advance) -> Advance:
        def moved(count: int) -> None:
            if count:
                self.vitals.move()
            advance(count)

        return moved


_TOLD_TO_ALL = (RolloutError, WeightSyncError, StopError)
"""Errors that all ranks have, if one has them."""


def _log(config: Config) -> MetricsLog | _NoLog:
    return MetricsLog(config.run_dir, config.log.tensorboard, config.log.wandb_project) if _main() else _NoLog()


class _NoLog:
    """Stands for the metrics log on ranks that do not write it."""

    def __enter__(self) -> _NoLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, *_: object, **__: object) -> None:
        pass

    def sync(self) -> None:
        pass

    def truncate_after(self, _: int) -> int:
        return 0


def _main() -> bool:
    return distributed.is_main_rank()
