"""What a run shows while it goes: the metrics log, progress on the terminal, and vitals for ``megarl status``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from megarl.config import Config
from megarl.core.metrics import Stat, finalize
from megarl.megatron import distributed
from megarl.run.metrics_log import MetricsLog
from megarl.run.progress import Advance, StepProgress, format_step
from megarl.run.vitals import Vitals


class Monitor:
    """Reports phases, progress and metrics of one rank."""

    def __init__(self, config: Config, log: MetricsLog, vitals: Vitals) -> None:
        self.log, self.vitals = log, vitals
        self.progress = StepProgress(enabled=distributed.is_main_rank())
        self.say: Callable[[str], None] = self.progress.line
        self._num_steps = config.run.steps
        self.seconds: dict[str, float] = {}
        """Of each phase since the last record of a step."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, and show it in ``megarl status``."""
        started = time.perf_counter()
        with self.vitals.phase(name):
            yield
        self.seconds[name] = time.perf_counter() - started

    def watch(self, advance: Advance | None = None) -> Advance:
        """Return ``advance`` so that each call of it also shows that this rank does not hang."""

        def watched(count: int) -> None:
            if count:
                self.vitals.mark_progress()
            if advance is not None:
                advance(count)

        return watched

    def log_step(
        self, done: int, step_s: float, statistics: dict[str, Stat] | None, last_update: Mapping[str, float]
    ) -> None:
        """Write the record of a step; ``statistics`` is None except on the main rank."""
        if statistics is not None:
            metrics = finalize(statistics)
            metrics |= {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
            metrics |= {"time/step_s": step_s, "speed/tokens_per_s": metrics["sampling/tokens"] / step_s}
            self.seconds = {}  # checkpoint time, which comes later, is logged with the next step
            self.log.write("step", done, metrics)
            self.vitals.status.tokens_per_s = metrics["speed/tokens_per_s"]
            shown = {name: last_update[name] for name in ("loss", "grad_norm") if name in last_update}
            self.say(format_step(done, self._num_steps, metrics | shown))
        self.vitals.finish_step(done)
