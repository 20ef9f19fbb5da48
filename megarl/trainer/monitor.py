"""What the main rank reports of a run: a line and a record per step, health warnings, and signs of life."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from megarl.config import Config
from megarl.core.metrics import Stat, finalize
from megarl.errors import DataError
from megarl.megatron import distributed
from megarl.run.metrics_log import UNJUDGED, MetricsLog, describe_judged, iterate_metrics
from megarl.run.progress import Advance, StepProgress
from megarl.run.vitals import Vitals
from megarl.watch.health import Health

_LINE = {
    "reward/mean": "reward {:.3f}",
    "reward/pass_rate": "pass {:.1%}",
    "reward/judged": "{}",
    "response/length_mean": "length {:.1f}",
    "rollout/k3": "k3 {:.1e}",
    "router/native/flip": "native flip {:.2%}",
    "tripwires/dropped": "dropped {:.0f}",
    "loss": "loss {:.2e}",
    "grad_norm": "grad {:.2f}",
    "time/step_s": "time {:.1f} s",
    "speed/tokens_per_s": "tok/s {:.0f}",
}
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
        self._health.add({"kind": "minibatch", "step": done, **metrics})

    def _judge(self, done: int, metrics: Mapping[str, float]) -> None:
        """Say which verdicts on the run's health are new, worse, or have ended; show all in ``megarl status``."""
        self._health.add({"kind": "step", "step": done, UNJUDGED: self.unjudged, **metrics})
        for line in self._health.news():
            self.say(f"health: {line}")
        self.vitals.status.health = [asdict(verdict) for verdict in self._health.verdicts()]

    def log_step(
        self, done: int, step_s: float, statistics: dict[str, Stat] | None, last_update: Mapping[str, float]
    ) -> None:
        """Write the record of a step; ``statistics`` is None except on the main rank."""
        if statistics is not None:
            metrics = finalize(statistics)
            metrics |= {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
            metrics |= {"time/step_s": step_s, "speed/tokens_per_s": metrics["sampling/tokens"] / step_s}
            self.seconds = {}  # checkpoint time, which comes later, is logged with the next step
            self.log.write("step", done, metrics, unjudged=self.unjudged)
            status = self.vitals.status
            status.tokens_per_s = metrics["speed/tokens_per_s"]
            status.k3, status.native_flip = metrics.get("rollout/k3"), metrics.get("router/native/flip")
            status.unjudged, status.dropped = self.unjudged, metrics.get("tripwires/dropped")
            shown = {name: last_update[name] for name in ("loss", "grad_norm") if name in last_update}
            self.say(format_step(done, self._num_steps, metrics | shown))
            self._judge(done, metrics)
        self.vitals.finish_step(done)
