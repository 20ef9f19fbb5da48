"""What the user sees while a run goes: a bar per phase on a terminal, one line per step everywhere, and metrics.

On a terminal the bars vanish when their phase ends and the lines stay. Into a file or a pipe only the lines are
written, without control characters. On every rank but the first nothing is shown.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megarl.config import Config
from megarl.core.metrics import Stat, finalize
from megarl.errors import DataError, printable
from megarl.megatron import distributed
from megarl.run.metrics_log import UNJUDGED, MetricsLog, describe_judged, iterate_metrics
from megarl.run.signals import drop_lost_outputs
from megarl.run.vitals import Vitals
from megarl.watch.health import Health

Advance = Callable[[int], None]
"""Says that so many more items are done; fits an engine's ``on_finish``."""

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


class StepProgress:
    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        """enabled: whether this rank shows anything; stream: standard output if None."""
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        # Asked of the stream itself: rich would also believe FORCE_COLOR and write control characters into a file.
        self._terminal = self._stream.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown")
        self._console = Console(
            file=self._stream, force_terminal=self._terminal, highlight=False, markup=False, emoji=False
        )

    def line(self, text: str) -> None:
        """Print a line of its own, above a bar if there is one."""
        if not self._enabled:
            return
        with self._hanging_up():
            if self._terminal:
                self._console.print(printable(text), soft_wrap=True)
            else:
                print(printable(text), file=self._stream, flush=True)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        """``with progress.bar("rollout", 256) as advance:`` shows a bar that ``advance(n)`` moves by n items."""
        if not (self._enabled and self._terminal):
            yield lambda count: None
            return
        label_column = TextColumn("{task.description:>10}")
        columns = (label_column, BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        bars = Progress(*columns, console=self._console, transient=True)
        task = bars.add_task(label, total=total)
        with self._hanging_up():
            bars.start()
        try:
            yield lambda count: bars.advance(task, count)
        finally:
            if self._terminal:
                with self._hanging_up():
                    bars.stop()

    @contextmanager
    def _hanging_up(self) -> Iterator[None]:
        """Inside, an output that is lost is a hang-up, also without a terminal; no bar is shown from then on."""
        try:
            yield
        except OSError:
            if not drop_lost_outputs():
                raise
            self._terminal = False
            signal.raise_signal(signal.SIGHUP)


def format_step(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """The line of one step, e.g. ``step  7/60  reward 0.523  pass 52.3%  k3 1.2e-04  time 2.1 s``."""
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    values = {**metrics, "reward/judged": describe_judged(metrics)}
    parts += [text.format(values[name]) for name, text in _LINE.items() if name in metrics]
    return "  ".join(filter(None, parts))


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
        """Return what calls all of ``advances``, and also shows that this rank does not hang."""

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
