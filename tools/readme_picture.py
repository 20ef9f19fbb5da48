"""Draws the README's picture from a finished run: python tools/readme_picture.py RUN_DIR docs/quickstart.png"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from megarl.report import plots as draw
from megarl.report.plots import render_png
from megarl.report.series import Series
from megarl.run.metrics_log import read_metrics

PARTS = (
    ("Pass rate", draw.draw_reward),
    ("Gap between sampling and training", draw.draw_kl),
    ("Router disagreement", draw.draw_router),
)


def main() -> None:
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    series = Series.of(read_metrics(run_dir / "metrics.jsonl"))
    out.write_bytes(render_png((15, 4.2), lambda figure: plot_parts(figure, series), dpi=110))


def plot_parts(figure: Figure, series: Series) -> None:
    """Plot the parts side by side."""
    for axes, (title, plot) in zip(figure.subplots(1, len(PARTS)), PARTS, strict=True):
        plot(axes, series)
        axes.set_title(title, loc="left", fontsize=12, pad=34)
        axes.set_xlabel("global step")
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=8.5, borderpad=0.2)


if __name__ == "__main__":
    main()
