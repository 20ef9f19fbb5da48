"""``make bench``: every benchmark of this folder, one after the other, and docs/benchmarks.md from what they measured.

    python tools/bench.py [--out docs/benchmarks.md] [--work runs/bench] [NAME ...]

Each benchmark compares its variants side by side in one run of its own, and writes figures with spreads and budgets
(``tools/bench_rows.py``). A figure that breaks its budget makes the exit code 1; the page says so, and is written.
With NAMEs, only these run; figures of the others are those of the last time, from the folder ``--work``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row

HERE = Path(__file__).parent
MODEL, PROMPTS = "{work}/model", "{work}/task/train.jsonl"
ROWS = ("grpo", "minirl", "dapo", "gspo", "ctpo", "dppo_kl", "geo_rs", "deepseek_v32")
TINY = ("--model", MODEL, "--prompts", PROMPTS)


@dataclass(frozen=True, slots=True)
class Bench:
    """One script, its arguments, and what its figures say."""

    script: str
    words: tuple[str, ...]
    title: str
    note: str
    ranks: int = 1


BENCHES: dict[str, Bench] = {
    "quickstart": Bench(
        "bench_quickstart.py", ("--repeats", "2"), "The quickstart",
        "On two free cores, from nothing to a report: least to largest.",
    ),
    "trl": Bench(
        "bench_trl.py", (), "A step of the quickstart beside TRL, and the share of the loop",
        "CPU seconds of one process with one thread each, turn by turn: median, least to largest. The overhead is all\n"
        "of a step but the model's passes and the optimizer.",
    ),
    "plain": Bench(
        "bench_plain.py", (*TINY, "--repeats", "12"), "One update: plain Megatron, transformers",
        "Forward, backward and optimizer step of all responses of a step of the quickstart, CPU seconds.",
    ),
    "step": Bench(
        "bench_step.py", (*TINY, "--repeats", "8"), "Replay and tripwires",
        "A step after sampling, CPU seconds; `unhooked` has no hook of megarl on Megatron's routers.",
    ),
    "old_pass": Bench(
        "bench_old_pass.py", (*TINY, "--repeats", "8"), "The old-log-prob pass",
        "A step after sampling, without a part of the pass or without all of it, for N mini-batches.",
    ),
    "coefficients": Bench(
        "bench_coefficients.py", ("--rows", *ROWS), "Objectives",
        "Coefficients and statistics of two million tokens, on one thread; without --rows the script measures all.",
    ),
    "logprobs": Bench(
        "bench_logprobs.py", ("--tokens", "2048", "--hidden", "256"), "Log-probabilities without logits",
        "Blocks of logits against whole logits, forward and backward.",
    ),
    "sync": Bench(
        "bench_sync.py", (), "The weight update",
        "From one rank of Megatron to a stand-in server on this machine, and to the local engine: CPU seconds of the\n"
        "trainer against a copy of the same bytes into new memory. Least to largest.",
    ),
    "scale": Bench(
        "bench_scale.py", (), "Costs that grow with the run",
        "512 ranks and up to 1e6 prompts in one process. The exponent is that of the power law through three sizes.",
    ),
    "traces": Bench(
        "bench_traces.py", (), "Routing traces",
        "48 layers, top-8 of 128 experts, one thread, checks included: the fastest of the repetitions, because a busy\n"
        "machine only slows them; the interval is that of the median.",
    ),
    "sglang": Bench(
        "bench_sglang.py", (), "SGLang as it is used",
        "A real server of a tiny model on this machine.",
    ),
}  # fmt: skip


def prepare(work: Path) -> None:
    """The quickstart's task, and its model after the cold start."""
    if (work / "model" / "config.json").exists():
        return
    from megarl.data.tiny import write_sort_task, write_tiny_model
    from megarl.ops.quickstart import config_text

    work.mkdir(parents=True, exist_ok=True)
    config = work / "quickstart.toml"
    paths = {name: work / name for name in ("run", "model", "task")}
    config.write_text(config_text("qwen3_moe", config=config, **paths))
    write_tiny_model(work / "untrained")
    write_sort_task(work / "task")
    words = ["sft", str(config), "--model.path", str(work / "untrained"), "--parallel.ep", "1"]
    subprocess.run([sys.executable, "-m", "megarl.cli", *words], check=True)


def run(name: str, work: Path) -> bool:
    """Run one benchmark; return whether it wrote its figures."""
    bench, file = BENCHES[name], work / f"{name}.json"
    file.unlink(missing_ok=True)
    words = [word.format(work=work) for word in bench.words]
    program = [sys.executable]
    if bench.ranks > 1:
        program += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={bench.ranks}"]
    started = time.monotonic()
    with (work / f"{name}.log").open("w") as log:
        command = [*program, str(HERE / bench.script), *words, "--json", str(file)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, env=environment)
    wrote = file.exists()
    print(f"{name}: {time.monotonic() - started:.0f} s{'' if wrote else f', no figures; see {log.name}'}", flush=True)
    return wrote


def rows_of(name: str, work: Path) -> list[Row]:
    file = work / f"{name}.json"
    return [Row(**row) for row in json.loads(file.read_text())] if file.exists() else []


def page(work: Path) -> str:
    """docs/benchmarks.md."""
    models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    cpu = models[0] if models else platform.machine()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers"))
    parts = [
        "# Benchmarks\n",
        "`make bench` measures all of this and writes this page. Variants of one table ran side by side, turn by turn.",
        "A ratio is the median of pairs, with the 95 % interval of that median unless the table says otherwise. A",
        "figure that breaks its budget fails `make bench`. Figures of one machine say little of another.\n",
        f"Measured on {date.today()}: {cpu}, {os.cpu_count()} cores, no GPU, Python {platform.python_version()},",
        f"{packages}.",
    ]
    for name, bench in BENCHES.items():
        rows = rows_of(name, work)
        if not rows:
            continue
        parts.append(f"\n## {bench.title}\n\n{bench.note} (`tools/{bench.script}`)\n")
        parts.append("| figure | what | value | interval | budget |\n|---|---|---|---|---|")
        parts += [_line(row) for row in rows]
    return "\n".join(parts) + "\n"


def _line(row: Row) -> str:
    unit = "" if row.unit == "x" else f" {row.unit}"
    budget = "" if row.budget is None else f"{'<=' if row.kind == 'at_most' else '>='} {row.budget:g}"
    if not row.holds:
        budget = f"**broken:** {budget}"
    return f"| {row.name} | {row.what} | {row.value:.3g}{unit} | {row.low:.3g} to {row.high:.3g} | {budget} |"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    parser.add_argument("--work", type=Path, default=HERE.parent / "runs" / "bench")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in BENCHES]:
        parser.error(f"found {unknown[0]}, expected one of {', '.join(BENCHES)}")
    work = arguments.work.resolve()
    prepare(work)
    silent = [name for name in arguments.names or BENCHES if not run(name, work)]
    arguments.out.write_text(page(work))
    broken = [row for name in BENCHES for row in rows_of(name, work) if not row.holds]
    for row in broken:
        print(f"BROKEN: {row.name}: {row.value:.3g}, {str(row.kind).replace('_', ' ')} {row.budget:g}")
    print(f"bench: {arguments.out}; {len(broken)} budgets broken, {len(silent)} without figures")
    return int(bool(broken or silent))


if __name__ == "__main__":
    sys.exit(main())
