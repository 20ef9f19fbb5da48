"""Runs the whole replay matrix on this machine's CPU and writes what held as a table.

    python tools/replay_matrix.py --out docs/replay_matrix.md  # every point, about an hour on two cores
    python tools/replay_matrix.py --layouts "pp2 vpp2" cp2  # some layouts, printed

Each point is a layout, a kind of activation recomputation, a token dispatcher, a router and a precision. What is
measured, and what must hold, is in ``tests/megatron/cases_matrix.py`` and ``matrix_points.py``: a probe at the token
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

from matrix_points import AXES, Point, cases, complaints, full
from matrix_world import LAYOUTS, ROUTERS, Variant
from ranks import launch

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
    return f"""# The replay matrix, as it ran

Written by `python tools/replay_matrix.py --out docs/replay_matrix.md`; code of commit {run.code}. {versions}, Python
{platform.python_version()}, gloo, {os.cpu_count()} cores, no GPU, no Transformer Engine; {run.seconds / 60:.0f}
minutes.

**{held:,} of {len(found):,} points held.** A point is a layout, a recomputation ({", ".join(AXES[1])}), a dispatcher
({", ".join(AXES[2])}), a router and a precision ({", ".join(AXES[4])}). At each one

- a probe at the token dispatcher, which knows nothing of the replay hook, saw every token go to the experts of its
  rollout in every layer, micro-batch and pass, forward and recomputed, once each; and where the rollout has no row, to
  those that the router's definition chooses;
- gate weights were those of the router's definition at these experts (within 1e-5), and every router got a gradient;
- log-probabilities and gradients were those of one rank without recomputation on the same packed rollouts: in fp32
  each parameter's gradient within 2e-5 (norm of the difference over norm), in bf16 all gradients together within 3e-2;
- one row that was tampered with on its way was noticed.

"routings checked" counts calls of routers. "moe+" recomputes moe, core_attn and layernorm; "others" core_attn,
layernorm and mlp, which leave the router alone. DeepEP (`flex` dispatcher), Transformer Engine's layers and CUDA need
GPUs and were not run.

{table(found)}

Routers, as fields of Megatron's TransformerConfig (8 experts, top-2, softmax after top-k, fp32 unless said otherwise):

{routers}

{"Points that did not hold:" if failed else "No point failed."}
{chr(10).join(failed)}
"""


def _fields(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix('moe_')} = {value}" for name, value in fields.items()) or "as said"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--cache", type=Path, help="JSON with the points that have been measured")
    arguments = parser.parse_args()
    run = measure([point for point in full() if point[0] in arguments.layouts], arguments.cache)
    print(table(run.points))
    if arguments.out is not None:
        part = arguments.out.with_suffix(".part")
        part.write_text(page(run))
        os.replace(part, arguments.out)
    failed = sum(bool(one["complaints"]) for one in run.points.values())
    print(f"{len(run.points) - failed} of {len(run.points)} points held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
