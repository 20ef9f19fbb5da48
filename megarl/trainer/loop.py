"""Synchronous reinforcement learning: sample, judge, train, sync; evaluate and save now and then.

    for each step:  rollouts -> advantages -> [old, reference log-probabilities] -> N optimizer steps -> engine

The engine samples with the weights that the step begins with. With ``rollout.one_step_off``, it samples the responses
of the next step while this one trains, with the weights that this step begins with:

    for each step:  await rollouts -> engine gets the weights, begins the next rollouts -> train

Everything that is not in the checkpoint is a pure function of the configuration and the step. A run that is killed and
started again therefore continues as if nothing had happened. (The one exception: with ``one_step_off``, the first step
after the restart is sampled with its own weights.)
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.core.metrics import Stat, finalize
from megarl.core.objectives import try_functions
from megarl.megatron import distributed
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints.state import describe_layout
from megarl.megatron.config_errors import as_config_error
from megarl.megatron.policy import Policy, schedule_of
from megarl.models.fit import check_fit
from megarl.models.shapes import read_shape
from megarl.run import console
from megarl.run.audit import Audit
from megarl.run.folder import claim
from megarl.run.lock import RunLock
from megarl.run.metrics_log import MetricsLog
from megarl.run.progress import Monitor, StepProgress
from megarl.run.samples import SampleFile, pack
from megarl.run.stop_request import StopRequest
from megarl.run.vitals import Vitals
from megarl.trainer.engines import make_engine
from megarl.trainer.mini_batch import MiniBatch
from megarl.trainer.sampling.excerpts import complete
from megarl.trainer.sampling.gradient_norms import gradient_variance
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.saving import ERRORS_ON_ALL_RANKS, RunCheckpoints, record_ending
from megarl.trainer.step import TrainStep, collect
from megarl.trainer.token_advantages import Judged
from megarl.trainer.trace_dump import TraceDump


def train(config: Config) -> None:
    """Run the configuration to its last step, from its newest checkpoint if there is one; a collective call.

    StopError if it was asked to stop, PeerError if another rank is lost.
    """
    check_fit(config, read_shape(config.model.path))
    distributed.initialize(config)
    folder, rank, ranks = config.run_dir, dist.get_rank(), dist.get_world_size()
    with ExitStack() as held:
        # The launcher has a lock of its own. If this one is held under it, a killed trainer holds it for a moment.
        wait_s = 60.0 if "MEGARL_ATTEMPT" in os.environ else 0.0
        tell = StepProgress(enabled=distributed.is_main_rank()).line
        lock = RunLock(folder / "lock", tell, wait_s=wait_s)

        def lock_and_claim() -> None:
            held.enter_context(lock)
            claim(config, tell)

        distributed.from_main_rank(lock_and_claim)
        vitals = Vitals(folder, rank, ranks, steps=config.run.steps, hang_s=config.log.hang_s)
        stop = held.enter_context(StopRequest())
        vitals.lock, vitals.ask = lock, stop.ask
        with (
            vitals,
            record_ending(vitals, folder, rank, ranks),
            MetricsLog(folder, config.log.tensorboard, config.log.wandb_project, enabled=rank == 0) as log,
        ):
            Trainer(config, log, vitals, stop).run()
    distributed.shutdown()


class Trainer:
    """A run on this rank: policy, engine, sampler and log. ``_step`` is one step from top to bottom."""

    def __init__(self, config: Config, log: MetricsLog, vitals: Vitals, stop: StopRequest) -> None:
        self.config, self.log, self.vitals, self.stop = config, log, vitals, stop
        self.monitor = Monitor(config, log, vitals)
        self.audit = Audit(config.run_dir) if distributed.is_main_rank() else None
        self.texts = SampleFile(config.run_dir)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
        for line in console.header(config, read_shape(config.model.path), dist.get_world_size(), device):
            self.monitor.say(line)
        for warning in config.warnings:
            self.monitor.say(f"warning: {warning}")
        torch.use_deterministic_algorithms(config.run.deterministic, warn_only=True)
        objective = config.train.resolved_objective
        try_functions(objective, config.train.objective_function, torch.cuda.current_device(), config.train_size)
        self.policy = Policy(config, schedule_of(config))
        if self.policy.left_out:
            self.monitor.say(self.policy.left_out)
        self.engine = make_engine(config, self.monitor.say)
        self.train_step = TrainStep(config, self.policy, objective)
        self.tripwires = self.train_step.tripwires
        self.tripwires.say = self.monitor.say
        self.sampler = Sampler(config, self.engine, objective, self.train_step, self.monitor.watch(stop.check))
        self.traces = TraceDump(config.run_dir / "traces", self.policy) if config.log.traces_every else None
        self.checkpoints = RunCheckpoints(config, self.policy, stop, self._save, self.monitor.say)
        self._eval_is_due = False

    def run(self) -> None:
        """Run all remaining steps. The engine is closed however they end."""
        try:
            first = self._resume()
            self.vitals.begin(first)
            with self.checkpoints.save_on_failure(first):
                self._sync(first)
            if self._eval_is_due:
                self._evaluate(first)
            settings = self.config.megatron
            gc.collect()
            gc.freeze()  # what is there now stays, and looking through it again would take 3 % of a short step
            for step in range(first, self.config.run.steps):
                # Megatron rejects some settings only when it uses them: in the first step.
                is_new = settings and step == first
                with as_config_error("train", settings) if is_new else nullcontext():
                    self._step(step)
                self.checkpoints.poll()
                self.checkpoints.end_if_asked(step + 1)
            self.checkpoints.poll(wait=True)
            newest = self.checkpoints.newest()
            for line in console.ending(self.config, newest[1] if newest else None, first):
                self.monitor.say(line)
        finally:
            gc.unfreeze()
            self.checkpoints.saver.abandon()
            self.engine.close()
            self.sampler.close()

    def _step(self, step: int) -> None:
        """Run one global step. ``step`` counts from 0; records and checkpoints count finished steps, from 1."""
        started, done = time.perf_counter(), step + 1
        rollouts = self._sample(step)
        minis = self._prepare_batches(done, rollouts)
        self._run_passes(minis, rollouts.judged)
        num_micro_batches = sum(len(mini.micro_batches) for mini in minis)
        last_update: dict[str, float] = {}
        with self.monitor.phase("train"), self.monitor.progress.bar("training", num_micro_batches) as advance:
            for index, mini in enumerate(minis):
                # Replay, forward, coefficients, backward, optimizer step.
                following = minis[index + 1 :]
                statistics = collect([self.train_step.update(mini, self.monitor.watch(advance), following)])
                if statistics is not None:
                    last_update = finalize(statistics)
                    self.monitor.log_update(done, index, last_update)
        self._record_samples(done, rollouts, minis)
        self._eval_is_due = self._is_due(done, self.config.eval.every, at_end=bool(self.config.eval.every))
        statistics = collect([rollouts.metrics, *(mini.metrics for mini in minis)])
        with self.checkpoints.save_on_failure(done), self._log_step(done, started, statistics, last_update):
            self.tripwires.stop_if_bad()
            if not self.config.rollout.one_step_off:
                self._sync(done)
        is_best = self._eval_is_due and self._evaluate(done)
        if is_best or self._is_due(done, self.config.checkpoint.every, at_end=self.config.checkpoint.at_end):
            self._save(done)

    def _sample(self, step: int) -> StepRollouts:
        """Return the rollouts of a step, and with ``one_step_off`` begin those of the next one."""
        config, monitor = self.config, self.monitor
        # If sampling fails, the checkpoint that follows must hold the sampler's state from before this step.
        with self.checkpoints.save_on_failure(step, self.sampler.state_dict()):
            per_rank = -(-config.responses_per_step // dist.get_world_size())
            with monitor.phase("rollout"), monitor.progress.bar("rollout", per_rank) as advance:
                rollouts = self.sampler.sample_step(step, monitor.watch(advance, self.stop.check))
            self.checkpoints.raise_if_asked()
            if config.rollout.one_step_off and step + 1 < config.run.steps:
                self._sync(step)
                self.sampler.begin_step(step + 1)
        if rollouts.unjudged:
            monitor.say(f"step {step + 1}: {rollouts.unjudged}")
        monitor.unjudged = rollouts.unjudged
        if config.sglang.release_memory:
            with monitor.phase("hand_over"):
                self.engine.rest()
                self.policy.reload()
        return rollouts

    def _prepare_batches(self, done: int, rollouts: StepRollouts) -> list[MiniBatch]:
        """Pack each mini-batch, split it into micro-batches, and fetch the routes that this rank replays."""
        with self.monitor.phase("prepare"):
            parts = zip(rollouts.mini_batches, rollouts.advantages, strict=True)
            if self._is_due(done, self.config.log.variance_every, at_end=False):
                rollouts.metrics.update(gradient_variance(self.train_step, rollouts))
            minis = [self.train_step.prepare(of_mini, advantages) for of_mini, advantages in parts]
        keep_routes = self.config.log.writes_traces(done)
        if not keep_routes:
            for part in rollouts.mini_batches:
                part.clear()  # frees the routes, of which every rank has its rows
        self.train_step.keeps_native_routes = keep_routes
        self.train_step.measures_objective = self._is_due(done, self.config.log.objective_every, at_end=True)
        self.train_step.measures_replay_bias = self._is_due(done, self.config.train.replay_bias_every, at_end=False)
        return minis

    def _run_passes(self, minis: list[MiniBatch], judged: Judged) -> None:
        """Run the passes that the objective needs before the first update: old and reference log-probabilities.

        If the old-log-prob pass leaves out the first mini-batch, tripwires judge the step in the update of that one.
        """
        if passed := self.train_step.old_pass_over(minis):
            with self.monitor.phase("old_logprobs"):
                for mini in passed:
                    self.train_step.old_logprobs(mini)
                if len(passed) == len(minis):
                    self.tripwires.judge(minis)
        if self.train_step.reference is not None:
            with self.monitor.phase("ref_logprobs"):
                for mini in minis:
                    self.train_step.ref_logprobs(mini)
        if self.train_step.needs_token_advantages:
            with self.monitor.phase("advantages"):
                self.train_step.token_advantages(minis, judged)

    def _record_samples(self, done: int, rollouts: StepRollouts, minis: list[MiniBatch]) -> None:
        """Write the routes of a step if they are wanted, and which samples it trained on."""
        if self.traces is not None and self.train_step.keeps_native_routes:
            self.traces.write(done, rollouts.mini_batches, minis)
        reasons = {} if self.tripwires.verdict is None else self.tripwires.verdict.reasons()
        self._store_texts(done, rollouts, minis, reasons)
        if self.audit is not None:
            versions = [micro.batch.weight_versions for mini in minis for micro in mini.micro_batches]
            oldest = min(int(of_micro.min()) for of_micro in versions if of_micro is not None)
            dropped = {(rollouts.first_prompt + prompt, sample): why for (prompt, sample), why in reasons.items()}
            self.audit.record_step(done, oldest, rollouts.trained, dropped)

    def _store_texts(
        self, done: int, rollouts: StepRollouts, minis: list[MiniBatch], reasons: dict[tuple[int, int], str]
    ) -> None:
        """Store what the model wrote. Each rank decodes and packs its own, and the main rank writes.

        Others have some only if it is all, or if one has the sample whose failure is told.
        """
        if not (count := self.config.log.samples_per_step):
            return
        gaps = [mini.gaps for mini in minis if distributed.holds_outputs()]
        gaps = gaps if self.tripwires.verdict is None else [self.tripwires.verdict.gaps]  # of all ranks
        found = rollouts.excerpts, done, dist.get_rank(), rollouts.first_prompt, rollouts.trained, gaps, reasons
        packed = pack(complete(*found))
        parts = distributed.gather_on_main_rank(packed) if count == "all" or rollouts.unjudged else [packed]
        if self.audit is not None and parts:
            self.texts.append(b"".join(parts))

    @contextmanager
    def _log_step(
        self, done: int, started: float, statistics: dict[str, Stat] | None, last_update: dict[str, float]
    ) -> Iterator[None]:
        """Log the step after the block, also if it fails: the checkpoint that is then saved contains the step."""
        try:
            yield
        except ERRORS_ON_ALL_RANKS:
            self.monitor.log_step(done, time.perf_counter() - started, statistics, last_update)
            raise
        self.monitor.log_step(done, time.perf_counter() - started, statistics, last_update)

    def _sync(self, version: int) -> None:
        """Send the weights after ``version`` steps to the engine, unless it has them. The engine must be idle."""
        if self.engine.weight_version == version:
            return
        with self.monitor.phase("sync"):
            if self.config.sglang.release_memory:
                self.policy.offload()
            self.engine.update_weights(self.policy.export(self.engine.receives_weights), version=version)
        self.monitor.seconds |= {f"sync_{part}": seconds for part, seconds in self.engine.sync_seconds.items()}

    def _evaluate(self, done: int) -> bool:
        """Evaluate on all benchmarks after ``done`` steps; return whether the step is the best so far, to be saved."""
        total = sum(len(of.prompts) for of in self.sampler.benchmarks.values()) * self.config.eval.samples
        per_rank = -(-total // dist.get_world_size())
        with self.checkpoints.save_on_failure(done):
            self.sampler.settle()
            self.checkpoints.raise_if_asked()
            self._sync(done)
            started = time.perf_counter()
            with self.vitals.phase("evaluate"), self.monitor.progress.bar("evaluate", per_rank) as advance:
                metrics, unjudged = self.sampler.evaluate(self.monitor.watch(advance, self.stop.check))
            self.checkpoints.raise_if_asked()
        self._eval_is_due = False
        seconds = time.perf_counter() - started
        self.log.write("eval", done, metrics | {"time/eval_s": seconds}, unjudged=unjudged)
        names = [name for name in self.sampler.benchmarks if f"eval/{name}/pass_rate" in metrics]
        each = "".join(f"{name} {metrics[f'eval/{name}/pass_rate']:.1%}, " for name in names)
        self.monitor.say(
            f"held-out after step {done}: pass rate {metrics['eval/pass_rate']:.1%} of {total} responses, "
            f"{each}{seconds:.1f} s" + (f"; {unjudged}" if unjudged else "")
        )
        return self.checkpoints.is_best(done)

    def _resume(self) -> int:
        """Load the newest checkpoint, if there is one; return the number of finished steps."""
        newest = None
        if self.config.checkpoint.resume:
            with self.monitor.phase("verify"):
                newest = self.checkpoints.newest_intact()
        if newest is None:
            self.log.truncate_after(-1)
            self._eval_is_due = bool(self.config.eval.every)
            if self.audit is not None:
                self.audit.record_resume(0)
                self.texts.truncate_after(0)
            return 0
        with self.monitor.phase("load"):
            state = checkpoint.load(newest[1], self.policy)
        done = int(state["step"])
        self._eval_is_due = bool(state.get("eval_is_due"))
        self.sampler.load_state_dict(state.get("sampler", {}))
        self.tripwires.state |= state.get("tripwires", {})  # of an earlier megarl: learn again
        if self.audit is not None:
            self.audit.record_resume(done)
            self.texts.truncate_after(done)
        dropped = self.log.truncate_after(done, evaluated=not self._eval_is_due)
        self.monitor.recall()
        self.monitor.say(f"resumed from {newest[1]} after step {done}; dropped {dropped} later records")
        if change := self.policy.describe_schedule_change(state["scheduler"]):
            self.monitor.say(f"warning: {change}")
        if state["layout"] != (layout := describe_layout(self.policy)):
            self.monitor.say(f"the layout was {state['layout']} and is {layout}; random generators begin with run.seed")
        return done

    def _save(self, done: int, sampling: dict[str, Any] | None = None) -> None:
        """Save a checkpoint after ``done`` steps. ``sampling``: see ``RunCheckpoints.save_on_failure``."""
        self.log.sync()  # the records of these steps must be on disk before the checkpoint is
        with self.monitor.phase("checkpoint"):
            state = self.sampler.state_dict() if sampling is None else sampling
            own = {"tripwires": dict(self.tripwires.state), "eval_is_due": self._eval_is_due}
            self.checkpoints.save(done, {"sampler": state, **own})

    def _is_due(self, done: int, every: int, *, at_end: bool) -> bool:
        return (at_end and done == self.config.run.steps) or bool(every and done % every == 0)
