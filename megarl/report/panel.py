"""One panel of a run's report: what it plots, and its picture."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from megarl.report import maps, plots
from megarl.report.plots import Line, Scale
from megarl.report.series import Curves, layer_curves


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure of the report."""

    title: str
    caption: str
    """How to read it, one or two sentences."""
    y_label: str
    lines: tuple[Line, ...] = ()
    """The metrics it plots, for a panel that is nothing but lines."""
    scale: Scale = "free"
    by_index: bool = False
    """Whether the lines are against the index of the mini-batch, not against the step."""
    plot: Callable[[Axes, Curves], None] | None = None
    """Plots the panel instead of ``lines``."""
    plotted: tuple[str, ...] = ()
    """The metrics that ``plot`` reads."""
    layers: tuple[str, ...] = ()
    """Plots a map of layers: the first of these prefixes that has metrics."""
    wide: bool = False
    """Whether it takes the whole width of the page."""
    optional: bool = False
    """Whether only some runs have it, so that the page does not mention its absence."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Its metrics; one of them is enough."""
        return self.plotted or tuple(line.metric for line in self.lines) or (self.layers[-1] + "XX",)

    def is_recorded(self, curves: Curves) -> bool:
        """Whether any of its metrics has a value that can be plotted."""
        if self.layers:
            return bool(layer_curves(curves, self.layers))
        return any(name in curves for name in self.needs)

    def fill(self, axes: Axes, curves: Curves) -> None:
        """Plot its curves, and set the axes."""
        if self.plot is not None:
            self.plot(axes, curves)
        elif self.layers:
            maps.plot_layers(axes, curves, self.layers)
        else:
            (plots.plot_by_index if self.by_index else plots.plot_lines)(axes, curves, self.lines)
        plots.scale_y(axes, self.scale)
        axes.set_ylabel(axes.get_ylabel() or self.y_label)
        axes.set_xlabel(axes.get_xlabel() or "global step")


def render(panel: Panel, curves: Curves) -> bytes:
    return plots.render_png((10.4, 3.9) if panel.wide else (6.2, 3.5), lambda figure: _plot(figure, panel, curves))


def _plot(figure: Figure, panel: Panel, curves: Curves) -> None:
    axes = figure.add_subplot()
    panel.fill(axes, curves)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    axes.margins(x=0.012)
    handles = sorted(
        zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: isinstance(entry[0], Line2D)
    )
    if handles:
        # Areas before lines; above the axes, where no curve can run behind it.
        place = {"loc": "outside upper left", "ncols": 8 if panel.wide else 4}
        figure.legend(*zip(*handles, strict=True), **place, handlelength=1.4, columnspacing=1.4)
