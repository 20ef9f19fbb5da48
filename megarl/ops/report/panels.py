"""The panels of a run's report, and the glossary of metrics: data in panels.toml and glossary.toml."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from megarl.ops.report.series import Curves, layer_curves

Scale = Literal["free", "zero", "log", "percent", "whole percent", "percent to 100"]
"""The y axis: as it comes; from zero up; decades; percent from zero up, from 0 to 100, from anywhere to 100."""
Kind = Literal["lines", "reward", "time", "layers"]
"""The kind of figure: layers is a map of layers against steps; reward and time have a single panel."""


@dataclass(frozen=True, slots=True)
class Line:
    """One metric in a panel."""

    metric: str
    label: str
    color: str = "blue"
    """A name of ``figures.COLORS``."""
    style: Literal["line", "dots"] = "line"
    """"dots" is for evaluations: evaluations are few, and never smoothed."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of the report."""

    title: str
    caption: str
    """How to read the figure, in one or two sentences."""
    y_label: str
    lines: tuple[Line, ...] = ()
    metrics: tuple[str, ...] = ()
    """The metrics of panels with more than lines; for layers, prefixes: the first prefix with metrics counts."""
    kind: Kind = "lines"
    scale: Scale = "free"
    wide: bool = False
    """True for the whole width of the page."""
    optional: bool = False
    """True for panels of special runs: the page does not mention the absence."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The metrics; any metric is enough."""
        if self.kind == "layers":
            return tuple(f"{prefix}XX" for prefix in self.metrics)
        return self.metrics or tuple(line.metric for line in self.lines)

    def is_recorded(self, curves: Curves) -> bool:
        """True if any metric has a value to plot."""
        if self.kind == "layers":
            return bool(layer_curves(curves, self.metrics))
        return any(name in curves for name in self.needs)


@cache
def read_panels() -> dict[str, Panel]:
    """Return the panels by their short names, in the order of the page."""
    return {key: _make_panel(**table) for key, table in read_table("panels.toml").items()}


@cache
def read_glossary() -> dict[str, str]:
    """Return the meaning of each metric, by name; XX in a name stands for a number, NAME for a name of the user's."""
    return read_table("glossary.toml")


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file of this package."""
    return tomllib.loads((files("megarl.ops.report") / name).read_text(encoding="utf-8"))


def _make_panel(**values: Any) -> Panel:
    panel = Panel(**values)
    return replace(panel, lines=tuple(Line(*row) for row in panel.lines), metrics=tuple(panel.metrics))  # type: ignore
