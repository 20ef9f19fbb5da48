"""Synchronous reinforcement learning: sample, judge, train, sync; evaluate and save now and then.

    for each step:  rollouts -> advantages -> [old, reference log-probabilities] -> N optimizer steps -> engine

The engine samples with the weights that the step begins with. With ``rollout.one_step_off``, the engine samples the
responses of the next step during training, with the weights of the step's begin:

    for each step:  await rollouts -> engine gets the weights, begins the next rollouts -> train

Everything outside the checkpoint is a pure function of the configuration and the step. A killed and restarted run
therefore continues without a trace of the restart. (The exception: with ``one_step_off``, the first step after the
restart is sampled with its own weights.)
"""

import os
import time
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.core.metrics import finalize
from megarl.core.objectives import try_functions
from megarl.megatron import distributed
from megarl.megatron.policy import Policy, schedule_of
from megarl.megatron.versions import as_config_error
from megarl.models.fit import check_fit
from megarl.models.shapes import read_shape
from megarl.run import progress as shown
from megarl.run.folder import claim, read_run_id
from megarl.run.lock import RunLock
from megarl.run.metrics_log import MetricsLog
from megarl.run.stop_request import StopRequest
from megarl.run.vitals import Vitals
from megarl.trainer.engines import make_engine
from megarl.trainer.mini_batch import MiniBatch, StepPlan
from megarl.trainer.records import Monitor, SampleRecords
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.trainer.saving import RunCheckpoints, record_ending
from megarl.trainer.step import TrainStep


def train(config: Config) -> None:
    """Run the configuration to the last step, from the newest checkpoint if any; a collective call.

    StopError if the run was asked to stop, PeerError if another rank is lost.
    """
    check_fit(config, read_shape(config.model.path))
    distributed.initialize(config)
    folder, rank, ranks = config.run_dir, dist.get_rank(), dist.get_world_size()
    with ExitStack() as stack:
        # Under a launcher, a killed trainer may hold the lock for a moment.
        wait_s = 60.0 if "MEGARL_ATTEMPT" in os.environ else 0.0
        lock = RunLock(folder / "lock", shown.StepProgress(enabled=distributed.is_main_rank()).line, wait_s=wait_s)

        def lock_and_claim() -> None:
            stack.enter_context(lock)
            claim(config)

        distributed.from_main_rank(lock_and_claim)
        vitals = Vitals(folder, rank, ranks, steps=config.run.steps, hang_s=config.log.hang_s)
        stop = stack.enter_context(StopRequest())
        vitals.lock, vitals.ask = lock, stop.ask
        with vitals, record_ending(vitals, folder, rank, ranks), MetricsLog(folder, enabled=rank == 0) as log:
            Trainer(config, log, vitals, stop).run()
    distributed.shutdown()


class Trainer:
    """A run on this rank: policy, engine, sampler and log. ``_step`` is one step from top to bottom."""

    def __init__(self, config: Config, log: MetricsLog, vitals: Vitals, stop: StopRequest) -> None:
        self.config, self.log, self.vitals, self.stop = config, log, vitals, stop
        self.monitor = Monitor(config, log, vitals)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
        for line in shown.header(config, read_shape(config.model.path), dist.get_world_size(), device):
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
        self.tripwires.say = self.monitor.feed.note
        self.sampler = Sampler(config, self.engine, objective, self.train_step, self.monitor.watch(stop.check))
        for warning in self.sampler.warnings:
            self.monitor.say(f"warning: {warning}")
        self.records = SampleRecords(config, self.policy, self.monitor.feed)
        self.checkpoints = RunCheckpoints(config, self.policy, self.sampler, self.tripwires, self.monitor, stop)

    def run(self) -> None:
        """Run all remaining steps. The engine is closed however they end."""
        with self.monitor.feed:
            try:
                first = self._resume()
                self.vitals.begin(first)
                with self.checkpoints.save_on_failure(first):
                    self._sync(first)
                if self.checkpoints.eval_is_due:
                    self._evaluate(first)
                settings = self.config.megatron
                for step in range(first, self.config.run.steps):
                    # Megatron rejects a few settings on first use: in the first step.
                    with as_config_error("train", settings) if settings and step == first else nullcontext():
                        self._step(step)
                    self.checkpoints.poll()
                    self.checkpoints.end_if_asked(step + 1)
                self.checkpoints.poll(wait=True)
                latest = self.checkpoints.newest()
                for line in shown.ending(self.config, latest[1] if latest else None, first):
                    self.monitor.say(line)
            finally:
                self.checkpoints.saver.abandon()
                self.engine.close()
                self.sampler.close()

    def _step(self, step: int) -> None:
        """Run one global step. ``step`` counts from 0; records and checkpoints count finished steps, from 1.

        Shapes: N sequences, T packed tokens of a micro-batch, L MoE layers, K experts of a token.
        """
        started, done = time.perf_counter(), step + 1
        plan = StepPlan.of(self.config, done)
        rollouts = self._sample(step)  # N responses: tokens, mu [T], routes [T, L, K], rewards [N], advantages
        minis = self._prepare(plan, rollouts)  # packed columns [T], split into micro-batches
        minis = self.train_step.look(plan, minis, rollouts.judged, self.monitor.phase)  # pi_old, pi_ref [T]
        last_update = dict[str, float]()
        with self.monitor.phase("train"):
            for index in range(len(minis)):
                # Replay, forward, coefficients [T], backward, optimizer step.
                minis, measured = self.train_step.update(plan, minis, index, rollouts.judged, self.monitor.watch())
                if (statistics := distributed.collect([measured])) is not None:
                    last_update = finalize(statistics)
                    self.monitor.log_update(done, index, last_update)
        self.records.write(done, plan, rollouts, minis, self.tripwires.verdict)
        self.checkpoints.eval_is_due = plan.evaluates
        statistics = distributed.collect([rollouts.metrics, *(mini.statistics for mini in minis)])
        with self.checkpoints.save_on_failure(done):
            try:
                self.tripwires.stop_if_bad()
                if not self.config.rollout.one_step_off:
                    self._sync(done)
            finally:  # a checkpoint of the failure contains the step
                self.monitor.log_step(done, time.perf_counter() - started, statistics, last_update)
        if plan.evaluates:
            self._evaluate(done)
        if plan.saves:
            self.checkpoints.save(done)

    def _sample(self, step: int) -> StepRollouts:
        """Return the rollouts of a step, and with ``one_step_off`` begin those of the next step."""
        config, monitor = self.config, self.monitor
        # If sampling fails, the following checkpoint must hold the sampler's state before the step.
        with self.checkpoints.save_on_failure(step, self.sampler.state_dict()):
            with monitor.phase("rollout"):
                rollouts = self.sampler.sample_step(step)
            self.checkpoints.raise_if_asked()
            if config.rollout.one_step_off and step + 1 < config.run.steps:
                self._sync(step)
                self.sampler.begin_step(step + 1)
            if config.rollout.max_staleness and config.rollout.engine_kind.server and step + 1 < config.run.steps:
                self.sampler.go_on(step)
        if rollouts.unjudged:
            monitor.feed.note(f"step {step + 1}: {rollouts.unjudged}")
        monitor.unjudged = rollouts.unjudged
        if config.sglang.release_memory:
            with monitor.phase("hand_over"):
                self.engine.rest()
                self.policy.reload()
        return rollouts

    def _prepare(self, plan: StepPlan, rollouts: StepRollouts) -> list[MiniBatch]:
        """Pack each mini-batch, split the tokens into micro-batches, and fetch the rank's routes."""
        with self.monitor.phase("prepare"):
            pairs = zip(rollouts.mini_batches, rollouts.advantages, strict=True)
            minis = [self.train_step.prepare(of_mini, advantages) for of_mini, advantages in pairs]
        if not plan.writes_traces:
            for of_mini in rollouts.mini_batches:
                of_mini.clear()  # frees the routes: every rank has its rows
        return minis

    def _sync(self, version: int) -> None:
        """Send the weights after ``version`` steps to the engine, if it has older weights. The engine must be idle."""
        if self.engine.weight_version == version:
            return
        self.sampler.settle()
        with self.monitor.phase("sync"):
            if self.config.sglang.release_memory:
                self.policy.offload()
            self.engine.update_weights(self.policy.export(self.engine.receives_weights), version=version)

    def _evaluate(self, done: int) -> None:
        """Evaluate on all benchmarks after ``done`` steps."""
        total = sum(len(benchmark.prompts) for benchmark in self.sampler.benchmarks.values()) * self.config.eval.samples
        with self.checkpoints.save_on_failure(done):
            self.sampler.settle()
            self.checkpoints.raise_if_asked()
            self._sync(done)
            started = time.perf_counter()
            with self.vitals.phase("evaluate"):
                metrics, unjudged = self.sampler.evaluate()
            self.checkpoints.raise_if_asked()
        self.checkpoints.eval_is_due = False
        seconds = time.perf_counter() - started
        self.monitor.log_evaluation(done, metrics | {"time/eval_s": seconds}, unjudged)
        self.monitor.say(
            f"held-out after step {done}: pass rate {metrics['eval/pass_rate']:.1%} of {total} responses, "
            f"{seconds:.1f} s" + (f"; {unjudged}" if unjudged else "")
        )

    def _resume(self) -> int:
        """Load the newest checkpoint, if any; return the number of finished steps."""
        done = self.checkpoints.resume() if self.config.checkpoint.resume else None
        if done is None:
            self.checkpoints.eval_is_due = bool(self.config.eval.every)
            self.log.truncate_after(-1)
        else:
            self.monitor.recall()
        self.records.resume(done or 0)
        self.monitor.feed.begin(read_run_id(self.config.run_dir), done or 0, evaluated=not self.checkpoints.eval_is_due)
        return done or 0
