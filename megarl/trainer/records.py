"""What a run reports: lines, metrics and signs of life; trained samples (samples.jsonl), texts, and routes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.core.metrics import Stat, finalize
from megarl.core.types import Rollout
from megarl.errors import DataError, TraceError
from megarl.files.texts import read_table
from megarl.megatron import distributed
from megarl.megatron.policy import Policy
from megarl.megatron.rollout_routes import Placement, exchange
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, from_rollout, write_traces
from megarl.run import samples
from megarl.run.feed import Feed
from megarl.run.metrics_log import UNJUDGED, MetricsLog, describe_judged, iterate_metrics
from megarl.run.progress import Advance, StepProgress
from megarl.run.status import LEVELS
from megarl.run.vitals import Vitals
from megarl.trainer.mini_batch import MiniBatch, StepPlan
from megarl.trainer.sampling.excerpts import complete
from megarl.trainer.sampling.step_rollouts import StepRollouts
from megarl.watch.health import Health
from megarl.watch.tripwires import Drops


class SampleRecords:
    """Writes the records of a run. The main rank writes samples.jsonl and texts, every rank the traces it sampled."""

    def __init__(self, config: Config, policy: Policy, feed: Feed) -> None:
        self._feed, self._is_main, self._count = feed, distributed.is_main_rank(), config.log.samples_per_step
        self._folder = config.run_dir
        self._traces = TraceDump(config.run_dir / "traces", policy) if config.log.traces_every else None

    def resume(self, done: int) -> None:
        """Undo the records of steps after ``done``."""
        if self._is_main:
            samples.record_resume(self._folder, done)
            samples.truncate_after(self._folder, done)

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
            # Besides the main rank, ranks have texts only if all are stored, or after a failed reward.
            place = dist.get_rank(), rollouts.places
            self._feed.samples = complete(rollouts.excerpts, done, *place, rollouts.trained, gaps, reasons)
            packed = samples.pack(self._feed.samples)
            members = distributed.gather_on_main_rank(packed) if self._count == "all" or rollouts.unjudged else [packed]
            if self._is_main and members:
                samples.append(self._folder, b"".join(members))
        versions = [micro.batch.weight_versions for mini in minis for micro in mini.micro_batches]
        oldest = -distributed.largest(-min(int(of_micro.min()) for of_micro in versions if of_micro is not None))
        if self._is_main:
            places = rollouts.places.tolist()
            dropped = {(places[prompt], sample): reason for (prompt, sample), reason in reasons.items()}
            samples.record_step(self._folder, done, oldest, rollouts.trained, dropped)


class TraceDump:
    """Writes the routes of steps to files: the engine's routes, and the choice of the training routers.

    ``megarl trace diff`` on the two files shows where the engines disagree, layer by layer. Each rank writes its
    sampled sequences.
    """

    def __init__(self, folder: Path, policy: Policy) -> None:
        assert policy.replay is not None, "check_fit refuses settings that bypass the replay hook"
        self.folder, self.layers, self.shape = folder, policy.replay.layers, (shape := policy.shape)
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
            write_traces(self.folder / f"step_{step:07d}.{engine}.rank{rank:04d}.safetensors", self.info, sequences)

    def _gather_routes(self, mini: MiniBatch, rollouts: Sequence[Rollout], indices: list[int]) -> dict[int, np.ndarray]:
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


_LINE: dict[str, str] = read_table(__file__)
"""The parts of a step's line, in order."""


def format_step(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """The line of one step, e.g. ``step  7/60  reward 0.523  pass 52.3%  k3 1.2e-04  time 2.1 s``."""
    texts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    values = {**metrics, "reward/judged": describe_judged(metrics)}
    texts += [text.format(values[name]) for name, text in _LINE.items() if name in metrics]
    return "  ".join(filter(None, texts))


class Monitor:
    """Reports phases, progress and metrics of one rank."""

    def __init__(self, config: Config, log: MetricsLog, vitals: Vitals) -> None:
        self.log, self.vitals = log, vitals
        self.progress = StepProgress(enabled=distributed.is_main_rank())
        self.say: Callable[[str], None] = self.progress.line
        self.feed = Feed(config, self.say, enabled=distributed.is_main_rank())
        self._num_steps = config.run.steps
        self._health = Health(config.health)
        self.unjudged: str | None = None
        """How many responses of the step have a reward, and the first failure; None if all have one."""
        self.seconds: dict[str, float] = {}
        """Of each phase since the last record of a step."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, and show it in ``megarl status``."""
        started = time.perf_counter()
        with self.vitals.phase(name):
            yield
        self.seconds[name] = time.perf_counter() - started

    def watch(self, *advances: Advance) -> Advance:
        """Return a function that calls all ``advances`` and reports progress."""

        def watched(count: int) -> None:
            if count:
                self.vitals.mark_progress()
            for advance in advances:
                advance(count)

        return watched

    def recall(self) -> None:
        """After a resumption, judge the steps before it again: checks compare with the start of the run."""
        if distributed.is_main_rank() and self.log.path.is_file():
            try:
                for record in iterate_metrics(self.log.path):
                    self._health.add(record)
            except DataError as error:
                self.say(f"warning: checks of the run's health do not know all earlier steps: {error}")

    def log_update(self, done: int, index: int, metrics: Mapping[str, float]) -> None:
        """Write the record of a mini-batch; on the main rank."""
        self.log.write("minibatch", done, metrics, minibatch=index)
        self.feed.add(metrics, f"minibatch_{index}/")
        self._health.add({"kind": "minibatch", "step": done, **metrics})

    def log_evaluation(self, done: int, metrics: Mapping[str, float], unjudged: str | None) -> None:
        """Write the record of an evaluation."""
        self.log.write("eval", done, metrics, unjudged=unjudged)
        self.feed.add(metrics)
        self.feed.publish(done, "eval")

    def _judge(self, done: int, metrics: Mapping[str, float]) -> None:
        """Say which verdicts on the run's health are new, worse, or have ended; show all in ``megarl status``."""
        self._health.add({"kind": "step", "step": done, UNJUDGED: self.unjudged, **metrics})
        for line in self._health.news():
            self.feed.note(f"health: {line}")
        before, verdicts = self.vitals.status.health or [], self._health.verdicts()
        self.feed.add({verdict.check: 0 for verdict in before}, "health/")
        self.feed.add({verdict.check: LEVELS.index(verdict.level) for verdict in verdicts}, "health/")
        self.vitals.status.health = verdicts

    def log_step(
        self, done: int, step_s: float, statistics: dict[str, Stat] | None, last_update: Mapping[str, float]
    ) -> None:
        """Write the record of a step; ``statistics`` is None except on the main rank."""
        if statistics is not None:
            metrics = finalize(statistics)
            metrics |= {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
            metrics |= {"time/step_s": step_s, "speed/tokens_per_s": metrics["sampling/tokens"] / step_s}
            metrics |= self.feed.look()
            self.seconds = {}  # checkpoint time, which comes later, is logged with the next step
            self.log.write("step", done, metrics, unjudged=self.unjudged)
            status = self.vitals.status
            status.tokens_per_s = metrics["speed/tokens_per_s"]
            status.k3, status.native_flip = metrics.get("rollout/k3"), metrics.get("router/native/flip")
            status.sinks = "; ".join(f"{name}: {problem}" for name, problem in self.feed.problems.items()) or None
            status.unjudged, status.dropped = self.unjudged, metrics.get("tripwires/dropped")
            shown = {name: last_update[name] for name in ("loss", "grad_norm") if name in last_update}
            self.say(format_step(done, self._num_steps, metrics | shown))
            self._judge(done, metrics)
            self.feed.add(metrics)
            self.feed.publish(done)
        self.vitals.finish_step(done)
