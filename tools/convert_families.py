"""Converts a tiny model of every family, and one large one, and writes the table of docs/convert.md as it ran.

python tools/convert_families.py [--large-gib 4] [--out docs/convert_table.md]
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megarl.files.writing import write_atomically

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_families import FAMILIES, write_family

_LARGE = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 64, "mlp_only_layers": []}
_LARGE_LAYER_GIB = 64 * 3 * 1024 * 768 * 2 / 2**30
_WATCHED = """
import sys, threading, time
peak = 0
def watch():
    global peak
    while True:
        line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
        peak = max(peak, int(line.split()[1]))
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
from megarl import cli
code = cli.main(["convert", *sys.argv[1:]])
print("peak", peak)
sys.exit(code)
"""


@dataclass(frozen=True)
class Ran:
    """One conversion in a process of its own."""

    seconds: float
    peak_mib: float
    """Of anonymous memory: what a process has for itself, mapped files left out."""
    said: str


def convert(source: Path, out: Path, *words: str) -> Ran:
    begun = time.perf_counter()
    command = [sys.executable, "-c", _WATCHED, str(source), str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{source} -> {out}: {done.stderr[-1000:]}")
    return Ran(time.perf_counter() - begun, int(done.stdout.split("peak ")[-1]) / 1024, done.stdout)


def row_of(family: str, folder: Path) -> str:
    source = write_family(folder / "hf", family)
    there = convert(source, folder / "megatron", "--layers", "local", "--verify", "logits")
    back = convert(folder / "megatron", folder / "back", "--verify", "logits")
    bits = "every bit" if "every bit is equal" in there.said and "every bit is equal" in back.said else "DIFFERENT"
    logits = [ran.said.split("at most ")[1].split()[0] for ran in (there, back)]
    numbers = f"{there.peak_mib:.0f} / {back.peak_mib:.0f} | {there.seconds:.1f} / {back.seconds:.1f}"
    return f"| {family} | {logits[0]} / {logits[1]} | {bits} | {numbers} |"


def large_row(folder: Path, gib: float) -> str:
    layers = max(1, round(gib / _LARGE_LAYER_GIB))
    source = write_family(folder / "hf", "qwen3_moe", **_LARGE, num_hidden_layers=layers, dtype="bfloat16")
    size = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 2**30
    there = convert(source, folder / "megatron", "--layers", "te", "--verify", "none")
    checked = convert(source, folder / "checked", "--layers", "te")
    back = convert(folder / "megatron", folder / "back", "--shard-gib", "0.5")
    return (
        f"A Qwen3-MoE of {size:.2f} GiB in bf16 ({layers} layers, {_LARGE_LAYER_GIB:.2f} GiB each): to Megatron "
        f"{there.seconds:.0f} s and {there.peak_mib:.0f} MiB ({checked.seconds:.0f} s with verification), back in "
        f"files of 0.5 GiB {back.seconds:.0f} s and {back.peak_mib:.0f} MiB, verification included."
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large-gib", type=float, default=4.0, help="size of the large model, default 4")
    parser.add_argument("--out", type=Path, default=Path("docs/convert_table.md"))
    args = parser.parse_args(words)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            lines.append(row_of(family, Path(folder) / family))
            print(lines[-1], flush=True)
        large = large_row(Path(folder) / "large", args.large_gib)
        print(large)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers"))
    head = [
        "# Conversions as they ran",
        "",
        f"By `tools/convert_families.py`: {platform.machine()}, Python {platform.python_version()}, {versions}.",
        "Numbers are to Megatron / back, each in a process of its own, imports included. Memory is the peak of",
        "anonymous memory; most of it is torch, Megatron and transformers themselves.",
        "",
        "| family | largest difference of fp32 logits | round trip | peak MiB | seconds |",
        "|---|---|---|---|---|",
    ]
    write_atomically(args.out, "\n".join([*head, *lines, "", large, ""]).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
