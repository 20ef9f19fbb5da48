"""Runs the whole replay matrix on this machine's CPU and writes what held as a table.

    python tools/replay_matrix.py --out docs/replay_matrix.md  # every point, about an hour on two cores
    python tools/replay_matrix.py --layouts "pp2 vpp2" cp2  # some layouts, printed
    python tools/replay_matrix.py --loops --out docs/replay_loops.md  # orders of passes, minutes

Each point is a layout, a kind of activation recomputation, a token dispatcher, a router and a precision. What is
measured, and what must hold, is in ``tests/megatron/cases_matrix.py``: a probe at the token
dispatcher compares the experts of every token with the trace in every pass, and log-probabilities and gradients are
compared with one rank on the same packed rollouts. Points that were measured are kept in ``--cache``, so that a run
that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "megatron"))

import cases_loops
from cases_matrix import AXES, Point, cases, complaints, full
from matrix_world import LAYOUTS, ROUTERS, Variant
from ranks import Case, launch

POINTS_PER_LAUNCH = 20
ROOT = Path(__file__).parent.parent
Found = dict[str, dict[str, Any]]
"""Point, joined by |, -> measurements and ``complaints``."""


@dataclass
class Run:
    """Points that were measured with one state of the code."""

    code: str
    """Commit, with a + behind it if the working tree differed."""
    seconds: float = 0.0
    points: Found = field(default_factory=dict)

    @staticmethod
    def load(cache: Path | None) -> Run:
        run = Run(_commit())
        if cache is None or not cache.exists():
            return run
        kept = Run(**json.loads(cache.read_text()))
        if kept.code != run.code and len(kept.points) < len(full()):
            raise SystemExit(f"{cache} holds points of commit {kept.code}, this is {run.code}; remove it to begin anew")
        kept.points = {key: one for key, one in kept.points.items() if "forward" in one}  # the others never ran
        return kept

    def save(self, cache: Path | None) -> None:
        if cache is not None:
            cache.with_suffix(".part").write_text(json.dumps(asdict(self)))
            os.replace(cache.with_suffix(".part"), cache)


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def measure(points: Sequence[Point], cache: Path | None) -> Run:
    """What each point gave; a launch that fails counts against all its points, but is tried again next time."""
    run = Run.load(cache)
    todo = [point for point in points if "|".join(point) not in run.points]
    for layout in LAYOUTS:
        of_layout = [point for point in todo if point[0] == layout]
        for first in range(0, len(of_layout), POINTS_PER_LAUNCH):
            part = of_layout[first : first + POINTS_PER_LAUNCH]
            started = time.perf_counter()
            run.points.update(_launched(layout, part))
            run.seconds += time.perf_counter() - started
            run.save(cache)
            print(f"{run.seconds:6.0f} s  {layout}: {len(run.points)} of {len(points)} points", flush=True)
    return Run(run.code, run.seconds, {"|".join(point): run.points["|".join(point)] for point in points})


def _launched(layout: str, part: Sequence[Point]) -> Found:
    case = cases(part)[layout]
    with tempfile.TemporaryDirectory() as folder:
        outcome = launch([case], Path(folder) / "run")[case]
    if outcome.error is not None:
        return {"|".join(point): {"complaints": [outcome.error[-500:]]} for point in part}
    result: Found = {}
    for point in part:
        measured = outcome.value[str(Variant(*point[1:]))]
        kept = {key: value for key, value in measured.items() if key != "violations"}
        result["|".join(point)] = {**kept, "complaints": complaints(point, measured)}
    return result


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per layout: points that held, and the largest errors among them."""
    lines = [
        "| layout | ranks | points | held | routings checked | fp32: log-probs | fp32: gradients | bf16: log-probs |"
        " bf16: gradients |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layout, (ranks, _) in LAYOUTS.items():
        of_layout = {key.split("|")[-1] + key: one for key, one in found.items() if key.split("|")[0] == layout}
        if not of_layout:
            continue
        held = [one for one in of_layout.values() if not one["complaints"]]
        routings = sum(one.get("forward", 0) + one.get("recomputed", 0) for one in of_layout.values())
        worst = [
            _largest([one for key, one in of_layout.items() if key.startswith(precision)], name)
            for precision, name in (
                ("fp32", "logprob_error"),
                ("fp32", "gradient_error"),
                ("bf16", "logprob_error"),
                ("bf16", "all_gradients_error"),
            )
        ]
        lines.append(f"| {layout} | {ranks} | {len(of_layout)} | {len(held)} | {routings:,} | {' | '.join(worst)} |")
    return "\n".join(lines)


def _largest(of: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [one[name] for one in of if name in one]
    return f"{max(values):.1e}" if values else "-"


def page(run: Run) -> str:
    found = run.points
    held = sum(not one["complaints"] for one in found.values())
    routers = "\n".join(f"- `{name}`: {_fields(fields)}" for name, fields in ROUTERS.items())
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    failed = [f"- {key}: {'; '.join(one['complaints'])}" for key, one in found.items() if one["complaints"]]
    return f"""# The replay matrix: measured results

Written by `python tools/replay_matrix.py --out docs/replay_matrix.md`; code of commit {run.code}. {versions}, Python
{platform.python_version()}, gloo, {os.cpu_count()} cores, no GPU, no Transformer Engine; {run.seconds / 60:.0f}
minutes.

**{held:,} of {len(found):,} points held.** A point is a layout, a recomputation ({", ".join(AXES[1])}), a dispatcher
({", ".join(AXES[2])}), a router and a precision ({", ".join(AXES[4])}). At each one

- A probe at the token dispatcher, which does not know the replay hook, saw each token go to the experts of its
  rollout, once per layer, micro-batch and pass (forward and recomputation). Tokens without a row went to the
  experts that the router's definition chooses.
- The gate weights were those of the router's definition at these experts (within 1e-5), and every router got a
  gradient.
- Log-probabilities and gradients equalled those of one rank without recomputation on the same packed rollouts. In
  fp32, each parameter's gradient is within 2e-5 (norm of the difference over norm); in bf16, all gradients together
  are within 3e-2.
- A row that was changed on its way was detected.

"routings checked" counts router calls. "moe+" recomputes moe, core_attn and layernorm; "others" core_attn,
layernorm and mlp, which leave the router alone. DeepEP (`flex` dispatcher), Transformer Engine's layers and CUDA need
GPUs and were not run.

{table(found)}

Routers, as fields of Megatron's TransformerConfig (8 experts, top-2, softmax after top-k, fp32 unless stated):

{routers}

{"Points that did not hold:" if failed else "No point failed."}
{chr(10).join(failed)}
"""


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix('moe_')} = {value}" for name, value in fields.items()) or "the default"


LOOP_LAYOUTS = ("single", "ep2", "tp2 ep2 etp1")
LOOP_TOLERANCE = 2e-5


def measure_loops() -> dict[tuple[str, str, str], dict[str, float]]:
    """(layout, kind of checkpoint, mode) -> point -> gradient error; NaN for points of a launch that failed."""
    cases = {}
    for layout in LOOP_LAYOUTS:
        for kind in cases_loops.CHECKPOINTS:
            for mode in cases_loops.MODES:
                points = tuple(point for point in cases_loops.all_points() if point[1:3] == (kind, mode))
                ranks, table = LAYOUTS[layout]
                cases[layout, kind, mode] = Case(ranks, "cases_loops:loops", table, (("points", points),))
    with tempfile.TemporaryDirectory() as folder:
        outcomes = launch(list(cases.values()), Path(folder) / "run")
    found = {}
    for key, case in cases.items():
        outcome = outcomes[case]
        if outcome.error is not None:
            print(f"{key}: {outcome.error}", file=sys.stderr)
        nothing = {"|".join(point): float("nan") for point in dict(case.arguments)["points"]}
        found[key] = outcome.value if outcome.error is None else nothing
    return found


def loops_table(found: Mapping[tuple[str, str, str], Mapping[str, float]]) -> str:
    """A row per kind of checkpoint: points that held, and the largest error in each layout."""
    lines = [
        "| recomputation | points | held | " + " | ".join(LOOP_LAYOUTS) + " |",
        "|---" * (3 + len(LOOP_LAYOUTS)) + "|",
    ]
    for kind in cases_loops.CHECKPOINTS:
        by_layout = [
            [error for key, errors in found.items() if key[:2] == (layout, kind) for error in errors.values()]
            for layout in LOOP_LAYOUTS
        ]
        errors = [error for of_layout in by_layout for error in of_layout]
        held = sum(error < LOOP_TOLERANCE for error in errors)
        worst = " | ".join(f"{max(of_layout):.1e}" for of_layout in by_layout)
        lines.append(f"| {kind} | {len(errors)} | {held} | {worst} |")
    return "\n".join(lines)


def loops_page(found: Mapping[tuple[str, str, str], Mapping[str, float]], seconds: float) -> str:
    errors = [error for of_key in found.values() for error in of_key.values()]
    held = sum(error < LOOP_TOLERANCE for error in errors)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    return f"""# Replay in other orders of passes: measured results

Written by `python tools/replay_matrix.py --loops --out docs/replay_loops.md`; code of commit {_commit()}. {versions},
Python {platform.python_version()}, gloo, fp32, {os.cpu_count()} cores, no GPU; {seconds / 60:.0f} minutes.

**{held:,} of {len(errors):,} points held**: each parameter's gradient is that of the same loop without recomputation,
within {LOOP_TOLERANCE:.0e} (norm of the difference over norm). A point is a layout, a kind of recomputation and

- an order of passes: {", ".join(cases_loops.ORDERS)} (each is a few lines of `tests/megatron/cases_loops.py`);
- a context: replay with different routes per micro-batch, `record()`, or installed hooks without a context;
- for two of the orders, frozen parts: {", ".join(part for part in cases_loops.FROZEN if part != "nothing")}.

The table shows the largest gradient difference per layout. "uniform", "block" and "moe" are Megatron's own
recomputation, which is reentrant. "layers" and "experts" are wrapped in `torch.utils.checkpoint`; some checkpoints
are nested.

{loops_table(found)}

Two cases are left out, because reentrant checkpoints carry no gradient there, with or without megarl: gradients of
single weights by `torch.autograd.grad`, and frozen first layers if whole layers are checkpointed.
"""


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def _run_loops(out: Path | None) -> int:
    started = time.perf_counter()
    found = measure_loops()
    print(loops_table(found))
    if out is not None:
        _write(out, loops_page(found, time.perf_counter() - started))
    return 0 if all(error < LOOP_TOLERANCE for of_key in found.values() for error in of_key.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--cache", type=Path, help="JSON with the points that have been measured")
    parser.add_argument("--loops", action="store_true", help="orders of passes instead of layouts")
    arguments = parser.parse_args()
    if arguments.loops:
        return _run_loops(arguments.out)
    run = measure([point for point in full() if point[0] in arguments.layouts], arguments.cache)
    print(table(run.points))
    if arguments.out is not None:
        _write(arguments.out, page(run))
    failed = sum(bool(one["complaints"]) for one in run.points.values())
    print(f"{len(run.points) - failed} of {len(run.points)} points held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
