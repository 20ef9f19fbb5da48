"""The replay matrix: which points are run, every variant on one layout compared with one rank on the same rollouts, and
what must hold."""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dispatch_probe import DispatchProbe
from matrix_world import (
    LAYOUTS,
    NUM_LAYERS,
    ROUTERS,
    MatrixModel,
    Variant,
    build,
    build_alone,
    gradients,
    settings_of,
)
from ranks import Case
from tiny_world import (
    RECOMPUTE,
    fixed_coefficients,
    gather_sequences,
    join,
    local_routes,
    micro_batches,
    pack_own,
    rollouts,
)

from megarl.core.types import Rollout, TrainBatch
from megarl.megatron.passes.forward import MicroOutput, run
from megarl.replay import MicroRoutes, RoutingReplay
from megarl.verify import RoutingWatch

REFERENCES = Path("references")


def variants(layout: dict[str, Any], points: Sequence[tuple[str, str, str, str]]) -> dict[str, dict[str, Any]]:
    """What was found at each point (recompute, dispatcher, router, precision); reading ``measure`` tells what."""
    chosen = [Variant(*point) for point in points]
    references = _references(chosen) if int(os.environ["RANK"]) == 0 else {}
    found, joined = {}, None
    for variant in chosen:
        settings = settings_of(layout, variant)
        if joined is None:
            join(settings)
            joined = settings
        started = time.perf_counter()
        measured = measure(build(settings, variant), variant)
        if dist.get_rank() == 0:
            found[str(variant)] = {
                **_compared(measured, references[variant]),
                "seconds": time.perf_counter() - started,
            }
    return found


def _references(chosen: Sequence[Variant]) -> dict[Variant, dict[str, Any]]:
    """The same rollouts on one rank without recomputation, in a process of its own; kept in files."""
    alone = {variant: replace(variant, recompute="none", dispatcher="alltoall") for variant in chosen}
    paths = {one: REFERENCES / f"{one.router}-{one.precision}.pt" for one in alone.values()}
    missing = {one: path for one, path in paths.items() if not path.exists()}
    if missing:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _write_references(missing)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0, f"a reference failed: {list(missing)}"
    return {variant: torch.load(paths[one], weights_only=False) for variant, one in alone.items()}


def _write_references(missing: Mapping[Variant, Path]) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    REFERENCES.mkdir(exist_ok=True)
    for variant, path in missing.items():
        torch.save(measure(build_alone(variant), variant), path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def measure(model: MatrixModel, variant: Variant) -> dict[str, Any]:
    """A training pass under replay seen by the probe, and a pass in which one row has been tampered with."""
    made = _rollouts_for(model)
    batch = pack_own(made)
    micros = micro_batches(model.settings, batch)
    replay = RoutingReplay(model.chunks, min_agreement=0.0)  # the routes are random
    routes = [local_routes(micro, replay.layers, model.shape) for micro in micros]
    keywords: dict[str, Any] = {"temperature": 1.0, "vocab_size": model.shape.vocab_size}

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    probe = DispatchProbe(model.chunks, micros, model.router)
    with RoutingWatch(model.chunks) as watch, replay.replay(routes):
        outputs = run(model.chunks, micros, coefficients=fixed_coefficients, **keywords)
    probe.remove()
    report = watch.report(routes)
    report.require()
    few = model.settings.parallel.micro_batch_multiple  # the first alone holds the row, but stages take turns
    tampered = DispatchProbe(model.chunks, micros[:few], model.router)
    with replay.replay(_tampered(routes[:few], model)):
        run(model.chunks, micros[:few], **keywords)
    tampered.remove()
    columns = _columns(outputs, [micro.batch for micro in micros])
    return _everywhere(
        {
            "violations": probe.violations(made, model.shape.moe_layers),
            "gate_error": probe.largest_gate_error(),
            "forward": sum(not one.is_recomputation for one in probe.seen),
            "recomputed": sum(one.is_recomputation for one in probe.seen),
            "owed": len(replay.layers) * len(micros),
            "caught": len(tampered.violations(made, model.shape.moe_layers)),
        }
    ) | {"logprobs": gather_sequences(columns), "gradients": gradients(model.chunks)}


def _rollouts_for(model: MatrixModel) -> list[Rollout]:
    shape = model.shape
    return rollouts(30, len(shape.moe_layers), shape.num_experts, shape.topk)


def _columns(outputs: list[MicroOutput], batches: list[TrainBatch]) -> list[tuple[TrainBatch, torch.Tensor]]:
    return [(batch, output.logprobs) for batch, output in zip(batches, outputs, strict=bool(outputs))]


def _tampered(routes: list[MicroRoutes], model: MatrixModel) -> list[MicroRoutes]:
    """One expert of one present row of this rank's first MoE layer is another than the rollout's."""
    first = routes[0]
    if not first.experts.size(1):
        return routes
    rows = range(len(first.experts)) if first.present is None else first.present.nonzero()[:, 0].tolist()
    experts = first.experts.clone()
    for row in list(rows)[:1]:
        others = set(range(model.shape.num_experts)) - set(experts[row, 0].tolist())
        experts[row, 0, 0] = min(others)
    return [MicroRoutes(experts, first.present), *routes[1:]]


def _everywhere(report: Mapping[str, Any]) -> dict[str, Any]:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, dict(report))
    merged: dict[str, Any] = {}
    for key in report:
        values = [one[key] for one in reports]
        if key == "violations":
            merged[key] = [line for of_rank in values for line in of_rank]
        else:
            merged[key] = max(values) if key == "gate_error" else sum(values)
    return merged


def _compared(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Counts of the probe, and the largest relative errors: of a sequence's log-probabilities, of a gradient."""
    assert found["logprobs"].keys() == alone["logprobs"].keys()
    assert found["gradients"].keys() == alone["gradients"].keys()
    logprobs = {k: (found["logprobs"][k].numpy(), alone["logprobs"][k].numpy()) for k in alone["logprobs"]}
    grads = {k: (found["gradients"][k], alone["gradients"][k]) for k in alone["gradients"]}
    assert all(float(np.abs(of_one).max()) > 0 for _, of_one in logprobs.values())
    errors = {key: _relative(*pair) for key, pair in grads.items()}
    worst = max(errors, key=lambda key: errors[key])
    router = [float(np.abs(of_one).max()) for key, (_, of_one) in grads.items() if "router.weight" in key]
    return {
        **{key: found[key] for key in ("violations", "gate_error", "forward", "recomputed", "owed", "caught")},
        "logprob_error": max(_relative(*pair) for pair in logprobs.values()),
        "gradient_error": errors[worst],
        "all_gradients_error": _relative(*map(_joined, zip(*grads.values(), strict=True))),
        "worst": worst,
        "router_gradient": min(router),
    }


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.ravel() for array in arrays])


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    """||a - b|| / ||b||; 0 / 0 = 0."""
    distance, size = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected))
    return distance / size if size else distance


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
