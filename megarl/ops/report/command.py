"""``megarl report`` and ``megarl trace``."""

from pathlib import Path
from typing import Literal

from megarl.config.command import Overrides, Positional, command
from megarl.errors import ConfigError, printable


@command
class Report:
    """Write one HTML page about a run, or one that overlays the curves of several: docs/report.md."""

    run_dirs: Positional[tuple[Path, ...]]
    """The folder of the run, or of each run."""
    out: Path | None = None
    """The page; default RUN_DIR/report/index.html, of several runs compare.html here."""

    def run(self, overrides: Overrides) -> None:
        from megarl.ops.report.report import write_report

        print(printable(f"report: {write_report(*self.run_dirs, out=self.out)}"))


@command
class Trace:
    """Look into files of routing traces: inspect FILE, stats FILE, or or diff A B."""

    action: Positional[Literal["inspect", "stats", "diff"]]
    """What to do."""
    files: Positional[tuple[Path, ...]]
    """One file, or two for diff."""

    def run(self, overrides: Overrides) -> None:
        expected = 2 if self.action == "diff" else 1
        if len(self.files) != expected:
            raise ConfigError(f"megarl trace {self.action}: found {len(self.files)} files, expected {expected}")
        from megarl.ops.report import traces

        getattr(traces, self.action)(*self.files)
