"""What the user sees while a run goes: a bar per phase on a terminal, and lines everywhere.

On a terminal the bars vanish when their phase ends and the lines stay. Into a file or a pipe only the lines are
written, without control characters. On every rank but the first nothing is shown.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megarl.errors import printable
from megarl.run.signals import drop_lost_outputs

Advance = Callable[[int], None]
"""Reports a number of finished items; fits an engine's ``on_finish``."""


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
        """Print a line, above a bar if a bar is shown."""
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
