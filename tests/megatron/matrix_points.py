"""Which points of the replay matrix are run, and what must hold at each of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from matrix_world import LAYOUTS, NUM_LAYERS, ROUTERS
from ranks import Case
from tiny_world import RECOMPUTE

DISPATCHERS = ("alltoall", "allgather")
PRECISIONS = ("fp32", "bf16")
AXES: tuple[tuple[str, ...], ...] = (tuple(LAYOUTS), tuple(RECOMPUTE), DISPATCHERS, tuple(ROUTERS), PRECISIONS)
"""Layout, recomputation, dispatcher, router, precision."""

Point = tuple[str, str, str, str, str]

FIRST_LAYERS: Mapping[str, set[int]] = {
    "pp2": {0, 2},
    "pp2 uneven": {0, 1},
    "pp2 custom": {0, 1},
    "pp2 vpp2": {0, 1, 2, 3},
    "pp2 vpp2 custom": {0, 1, 3},
    "pp4": {0, 1, 2, 3},
    "tp2 pp2 ep2 etp1": {0, 2},
    "cp2 pp2 vpp2": {0, 1, 2, 3},
    "pp2 vpp2 ep2": {0, 1, 2, 3},
}
"""The first layer of every model chunk, which block recomputation with num_layers = 1 repeats; elsewhere layer 0."""


def full() -> list[Point]:
    return list(itertools.product(*AXES))  # type: ignore[arg-type]


def pairwise() -> list[Point]:
    """Few points that hold every pair of values of two axes, always the same ones."""
    open_pairs = {
        (a, x, b, y) for a, b in itertools.combinations(range(len(AXES)), 2) for x in AXES[a] for y in AXES[b]
    }
    chosen: list[Point] = []
    while open_pairs:
        a, x, b, y = min(open_pairs)
        fixed = {a: x, b: y}
        rest = [axis for axis in range(len(AXES)) if axis not in fixed]
        candidates = (
            {**fixed, **dict(zip(rest, values, strict=True))}
            for values in itertools.product(*(AXES[axis] for axis in rest))
        )
        best = max(candidates, key=lambda point: len(_pairs(point) & open_pairs))
        open_pairs -= _pairs(best)
        chosen.append(tuple(best[axis] for axis in range(len(AXES))))  # type: ignore[arg-type]
    return sorted(chosen)


def _pairs(point: Mapping[int, str]) -> set[tuple[int, str, int, str]]:
    return {(a, point[a], b, point[b]) for a, b in itertools.combinations(range(len(AXES)), 2)}


def cases(points: Iterable[Point]) -> dict[str, Case]:
    """One launch per layout with all its points."""
    by_layout: dict[str, list[tuple[str, ...]]] = {}
    for layout, *rest in points:
        by_layout.setdefault(layout, []).append(tuple(rest))
    return {
        layout: Case(LAYOUTS[layout][0], "cases_matrix:variants", LAYOUTS[layout][1], (("points", tuple(of_layout)),))
        for layout, of_layout in by_layout.items()
    }


def complaints(point: Point, found: Mapping[str, Any]) -> list[str]:
    """What is wrong with the measurements at a point; empty if all holds."""
    layout, recompute, _, router, precision = point
    moe_layers = {i for i, one in enumerate(ROUTERS[router].get("moe_layer_freq", [1] * NUM_LAYERS)) if one}
    again = {"none": set(), "others": set(), "block": FIRST_LAYERS.get(layout, {0}) & moe_layers}.get(recompute)
    owed_again = found["owed"] // len(moe_layers) * len(moe_layers if again is None else again)
    exact = precision == "fp32"
    checks = {
        f"tokens sent elsewhere: {found['violations'][:3]}": not found["violations"],
        f"{found['forward']} routings of forward passes, expected {found['owed']}": found["forward"] == found["owed"],
        f"{found['recomputed']} recomputed routings, expected {owed_again}": found["recomputed"] == owed_again,
        "a tampered row went unnoticed": found["caught"] > 0,
        f"gate weights off by {found['gate_error']:.1e}": found["gate_error"] < 1e-5,
        f"log-probabilities off by {found['logprob_error']:.1e}": found["logprob_error"] < (2e-5 if exact else 1e-2),
        f"gradient of {found['worst']} off by {found['gradient_error']:.1e}": found["gradient_error"]
        < (2e-5 if exact else 0.2),
        f"gradients off by {found['all_gradients_error']:.1e}": found["all_gradients_error"]
        < (2e-5 if exact else 3e-2),
        "a router got no gradient": found["router_gradient"] > 0,
    }
    return [complaint for complaint, holds in checks.items() if not holds]
