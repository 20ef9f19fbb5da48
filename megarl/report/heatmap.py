"""The heat map of ``megarl trace diff``: layers against token positions, and every layer's share beside it."""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megarl.report.plots import BLUE, MUTED, render_png
from megarl.report.traces import FileDifference

ABSENT = "#f1f2f4"
_MAX_LAYER_LABELS = 16


def draw(found: FileDifference, layers: tuple[int, ...], title: str) -> bytes:
    """The picture as PNG bytes; positions that no compared token has are grey."""
    height = min(9.0, 2.2 + 0.14 * len(layers))
    return render_png((10.4, max(3.2, height)), lambda figure: _fill(figure, found, layers, title))


def _fill(figure: Figure, found: FileDifference, layers: tuple[int, ...], title: str) -> None:
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(6, 1))
    image = _draw_map(left, found, layers)
    _draw_layers(right, found)
    bar = figure.colorbar(image, ax=[left, right], pad=0.01, aspect=40, label="share of tokens routed differently")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    bar.outline.set_visible(False)
    # File names may be long: they get lines of their own, broken where they must be.
    names = textwrap.fill(title, width=110, break_on_hyphens=False)
    headline = f"{found.total.flip:.2%} of (token, layer) pairs differ\n{names}"
    figure.suptitle(headline, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _draw_map(axes: Axes, found: FileDifference, layers: tuple[int, ...]) -> QuadMesh:
    share = np.where(found.counts > 0, found.flips / np.maximum(found.counts, 1), np.nan)
    top = float(np.nanmax(share)) or 0.01  # no disagreement at all: then the scale is one percent
    edges = np.arange(share.shape[1] + 1) * found.bin_tokens - 0.5
    image = axes.pcolormesh(
        edges, np.arange(len(layers) + 1) - 0.5, share, cmap="YlGnBu", vmin=0.0, vmax=top, rasterized=True
    )
    axes.grid(False)
    axes.set_facecolor(ABSENT)
    shown = range(0, len(layers), -(-len(layers) // _MAX_LAYER_LABELS))
    axes.set_yticks(list(shown), [str(layers[row]) for row in shown])
    axes.invert_yaxis()
    axes.set_ylabel("layer of the model")
    per_bin = "" if found.bin_tokens == 1 else f", {found.bin_tokens} to a column"
    axes.set_xlabel(f"token position{per_bin}")
    if not found.flips.any():
        axes.text(0.5, 0.5, "no token differs", transform=axes.transAxes, ha="center", color=MUTED)
    return image


def _draw_layers(axes: Axes, found: FileDifference) -> None:
    flips = found.total.per_layer_flip
    axes.barh(np.arange(len(flips)), flips, height=0.8, color=BLUE)
    axes.set_xlim(0, max(float(flips.max(initial=0.0)) * 1.08, 0.001))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.grid(False, axis="y")
    axes.tick_params(left=False, labelleft=False)
    axes.set_xlabel("all positions")
