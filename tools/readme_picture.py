"""Plots the README's picture from a finished run: python tools/readme_picture.py RUN_DIR docs/quickstart.png"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from megarl.report.panels import PANELS
from megarl.report.plots import render_png
from megarl.report.series import Series
from megarl.run.metrics_log import read_metrics

PARTS = {"reward": "Pass rate", "kl": "Gap between sampling and training", "router": "Router disagreement"}
"""Title of each panel in the picture."""


def main() -> None:
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    series = Series.of(read_metrics(run_dir / "metrics.jsonl"))
    out.write_bytes(render_png((15, 4.2), lambda figure: plot_parts(figure, series), dpi=110))


def plot_parts(figure: Figure, series: Series) -> None:
    """Plot the panels side by side."""
    panels = [panel for panel in PANELS if panel.key in PARTS]
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        panel.fill(axes, series)
        axes.set_title(PARTS[panel.key], loc="left", fontsize=12, pad=34)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=8.5, borderpad=0.2)


if __name__ == "__main__":
    main()
