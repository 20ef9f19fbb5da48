"""What the user sees while a run goes: a bar per phase on a terminal, and one line per step everywhere.

On a terminal the bars vanish when their phase ends and the lines stay. Into a file or a pipe only the lines are
written, without control characters. On every rank but the first nothing is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Advance = Callable[[int], None]
"""Says that so many more items are done; fits an engine's ``on_finish``."""

_LINE: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", ".3f"),
    ("reward/pass_rate", "pass", ".1%"),
    ("response/length_mean", "length", ".1f"),
    ("rollout/k3", "k3", ".1e"),
    ("router/flip", "flip", ".2%"),
    ("loss", "loss", ".2e"),
    ("grad_norm", "grad", ".2f"),
    ("eval/pass_rate", "held-out", ".1%"),
    ("time/step_s", "time", ".1f"),
    ("speed/tokens_per_s", "tok/s", ".0f"),
)
"""Metric, label and format of the parts of a step's line, in order."""
_UNITS = {"time/step_s": " s"}


class StepProgress:
    """Bars and lines of one run."""

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        """enabled: whether this rank shows anything; stream: standard output if None."""
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        # Asked of the stream itself: rich would also believe FORCE_COLOR and write control characters into a file.
        self._terminal = self._stream.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown")
        self._console = Console(file=self._stream, force_terminal=self._terminal, highlight=False, markup=False)

    def line(self, text: str) -> None:
        """Print a line of its own, above a bar if there is one."""
        if self._enabled:
            self._console.print(text, soft_wrap=True)
            self._stream.flush()

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        """``with progress.bar("rollout", 256) as advance:`` shows a bar that ``advance(n)`` moves by n items."""
        if not (self._enabled and self._terminal):
            yield lambda count: None
            return
        label_column = TextColumn("{task.description:>10}")
        columns = (label_column, BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda count: bars.advance(task, count)


def format_step(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """The line of one step, e.g. ``step  7/60  reward 0.523  pass 52.3%  k3 1.2e-04  time 2.1 s``."""
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    for name, label, spec in _LINE:
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{spec}}{_UNITS.get(name, '')}")
    return "  ".join(parts)
