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
    """Look into files of routing traces: inspect FILE, stats FILE, or diff A B [--out heatmap.html]."""

    action: Positional[Literal["inspect", "stats", "diff"]]
    """What to do."""
    files: Positional[tuple[Path, ...]]
    """One file, or two for diff."""
    out: Path | None = None
    """A map of the difference, an HTML page."""
    json: bool = False
    """Print the results as JSON."""

    def run(self, overrides: Overrides) -> None:
        expected = 2 if self.action == "diff" else 1
        if len(self.files) != expected:
            raise ConfigError(f"megarl trace {self.action}: found {len(self.files)} files, expected {expected}")
        if self.out is not None and self.action != "diff":
            raise ConfigError(f"megarl trace {self.action} plots nothing: remove --out; only megarl trace diff has it")
        from megarl.ops.report import traces

        getattr(traces, self.action)(*self.files, *([self.out] if self.action == "diff" else []), as_json=self.json)
