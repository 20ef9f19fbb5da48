"""Plots the README's picture from a finished run: python tools/readme_picture.py RUN_DIR docs/quickstart.png"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megarl.ops.report.figures import Run, make_figures
from megarl.ops.report.series import make_curves, read_panels
from megarl.run.metrics_log import read_metrics

PARTS = {"reward": "Pass rate", "kl": "Gap between sampling and training", "router": "Router disagreement"}
"""Title of each panel in the picture."""
DASHES = {
    "solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3)), "longdashdot": (0, (8, 2, 1, 2)),
}  # fmt: skip
MARKERS = {"circle": "o", "diamond": "D", "square": "s", "triangle-up": "^", "cross": "P", "star": "*"}


def main() -> None:
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    run = Run("", make_curves(read_metrics(run_dir / "metrics.jsonl")))
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (key, title) in zip(figure.subplots(1, len(PARTS)), PARTS.items(), strict=True):
        plot(axes, make_figures(read_panels()[key], [run])[0])
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=34)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=8.5, frameon=False)
    figure.savefig(out, dpi=110)


def plot(axes: Axes, figure: dict) -> None:
    """Plot the lines of one of the report's figures."""
    for trace in figure["data"]:
        x, y = (np.array(trace[name], float) for name in "xy")
        look = {
            "alpha": trace.get("opacity", 1.0),
            "color": trace["line"]["color"],
            "linewidth": trace["line"]["width"],
        }
        look |= {"linestyle": DASHES[trace["line"]["dash"]], "markersize": trace["marker"]["size"] * 0.6}
        marker = MARKERS[trace["marker"].get("symbol", "circle")] if "markers" in trace["mode"] else None
        label = trace["name"].replace("&lt;", "<") if trace.get("showlegend", True) else None
        axes.plot(x, y, marker=marker, label=label, **look)
    vertical = figure["layout"]["yaxis"]
    axes.set(xlabel=figure["layout"]["xaxis"]["title"]["text"], ylabel=vertical["title"]["text"])
    axes.set_yscale(vertical.get("type", "linear"))
    if "tickformat" in vertical:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.grid(color="#e3e7ec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
