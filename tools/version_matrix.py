"""Runs replay, the trainer and the example on every release of Megatron-Core, and writes what held as a table.

    python tools/version_matrix.py --out docs/version_matrix.md  # about 20 minutes on two cores
    python tools/version_matrix.py --releases 0.12.3  # one release, printed

A release is installed beside the environment's packages, copied, patched by tools/patch.py where it has a patch, and
restored at the end. What is run is in ``tests/release_checks.py``. Releases that were measured are kept in ``--cache``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "train"))

from forks import Ended
from release_checks import (
    CHECKPOINT_TESTS,
    PATCHED,
    RELEASES,
    REPLAY_TESTS,
    VARIANTS,
    Ran,
    prepared,
    restored,
    routes_alike,
    run_example,
    run_tests,
    trained,
)
from train_world import World, make_world

from megarl.run.metrics_log import read_metrics, without_timing

Row = dict[str, Any]
EXAMPLES = (
    ("--replay", "r3", "--tp", "2", "--recompute"),
    ("--replay", "r2", "--pp", "2", "--vpp", "2", "--recompute"),
)
REFUSED = """\
| what | release | what megarl says |
|---|---|---|
| replay without the patch | 0.12.3 to 0.15.3 | ReplayError and `megarl doctor`: run `python tools/patch.py apply` |
| what counts tokens, in a layout that pads | 0.12.3 to 0.15.3 | ConfigError: its routers count padding |
| `moe_router_load_balancing_type = "global_aux_loss"` | 0.12.3 to 0.14.0 | ConfigError: the release has none |
| a `[megatron]` key that the release has no field for | each its own | ConfigError: no field has this name |

Balancing losses, the z-loss and a moving expert bias (`moe_router_bias_update_rate`) count tokens; tp, cp or pp above 1
and the all-gather dispatcher pad. From 0.16 on megarl tells routers what is padding. 0.14.0 would ignore
`global_aux_loss` without a word. `pipeline_model_parallel_layout` and `moe_router_force_load_balancing` are fields from
0.13 on, `moe_router_fusion` and `overlap_moe_expert_parallel_comm` from 0.14 on, `cuda_graph_impl` from 0.15 on.
"""


def measure(release: str, world: World, expected: tuple[dict[str, Ended], list[Row]], row: Row) -> None:
    """Everything on one release that is not in its row yet."""
    with tempfile.TemporaryDirectory() as name:
        folder = prepared(release, Path(name) / "packages")
        if "alike" not in row:
            row["alike"] = routes_alike(release, folder)
        for kind, tests in (("replay", REPLAY_TESTS), ("checkpoints", CHECKPOINT_TESTS)):
            if kind not in row:
                ran = run_tests(folder, tests)
                row[kind] = [ran.passed, ran.status, ran.seconds]
                _tell(ran)
        if "difference" not in row:
            ended, row["trained"] = trained(folder, world, Path(name) / "jobs")
            row["difference"] = largest_difference(expected, (ended, records(Path(name) / "jobs")))
        if "examples" not in row:
            examples = [run_example(folder, *words) for words in EXAMPLES]
            row["examples"] = [ran.status for ran in examples]
            row["example_seconds"] = sum(ran.seconds for ran in examples)
            for ran in examples:
                _tell(ran)
        row["left"] = restored(release, folder)


def _tell(ran: Ran) -> None:
    if ran.status:
        print(ran.output[-3000:], file=sys.stderr)


def records(where: Path) -> list[Row]:
    return without_timing(read_metrics(where / "run" / "metrics.jsonl"))


def largest_difference(one: tuple[dict[str, Ended], list[Row]], two: tuple[dict[str, Ended], list[Row]]) -> float:
    """Relative, of any metric of any step of the trainer; raises if the two have not the same metrics."""
    pairs = [
        pair
        for name in VARIANTS
        for a, b in [(one[0][name].checked()[name], two[0][name].checked()[name])]
        for pair in zip([*a.updates, a.step], [*b.updates, b.step], strict=True)
    ]
    two[0]["resumed"].checked()
    pairs += zip(one[1], two[1], strict=True)
    largest = 0.0
    for a, b in pairs:
        if a.keys() != b.keys():
            raise SystemExit(f"other metrics: {sorted(a.keys() ^ b.keys())}")
        numbers = [name for name, value in a.items() if isinstance(value, float)]
        largest = max([largest, *(abs(a[n] - b[n]) / max(abs(a[n]), 1e-6) for n in numbers)])
    return largest


def page(rows: dict[str, Row]) -> str:
    lines = [
        "# The version matrix, as it ran",
        "",
        f"Written by `python tools/version_matrix.py --out docs/version_matrix.md`. torch {version('torch')}, Python "
        f"{platform.python_version()}, numpy {version('numpy')}, gloo, {os.cpu_count()} cores shared with other work, "
        "no GPU, no Transformer Engine.",
        "",
        "## The version matrix",
        "",
        "| megatron-core | patch | routing with an empty hook | replay tests | steps of the trainer | checkpoint tests "
        "| example r3 tp2, r2 pp2 vpp2 | patch out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for release, row in rows.items():
        patch = f"{release}.patch" if release in PATCHED else "none needed"
        examples = ", ".join("held" if status == 0 else "FAILED" for status in row["examples"])
        out = "every file as in the wheel" if not row["left"] else f"ALTERED: {', '.join(row['left'])}"
        lines.append(
            f"| {release} | {patch} | {row['alike']} of 20 as unpatched | {_tests(row['replay'])} | "
            f"largest difference {row['difference']:.1e} ({row['trained']:.0f} s) | {_tests(row['checkpoints'])} | "
            f"{examples} | {out} |"
        )
    return "\n".join([*lines, "", EXPLAINED, "## Refused", "", REFUSED])


def _tests(found: list[Any]) -> str:
    passed, status, seconds = found
    return f"{passed} passed ({seconds:.0f} s)" if status == 0 else f"FAILED ({passed} passed)"


EXPLAINED = """\
- **Routing with an empty hook**: five ways of scoring, with and without groups, in fp32 and bf16; outputs and gradients
  are compared bit for bit with those of the unpatched file.
- **Replay tests**: known bugs, semantics (gates, balancing losses, expert bias, prediction layers), errors, and three
  layouts of the replay matrix with all its recomputations: one rank, tp2 ep2 etp1, pp2 vpp2.
- **Steps of the trainer**: two ranks, fixed rollouts. R3 with tp 2 and with pp 2 (every layer recomputed), R2 with ep 2
  (experts recomputed), KL-GRPO with R3; then a run with R3 and ep 2 that samples, is saved, and is resumed. The number
  is the largest relative difference of any metric (losses, gradient norms, log-probabilities, router) from 0.16.1 as it
  is installed.
- **Checkpoint tests**: runs that are resumed, bit for bit on one rank, and with losses within 1e-5 on two in ep 2, tp 2
  and pp 2 vpp 2, from ep 2 into tp 2 ep 2 etp 1, and on four into pp 2 ep 2; a checkpoint of another model.
- **Patch out**: hashes of all files, against the list in the wheel.

Up to 0.14.0 checkpoints hold optimizer state in another form (`fully_sharded_model_space`), which does not move between
ep = 1 and ep > 1. Checkpoints of one release were not loaded into another: stay on the release that a run began with.
All ran with the torch and numpy above, which are newer than these releases ask for;
`megarl/megatron/checkpoints/versions.py` says what that takes. CUDA, NCCL and Transformer Engine were not run on any
release.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--releases", nargs="+", choices=RELEASES, default=RELEASES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cache", type=Path, help="JSON file of releases that were measured before")
    args = parser.parse_args()
    rows: dict[str, Row] = json.loads(args.cache.read_text()) if args.cache and args.cache.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        world, where = make_world(Path(name)), Path(name) / "installed"
        ended, _ = trained(None, world, where)
        for release in args.releases:
            measure(release, world, (ended, records(where)), rows.setdefault(release, {}))
            print(release, json.dumps(rows[release]), flush=True)
            if args.cache:
                args.cache.write_text(json.dumps(rows))
    text = page({release: rows[release] for release in args.releases})
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
