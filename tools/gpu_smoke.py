"""Ten minutes on one GPU: does megarl train here, with and without Transformer Engine, and how fast?

    python tools/gpu_smoke.py --out smoke [--size small] [--sglang-python PYTHON]

It makes a model with random weights and trains it for two steps in each case: bf16 without Transformer Engine, with it,
with R3 and with the routers' own choice, and with FP8 weights sent to SGLang. Each is an ordinary `megarl train` in a
process of its own. The engine samples in fp32, so the log-probabilities of training are compared with those of fp32.

OUT/report.json and OUT/report.txt are made to be sent: versions, checks, times, and the last lines of a run that fails.
The exit code is 1 if a check failed or a run ended with an error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.run.metrics_log import read_metrics

PACKAGES = "torch triton megatron-core transformer-engine apex flash-attn nvidia-nccl-cu13 transformers sglang megarl"
SIZES: Mapping[str, tuple[dict[str, int], int]] = {
    "tiny": ({}, 6),
    "small": ({"hidden_size": 1024, "num_heads": 16, "num_layers": 4, "expert_width": 512, "top_k": 4}, 256),
}
"""Arguments of write_tiny_model, and the longest response. FP8 for SGLang needs widths that 128 divides: "small"."""
WITHOUT_TE = "import sys; sys.modules['transformer_engine'] = None; "
TRAIN = "import sys; from megarl import cli; sys.exit(cli.main(['train', *sys.argv[1:]]))"
REWARD = "def reward(*, prompt, response, answer):\n    return float(sum(map(ord, response)) % 2)\n"
MAX_RATIO_STD, MAX_K3, MAX_GRADIENT_GAP = 0.03, 1e-3, 0.1
"""bf16 against fp32: pi / mu of a token, and k3 (docs/tripwires.md); gradient norms with and without TE."""


@dataclass
class Case:
    """A run, what it was, and what it found."""

    name: str
    flags: dict[str, Any]
    code: str = TRAIN
    not_run: str | None = None
    """Why it was left out."""
    exit_code: int | None = None
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""
    first_gradient_norm: float = math.nan
    tail: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Check:
    """One comparison."""

    name: str
    passed: bool
    found: str
    expected: str


def versions() -> dict[str, str]:
    """Of packages, of the GPU and its driver, and of this checkout."""
    found = {"python": platform.python_version()}
    for name in PACKAGES.split():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    device = torch.cuda.get_device_properties(0)
    found["gpu"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
    found["cuda, nccl"] = f"{torch.version.cuda}, {'.'.join(map(str, nccl.version()))}"
    for name, words in (
        ("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        ("commit", ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
    ):
        try:
            found[name] = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[0]
        except (OSError, subprocess.CalledProcessError) as error:
            found[name] = f"unknown: {error}"
    return found


def cases(size: str, sglang_python: str | None) -> list[Case]:
    """What is run here."""
    no_te = None if find_spec("transformer_engine") else "no Transformer Engine in this environment"
    server = {
        "rollout.engine": "sglang",
        "rollout.dtype": "bf16",
        "sglang.fp8": True,
        "sglang.gpus": [0],
        "sglang.release_memory": True,
        "sglang.mem_fraction": 0.4,
        "sglang.python": sglang_python or sys.executable,
    }
    no_server = None if sglang_python or find_spec("sglang") else "no SGLang in this environment; see --sglang-python"
    no_server = f'--size {size}: FP8 needs "small"' if size == "tiny" and not no_server else no_server
    return [
        Case("without TE, r3", {"train.replay": "r3"}, WITHOUT_TE + TRAIN),
        Case("with TE, r3", {"train.replay": "r3"}, not_run=no_te),
        Case("with TE, none", {"train.replay": "none"}, not_run=no_te),
        Case("FP8 to SGLang, r3", {"train.replay": "r3", **server}, not_run=no_server),
    ]


def configuration(work: Path, size: str) -> dict[str, Any]:
    """Keys of every run."""
    longest = SIZES[size][1]
    return {
        "run.steps": 2,
        "model.path": str(work / "model"),
        "model.dtype": "bf16",
        "data.train": str(work / "task" / "train.jsonl"),
        "data.max_prompt_tokens": 16,
        "reward.function": "smoke_reward:reward",
        "rollout.dtype": "fp32",
        "rollout.prompts_per_step": 4 if size == "small" else 2,
        "rollout.group_size": 4,
        "rollout.max_response_tokens": longest,
        "train.mini_batches": 2,
        "train.micro_batch_tokens": 4 * (16 + longest),
        "optim.lr": 1e-4,
        "checkpoint.at_end": False,
        "log.tensorboard": False,
    }


def run(case: Case, work: Path, size: str) -> None:
    """Train; keep what the run says of itself."""
    folder = work / "runs" / case.name.replace(",", "").replace(" ", "-").lower()
    empty = work / "smoke.toml"
    empty.touch()
    flags = {**configuration(work, size), **case.flags, "run.dir": str(folder)}
    words = [sys.executable, "-c", case.code, str(empty)]
    for key, value in flags.items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    started = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    case.seconds, case.exit_code = time.monotonic() - started, result.returncode
    (work / f"{folder.name}.log").write_text(result.stdout)
    if result.returncode:
        case.tail = result.stdout.splitlines()[-20:]
        return
    records = read_metrics(folder / "metrics.jsonl")
    case.metrics = next(record for record in reversed(records) if record["kind"] == "step")
    case.first_gradient_norm = next(record["grad_norm"] for record in records if record["kind"] == "minibatch")


def checks(found: Sequence[Case]) -> Iterator[Check]:
    """What must hold of the cases that ran."""
    ran = [case for case in found if case.not_run is None]
    for case in ran:
        yield Check(f"{case.name}: ends", case.exit_code == 0, f"exit code {case.exit_code}", "0")
    ended = [case for case in ran if case.exit_code == 0]
    for case in ended:
        norm = case.first_gradient_norm
        yield Check(f"{case.name}: trains", 0 < norm < math.inf, f"gradient norm {norm:.4g}", "finite and above 0")
        for key, limit in (("rollout/ratio/std", MAX_RATIO_STD), ("rollout/k3", MAX_K3)):
            if "SGLang" not in case.name:  # FP8 weights differ by more
                value = case.metrics[key]
                yield Check(f"{case.name}: {key}", 0 < value < limit, f"{value:.3g}", f"above 0, below {limit}")
        if case.flags["train.replay"] == "r3":
            flip = case.metrics["router/flip"]
            yield Check(f"{case.name}: replayed experts are the engine's", flip == 0, f"flip {flip:.2%}", "0")
    norms = {case.name: case.first_gradient_norm for case in ended}
    if {"without TE, r3", "with TE, r3"} <= norms.keys():
        one, two = norms["without TE, r3"], norms["with TE, r3"]
        text = f"{one:.4g} and {two:.4g}"
        yield Check("the same gradient", abs(two / one - 1) < MAX_GRADIENT_GAP, text, f"within {MAX_GRADIENT_GAP:.0%}")


def to_text(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [f"{name:20} {value}" for name, value in report["versions"].items()]
    for case in report["cases"]:
        if case["not_run"]:
            lines += ["", f"{case['name']}: NOT RUN, {case['not_run']}"]
            continue
        lines += ["", f"{case['name']}: exit code {case['exit_code']} after {case['seconds']:.0f} s"]
        shown = ("rollout/k3", "rollout/ratio/std", "router/flip", "router/native/flip", "speed/tokens_per_s")
        times = [key for key in case["metrics"] if key.startswith("time/")]
        lines += [f"    {key:24} {case['metrics'][key]:.4g}" for key in (*shown, *times) if key in case["metrics"]]
        lines += [f"    | {line}" for line in case["tail"]]
    lines.append("")
    for check in report["checks"]:
        mark = "ok    " if check["passed"] else "FAILED"
        lines.append(f"{mark} {check['name']}: found {check['found']}, expected {check['expected']}")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_smoke"), help="folder for the report; must not exist")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--sglang-python", help="interpreter of an environment with SGLang")
    given = parser.parse_args(words)
    work: Path = given.out.absolute()
    if work.exists():
        parser.error(f"--out: {work} exists; remove it, or name another folder")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device, and one is expected")
    work.mkdir(parents=True)
    (work / "smoke_reward.py").write_text(REWARD)
    write_sort_task(work / "task", seed=0)
    write_tiny_model(work / "model", seed=0, **SIZES[given.size][0])
    found = cases(given.size, given.sglang_python)
    for case in found:
        if case.not_run is None:
            print(f"gpu_smoke: {case.name} ...", flush=True)
            run(case, work, given.size)
    made = list(checks(found))
    report = {
        "size": given.size,
        "versions": versions(),
        "cases": [*map(asdict, found)],
        "checks": [*map(asdict, made)],
    }
    (work / "report.json").write_text(json.dumps(report, indent=1))
    (work / "report.txt").write_text(to_text(report))
    print(f"{to_text(report)}\nsend {work / 'report.json'} and {work / 'report.txt'}")
    return 0 if all(check.passed for check in made) else 1


if __name__ == "__main__":
    sys.exit(main())
