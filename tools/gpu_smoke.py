"""Ten minutes on one GPU: does megarl train here, with and without Transformer Engine, how far apart are the engines,
and how fast is an update?

    python tools/gpu_smoke.py --out smoke [--size small] [--only doctor gap ...] [--limit 240]
                              [--sglang-python PYTHON] [--sglang-arguments "--attention-backend triton ..."]

It makes a model with random weights. First `megarl doctor` looks at the machine. Then the model is trained for two
steps in each case: bf16 without Transformer Engine, with it, with R3 and with the routers' own choice, and with weights
in bf16 and FP8 sent to SGLang. The servers are compared with transformers on the same GPU, and `megarl gap` compares
engines in all precisions. Twenty steps on FP8 rollouts are run with R3 and without. The last cases measure the loss
layer and an update at real layer shapes. Each case is a process of its own with a limit, and a case that fails does not
end the others.

OUT/report.json, OUT/report.txt and OUT/compare.html (the curves of the twenty steps) are made to be sent: versions,
checks, times, and the last lines of a case that fails. The exit code is 1 if a check failed or a case ended with an
error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
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

TOOLS = Path(__file__).resolve().parent
PACKAGES = (
    "torch triton megatron-core transformer-engine apex flash-attn nvidia-nccl-cu13 transformers sglang megarl-moe"
)
SIZES: Mapping[str, tuple[dict[str, int], int]] = {
    "tiny": ({}, 6),
    "small": ({"hidden_size": 1024, "num_heads": 16, "num_layers": 4, "expert_width": 512, "top_k": 4}, 256),
}
"""Arguments of write_tiny_model, and the longest response. FP8 for SGLang needs widths that 128 divides: "small"."""
WITHOUT_TE = "import sys; sys.modules['transformer_engine'] = None; "
MEGARL = "import sys; from megarl import cli; sys.exit(cli.main(sys.argv[1:]))"
REWARD = "def reward(*, prompt, response, answer):\n    return float(sum(map(ord, response)) % 2)\n"
MAX_RATIO_STD, MAX_K3, MAX_GRADIENT_GAP = 0.03, 1e-3, 0.1
"""bf16 against fp32: pi / mu of a token, and k3 (docs/tripwires.md); gradient norms with and without TE."""
MANY_STEPS = 20


@dataclass
class Case:
    """A command, and what it printed and measured."""

    name: str
    words: list[str]
    """Arguments of megarl, or of the script ``code``."""
    code: str = MEGARL
    """A program for ``python -c``, or the path of a script."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Of a run; empty for other commands."""
    not_run: str | None = None
    """Why it was left out."""
    exit_code: int | None = None
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last step."""
    first_gradient_norm: float = math.nan
    output: list[str] = field(default_factory=list)
    """All of a command that prints a table; the last lines of a run that failed."""

    @property
    def folder(self) -> str:
        return self.name.replace(",", "").replace(" ", "-").lower()


@dataclass(frozen=True)
class Check:
    """One comparison."""

    name: str
    passed: bool
    value: str
    expected: str


def versions() -> dict[str, str]:
    """Of packages, of the GPU and its driver, and of this checkout."""
    texts = {"python": platform.python_version()}
    for name in PACKAGES.split():
        try:
            texts[name] = version(name)
        except PackageNotFoundError:
            texts[name] = "none"
    device = torch.cuda.get_device_properties(0)
    texts["gpu"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
    texts["cuda, nccl"] = f"{torch.version.cuda}, {'.'.join(map(str, nccl.version()))}"
    for name, words in (
        ("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        ("commit", ["git", "-C", str(TOOLS), "rev-parse", "--short", "HEAD"]),
    ):
        try:
            texts[name] = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[0]
        except (OSError, subprocess.CalledProcessError) as error:
            texts[name] = f"unknown: {error}"
    sources = sorted((TOOLS.parent / "megarl").rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    texts["sources of megarl"] = f"{len(sources)} files, sha256 {digest[:16]}"  # also where git has no history
    return texts


def cases(work: Path, size: str, sglang_python: str | None, sglang_arguments: str) -> list[Case]:
    """All cases, with the reason of those that cannot run here."""
    no_te = None if find_spec("transformer_engine") else "no Transformer Engine in this environment"
    no_server = None if sglang_python or find_spec("sglang") else "no SGLang in this environment; see --sglang-python"
    no_fp8_server = f'--size {size}: FP8 needs "small"' if size == "tiny" and not no_server else no_server
    server = {
        "rollout.engine": "sglang",
        "rollout.dtype": "bf16",
        "sglang.gpus": [0],
        "sglang.mem_fraction": 0.3,
        "sglang.python": sglang_python or sys.executable,
        "sglang.arguments": shlex.split(sglang_arguments),
    }
    fp8_server = {**server, "sglang.fp8": True}
    fp8_local = {"rollout.dtype": "bf16", "rollout.fp8_rounding": True, "rollout.fp8_activations": True}
    many = {"run.steps": MANY_STEPS, "optim.lr": 1e-5, **(fp8_local if no_fp8_server else fp8_server)}
    many_name = f"{MANY_STEPS} steps on FP8 of " + ("the local engine" if no_fp8_server else "SGLang")
    model, prompts = str(work / "model"), str(work / "task" / "train.jsonl")
    gap = ["gap", model, "--prompts", prompts, "--responses", "16", "--tokens", str(SIZES[size][1])]
    served = _flags({**configuration(work, size), **server, "train.replay": "r3"})
    compared = [model, "--prompts", prompts, "--tokens", str(SIZES[size][1]), *_flags(server)]
    script = str(TOOLS / "compare_server.py")
    return [
        Case("doctor", ["doctor"]),
        _run("without TE, r3", {"train.replay": "r3"}, code=WITHOUT_TE + MEGARL),
        _run("with TE, r3", {"train.replay": "r3"}, no_te),
        _run("with TE, none", {"train.replay": "none"}, no_te),
        _run("bf16 to SGLang, r3", {"train.replay": "r3", **server}, no_server),
        _run("FP8 to SGLang, r3", {"train.replay": "r3", **fp8_server}, no_fp8_server),
        _run("FP8 to SGLang, memory released", {**fp8_server, "sglang.release_memory": True}, no_fp8_server),
        Case("bf16 SGLang against transformers", compared, script, not_run=no_server),
        Case("FP8 SGLang against transformers", [*compared, "--sglang.fp8", "true"], script, not_run=no_fp8_server),
        Case("gap", gap),
        Case("gap with SGLang", [*gap, "--config", str(work / "gap.toml"), *served], not_run=no_server),
        _run(f"{many_name}, r3", {"train.replay": "r3", **many}),
        _run(f"{many_name}, none", {"train.replay": "none", **many}),
        *_measurements(size),
    ]


def _measurements(size: str) -> Iterator[Case]:
    """The loss layer, and updates at the shapes of two and four layers of Qwen3-30B-A3B."""
    not_run = 'the figures are those of real shapes: --size "small"' if size == "tiny" else None
    sizes = {
        "loss layer": ("bench_logprobs.py", "--tokens 8192 --hidden 2048 --dtype bf16 --repeats 5"),
        "update": ("bench_update.py", "--layers 4 --vocab 2048 --profile"),
        "update, large vocabulary": ("bench_update.py", "--layers 2 --vocab 151936 --tokens 8192"),
    }
    for name, (script, words) in sizes.items():
        yield Case(name, words.split(), str(TOOLS / script), not_run=not_run)


def _run(name: str, flags: dict[str, Any], not_run: str | None = None, code: str = MEGARL) -> Case:
    return Case(name, ["train"], code, flags, not_run)


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Keys and values as `megarl` takes them."""
    words = []
    for key, value in values.items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


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
        "log.sinks": [],
    }


def run(case: Case, work: Path, size: str, limit_s: float) -> None:
    """Run the command; keep what it prints, and a run's metrics."""
    words = list(case.words)
    folder = work / "runs" / case.folder
    if case.flags:
        empty = work / "smoke.toml"
        empty.touch()
        words += [str(empty), *_flags({**configuration(work, size), **case.flags, "run.dir": str(folder)})]
    program = ["-c", case.code] if case.code.endswith(")") else [case.code]
    started, environment = time.monotonic(), {"OMP_NUM_THREADS": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join([str(TOOLS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = work / f"{case.folder}.log"
    with log.open("wb") as stream:
        try:
            command = [sys.executable, *program, *words]
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, timeout=limit_s)
            case.exit_code = done.returncode
        except subprocess.TimeoutExpired:
            case.exit_code = 124
    case.seconds = time.monotonic() - started
    lines = log.read_text(errors="replace").splitlines()
    if case.exit_code == 124:
        lines.append(f"gpu_smoke: ended after {limit_s:.0f} s; --limit gives a case more time")
    if case.exit_code or not case.flags:
        case.output = lines[-25:] if case.exit_code else [line for line in lines if "Warning" not in line][-60:]
    if case.exit_code or not case.flags:
        return
    records = read_metrics(folder / "metrics.jsonl")
    case.metrics = next(record for record in reversed(records) if record["kind"] == "step")
    case.first_gradient_norm = next(record["grad_norm"] for record in records if record["kind"] == "minibatch")


def checks(all_cases: Sequence[Case]) -> Iterator[Check]:
    """What must hold of the cases that ran."""
    ran = [case for case in all_cases if case.not_run is None]
    for case in ran:
        yield Check(f"{case.name}: ends", case.exit_code == 0, f"exit code {case.exit_code}", "0")
    runs = [case for case in ran if case.exit_code == 0 and case.flags]
    for case in runs:
        norm = case.first_gradient_norm
        yield Check(f"{case.name}: trains", 0 < norm < math.inf, f"gradient norm {norm:.4g}", "finite and above 0")
        for key, limit in (("rollout/ratio/std", MAX_RATIO_STD), ("rollout/k3", MAX_K3)):
            if "TE" in case.name:  # SGLang's kernels and FP8 weights differ by more
                value = case.metrics[key]
                yield Check(f"{case.name}: {key}", 0 < value < limit, f"{value:.3g}", f"above 0, below {limit}")
        if case.flags.get("train.replay") == "r3":
            flip = case.metrics["router/flip"]
            yield Check(f"{case.name}: replayed experts are the engine's", flip == 0, f"flip {flip:.2%}", "0")
    norms = {case.name: case.first_gradient_norm for case in runs}
    if {"without TE, r3", "with TE, r3"} <= norms.keys():
        without_te, with_te = norms["without TE, r3"], norms["with TE, r3"]
        text = f"{without_te:.4g} and {with_te:.4g}"
        is_near = abs(with_te / without_te - 1) < MAX_GRADIENT_GAP
        yield Check("the same gradient", is_near, text, f"within {MAX_GRADIENT_GAP:.0%}")


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
        lines += [f"    | {line}" for line in case["output"]]
    lines.append("")
    for check in report["checks"]:
        mark = "ok    " if check["passed"] else "FAILED"
        lines.append(f"{mark} {check['name']}: found {check['value']}, expected {check['expected']}")
    return "\n".join(lines) + "\n"


def compare(all_cases: Sequence[Case], work: Path) -> None:
    """Draw the curves of the long runs into one page."""
    folders = [str(work / "runs" / case.folder) for case in all_cases if case.metrics and "run.steps" in case.flags]
    if folders:
        words = ["report", *folders, "--out", str(work / "compare.html")]
        subprocess.run([sys.executable, "-c", MEGARL, *words], check=False, cwd=TOOLS.parent)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_smoke"), help="folder for the report; must not exist")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", nargs="+", default=[], help="beginnings of the cases' names; default all")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a case")
    parser.add_argument("--sglang-python", help="interpreter of an environment with SGLang")
    parser.add_argument("--sglang-arguments", default="", help="further arguments of its servers, in one word")
    options = parser.parse_args(words)
    work: Path = options.out.absolute()
    if work.exists():
        parser.error(f"--out: {work} exists; remove it, or name another folder")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no CUDA device, and one is expected")
    work.mkdir(parents=True)
    (work / "smoke_reward.py").write_text(REWARD)
    (work / "gap.toml").touch()
    write_sort_task(work / "task", seed=0)
    write_tiny_model(work / "model", seed=0, **SIZES[options.size][0])
    all_cases = cases(work, options.size, options.sglang_python, options.sglang_arguments)
    for case in all_cases:
        if options.only and not case.name.startswith(tuple(options.only)):
            case.not_run = case.not_run or "left out by --only"
        if case.not_run is None:
            print(f"gpu_smoke: {case.name} ...", flush=True)
            run(case, work, options.size, options.limit)
    compare(all_cases, work)
    report = {
        "size": options.size,
        "versions": versions(),
        "cases": [*map(asdict, all_cases)],
        "checks": [*map(asdict, checks(all_cases))],
    }
    (work / "report.json").write_text(json.dumps(report, indent=1))
    (work / "report.txt").write_text(to_text(report))
    print(f"{to_text(report)}\nsend {work / 'report.json'}, {work / 'report.txt'} and {work / 'compare.html'}")
    return 0 if all(check["passed"] for check in report["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
