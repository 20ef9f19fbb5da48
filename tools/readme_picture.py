"""Plots the README's picture from a finished run: python tools/readme_picture.py RUN_DIR docs/quickstart.png"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from megarl.report.panels import PANELS
from megarl.report.plots import render_png
from megarl.report.series import Curves, make_curves
from megarl.run.metrics_log import read_metrics

PARTS = {"reward": "Pass rate", "kl": "Gap between sampling and training", "router": "Router disagreement"}
"""Title of each panel in the picture."""


def main() -> None:
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    curves = make_curves(read_metrics(run_dir / "metrics.jsonl"))
    out.write_bytes(render_png((15, 4.2), lambda figure: plot_parts(figure, curves), dpi=110))


def plot_parts(figure: Figure, curves: Curves) -> None:
    """Plot the panels side by side."""
    for axes, (key, title) in zip(figure.subplots(1, len(PARTS)), PARTS.items(), strict=True):
        PANELS[key].fill(axes, curves)
        axes.set_title(title, loc="left", fontsize=12, pad=34)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=8.5, borderpad=0.2)


if __name__ == "__main__":
    main()
