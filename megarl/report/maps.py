"""Maps of layers against steps or token positions, for ``megarl report`` and ``megarl trace diff``."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megarl.report.plots import BLUE, MUTED
from megarl.report.series import Curves, layer_curves

_ABSENT = "#f1f2f4"
"""Background of a map: a cell without a value is not "no disagreement"."""
_MAX_LAYER_LABELS = 16


def plot_layers(axes: Axes, curves: Curves, prefixes: Sequence[str]) -> None:
    """Plot router disagreement as a map of MoE layers against steps; prefixes as in ``layer_curves``."""
    layers = {layer: curve.per_step()[0] for layer, curve in layer_curves(curves, prefixes).items()}
    steps = np.unique(np.concatenate([curve.x for curve in layers.values()]))
    grid = np.full((len(layers), len(steps)), np.nan)
    for row, curve in enumerate(layers.values()):
        grid[row, np.searchsorted(steps, curve.x)] = np.where(np.isfinite(curve.y), curve.y, np.nan)
    width = np.diff(steps).min() if len(steps) > 1 else 1.0
    edges = np.append(steps, steps[-1] + width) - width / 2
    _add_colorbar(_plot_map(axes, edges, grid, tuple(layers)), axes)


def plot_trace_difference(
    figure: Figure, flips: np.ndarray, per_layer: np.ndarray, layers: tuple[int, ...], bin_tokens: int, title: str
) -> None:
    """Plot how two trace files differ: layers against token positions, and the share of each layer beside it.

    flips: float [L, bins], share of tokens that are routed differently; NaN where no token was compared. per_layer:
    float [L], the same over all positions.
    """
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(6, 1))
    image = _plot_map(left, np.arange(flips.shape[1] + 1) * bin_tokens - 0.5, flips, layers)
    left.set_ylabel("layer of the model")
    left.set_xlabel("token position" + ("" if bin_tokens == 1 else f", {bin_tokens} to a column"))
    if not np.nan_to_num(flips).any():
        left.text(0.5, 0.5, "no token differs", transform=left.transAxes, ha="center", color=MUTED)
    right.barh(np.arange(len(per_layer)), per_layer, height=0.8, color=BLUE)
    right.set_xlim(0, max(float(per_layer.max(initial=0.0)) * 1.08, 0.001))
    right.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    right.xaxis.set_major_locator(MaxNLocator(nbins=3))
    right.grid(False, axis="y")
    right.tick_params(left=False, labelleft=False)
    right.set_xlabel("all positions")
    _add_colorbar(image, [left, right], aspect=40)
    names = textwrap.fill(title, width=110, break_on_hyphens=False)  # long file names would not fit the figure
    headline = f"{per_layer.mean():.2%} of (token, layer) pairs differ\n{names}"
    figure.suptitle(headline, x=0.01, ha="left", fontsize=11, fontweight="bold")


def _plot_map(axes: Axes, edges: np.ndarray, grid: np.ndarray, layers: Sequence[int]) -> QuadMesh:
    """Plot ``grid`` [L, columns] with the first layer at the top. edges: [columns + 1]."""
    top = float(np.nanmax(grid)) or 0.01  # without any disagreement the scale is one percent
    rows = np.arange(len(layers) + 1) - 0.5
    image = axes.pcolormesh(edges, rows, grid, cmap="YlGnBu", vmin=0.0, vmax=top, rasterized=True)
    axes.grid(False)
    axes.set_facecolor(_ABSENT)
    shown = range(0, len(layers), -(-len(layers) // _MAX_LAYER_LABELS))
    axes.set_yticks(list(shown), [str(layers[row]) for row in shown])
    axes.invert_yaxis()
    return image


def _add_colorbar(image: QuadMesh, axes: Axes | list[Axes], **style: Any) -> None:
    bar = image.figure.colorbar(image, ax=axes, label="share of tokens routed differently", pad=0.01, **style)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    bar.outline.set_visible(False)
