"""Runs replay, the trainer, checkpoints, conversion and the example on releases of Megatron-Core; writes what held.

    python tools/version_matrix.py --releases 0.19.2  # about ten minutes on two cores; --parts chooses
    python tools/version_matrix.py --releases --out docs/version_matrix.md  # the page alone, from the rows

A release is installed beside the environment's packages, copied, patched by ``megarl patch`` where it has a patch, and
restored at the end. What is run is in ``tests/release_checks.py``. Each release has a row for each Python that it ran
with: a JSON file in ``--rows``, written after every part, so a run of one release needs no other.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "trainer"))

from forks import Ended
from release_checks import (
    CHECKPOINT_TESTS,
    CONVERSION_TESTS,
    EXPORT_TESTS,
    LAYOUT_TESTS,
    PATCHED,
    RELEASES,
    REPLAY_TESTS,
    VARIANTS,
    Ran,
    installed,
    prepared,
    restored,
    routes_alike,
    run_example,
    run_tests,
    trained,
)
from train_world import World, make_world

from megarl.run.metrics_log import read_metrics

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
TESTS = {
    "replay": REPLAY_TESTS,
    "checkpoints": CHECKPOINT_TESTS,
    "conversion": CONVERSION_TESTS,
    "export": EXPORT_TESTS,
    "layouts": LAYOUT_TESTS,
}
PARTS = ("alike", "examples", "training", *TESTS)
BASE = "0.16.1"
EXAMPLES = (
    ("--replay", "r3", "--tp", "2", "--recompute"),
    ("--replay", "r2", "--pp", "2", "--vpp", "2", "--recompute"),
)
REFUSED = """\
| what | release | what megarl says |
|---|---|---|
| replay without the patch | 0.12.3 to 0.15.3 | ReplayError and `megarl doctor`: run `megarl patch apply` |
| `mlp_chunks_for_training` above 1 | 0.18.2, 0.19.2 | ReplayError: the router is asked once per chunk |
| `moe_router_load_balancing_type = "quantile_balancing"` | 0.19.2 | ReplayError: experts are chosen without the hook |
| settings that count tokens, in a layout that pads | 0.12.3 to 0.15.3 | ConfigError: the routers count padding |
| `moe_router_load_balancing_type = "global_aux_loss"` | 0.12.3 to 0.14.0 | ConfigError: there is no global loss |
| a router that is no TopKRouter, or has a `forward` or `routing` of its own | all | ReplayError: names the class |
| a `[megatron]` key without a field in the release | depends on the key | ConfigError: no field of that name |

Balancing losses, the z-loss and a moving expert bias (`moe_router_bias_update_rate`) count tokens; tp, cp or pp above 1
and the all-gather dispatcher pad. From 0.16 on megarl tells routers which rows are padding. 0.14.0 would silently
ignore `global_aux_loss`. `pipeline_model_parallel_layout` and `moe_router_force_load_balancing` are fields from
0.13 on, `moe_router_fusion` and `overlap_moe_expert_parallel_comm` from 0.14 on, `cuda_graph_impl` from 0.15 on.
"""


def measure(release: str, parts: list[str], file: Path, common: Path) -> None:
    """Run these parts on one release, and write each into its row. ``common`` keeps what releases are compared with."""
    row: Row = json.loads(file.read_text()) if file.exists() else {}
    row |= {"release": release, "python": platform.python_version(), "torch": version("torch")}
    with tempfile.TemporaryDirectory() as name:
        folder = prepared(release, Path(name) / "packages")
        for part in parts:
            ran: list[Ran] = []
            if part == "alike":
                row[part] = routes_alike(release, folder) if release in PATCHED else None  # else it is the same file
            elif part == "examples":
                ran = [run_example(folder, *words) for words in EXAMPLES]
                row[part] = [sum(not each.status for each in ran), max(each.status for each in ran), _seconds(*ran)]
            elif part == "training":
                row[part] = train(folder, Path(name), common)
            else:
                ran = [run_tests(folder, TESTS[part])]
                row[part] = [ran[0].passed, ran[0].status, _seconds(*ran)]
            if ran:
                _tell(ran)
            file.write_text(json.dumps(row, indent=1, sort_keys=True) + "\n")
            print(release, part, json.dumps(row[part]), flush=True)
        row["left"] = restored(release, folder)
    file.write_text(json.dumps(row, indent=1, sort_keys=True) + "\n")


@cache
def base(common: Path) -> tuple[World, tuple[dict[str, Ended], list[Row]]]:
    """A world, and what the release BASE, as it is installed, computes in it."""
    world = make_world(common / "world")
    ended, _ = trained(installed(BASE), world, common / "base")
    return world, (ended, records(common / "base"))


def train(folder: Path, where: Path, common: Path) -> list[float]:
    """[largest difference from BASE, seconds]; raises if a run fails."""
    world, expected = base(common)
    found, seconds = trained(folder, world, where / "jobs")
    return [largest_difference(expected, (found, records(where / "jobs"))), round(seconds)]


def _seconds(*ran: Ran) -> int:
    return round(sum(each.seconds for each in ran))


def _tell(ran: list[Ran]) -> None:
    for each in ran:
        if each.status:
            print(each.output[-6000:], file=sys.stderr)


def records(where: Path) -> list[Row]:
    found = read_metrics(where / "run" / "metrics.jsonl")
    return [{name: x for name, x in row.items() if not name.startswith(("wall_s", "time/", "speed/"))} for row in found]


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


def page(rows: list[Row]) -> str:
    lines = [
        "# The version matrix, as it ran",
        "",
        "Written by `tools/version_matrix.py` from the measured rows in `docs/version_matrix/`. The table lists only",
        "tests that ran: gloo, two cores shared with unrelated work, no GPU, no Transformer Engine.",
        "",
        "| megatron-core | Python, torch | patch | replay | every layout | training | checkpoints | conversion "
        "| export | example |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        patch = f"{row['alike']} of 20 alike" if row["release"] in PATCHED and "alike" in row else "none"
        patch += f", ALTERED: {', '.join(row['left'])}" if row.get("left") else ""
        difference = f"{row['training'][0]:.1e} ({row['training'][1]:.0f} s)" if "training" in row else "not run"
        cells = [
            row["release"],
            f"{row['python']}, {row['torch']}",
            patch,
            _tests(row, "replay"),
            _tests(row, "layouts"),
        ]
        cells += [difference, *(_tests(row, part) for part in ("checkpoints", "conversion", "export", "examples"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", EXPLAINED, "## Refused", "", REFUSED])


def _tests(row: Row, part: str) -> str:
    if part not in row:
        return "not run"
    passed, status, seconds = row[part]
    taken = "" if seconds is None else f" ({seconds:.0f} s)"
    return f"{passed} passed{taken}" if status == 0 else f"FAILED ({passed} passed)"


def _order(row: Row) -> list[list[int]]:
    return [[int(number) for number in row[name].split(".")] for name in ("release", "python")]


EXPLAINED = """\
The trainer needs 0.16 or newer since these rows were measured. 0.12 to 0.15, patched, replay in a loop of your own (the
column *example*).

From 0.17 on, wheels ask for Python 3.12. 0.18 and later import triton, an undeclared dependency. The tests of the
trainer and of replay's semantics also run releases from 0.17 on unpacked under 3.11.

On 0.19.2 and Python 3.12 further tests ran: replay's loops, contents, passes and operations on several ranks, and the
trainer's loop and saving. From 0.17 on, MoE layers are recomputed in training mode alone. A layer with a forward pass
in evaluation and a recomputation in training saves different tensors in the two passes. torch's checkpoints may refuse
the recomputation, with megarl and without.

- **Patch**: twenty ways of scoring (five, with and without groups, fp32 and bf16) are compared. The number counts the
  ways in which the patched release with an empty hook and the unpatched release have outputs and gradients equal bit
  for bit. After the patch was taken out, every file was as in the wheel.
- **Replay**: known bugs, semantics (gates, balancing losses, expert bias, prediction layers), errors, and three layouts
  with all recomputations: one rank, tp2 ep2 etp1, pp2 vpp2.
- **Every layout**: `tests/megatron/test_megatron_matrix.py`: layouts of up to four ranks, recomputations, routers.
- **Training**: two ranks, fixed rollouts. R3 with tp 2 and with pp 2 (every layer recomputed), R2 with ep 2 (experts
  recomputed), KL-GRPO with R3; finally a run with R3 and ep 2: sampled, saved, resumed. The number is the
  largest relative difference of any metric (losses, gradient norms, log-probabilities, router) from the installed
  0.16.1, on the same Python.
- **Checkpoints**: resumed runs, bit for bit on one rank, and with losses within 1e-5 on two ranks in ep 2, tp 2 and
  pp 2 vpp 2, from ep 2 into tp 2 ep 2 etp 1, and on four ranks into pp 2 ep 2; a checkpoint of a foreign model.
- **Conversion**: five families to `torch_dist` and back, bit for bit; a checkpoint of a run of the release and a
  checkpoint of Megatron-LM; the release's own loader reads files written by megarl.
- **Export**: the engine's weights from every layout, bit for bit; transformers reads a saved model as the same model.
- **Example**: `examples/plugged_in.py` on two ranks, R3 with tp 2 and R2 with pp 2 vpp 2, recomputed.

Checkpoints were not loaded across releases: keep the first release of a run. All releases ran with
newer versions of torch and numpy than older releases ask for. CUDA, NCCL and Transformer Engine were not run.

## Ways to the experts, read in each release from 0.16 on

| way | since | under replay |
|---|---|---|
| top-k of softmax, sigmoid, with groups, with a bias | 0.16 | asks the hook |
| `sqrtsoftplus` as score | 0.18 | asks the hook (`tests/megatron/test_megatron_newer.py`) |
| prediction layers, also a single layer for all (`mtp_use_repeated_layer`) | 0.17 | route natively, rows are counted |
| `tokens_per_sample` of packed sequences: MoE layers take [s, b] | 0.19 | rows are in the order of the routers |
| top-k in any order without gradients (`sorted=False`) | 0.18 | replayed as recorded; compared as sets |
| MoE layers that recompute in training mode alone | 0.17 | followed |
| sinkhorn; quantile balancing | 0.16; 0.19 | refused: the hook is not asked |
| fused top-k (`moe_router_fusion`) | 0.16 | refused |
| random logits (`moe_router_force_load_balancing`, `moe_router_force_biased`) | 0.16; 0.17 | refused |
| capacity of an expert, of a rank (HybridEP and NCCL EP, paged stash) | 0.16; 0.18 | refused |
| `mlp_chunks_for_training` | 0.18 | refused |
| combined 1F1B (`overlap_moe_expert_parallel_comm`) | 0.16 | refused |
| CUDA graphs: `local`, `full_iteration`, of the router, the MoE or the whole layer | 0.16 | refused |
| CUDA graphs of Transformer Engine over attention and dense layers alone | 0.16 | not refused; not run, no GPU |
| `InferenceTopKRouter` in training | 0.17 | asks the hook (`tests/megatron/test_megatron_newer.py`) |
| `InferenceTopKRouter` and the inference dispatchers inside Megatron's inference engine | 0.17 | not run |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--releases", nargs="*", choices=RELEASES, default=RELEASES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=Path, default=ROOT / "docs" / "version_matrix")
    parser.add_argument("--out", type=Path, help="the page, of all rows")
    args = parser.parse_args()
    minor = ".".join(platform.python_version_tuple()[:2])
    with tempfile.TemporaryDirectory() as common:
        for release in args.releases:
            measure(release, args.parts, args.rows / f"{release}-python{minor}.json", Path(common))
    if args.out:
        args.out.write_text(
            page(sorted((json.loads(file.read_text()) for file in args.rows.glob("*.json")), key=_order))
        )


if __name__ == "__main__":
    main()
