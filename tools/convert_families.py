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

import torch
import torch.distributed as dist

from megarl import enable_cpu
from megarl.files.writing import write_atomically
from megarl.models.shapes import ModelShape, read_shape

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from tiny_families import FAMILIES, write_family
from torch_dist_weights import read_weights

_LENGTHS = (17, 32, 5)
_TOLERANCE = 1e-5
"""Largest difference of fp32 logits: absolute for logits up to 1, relative to the largest logit beyond."""
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


def compare_logits(hf: Path, megatron: Path, shape: ModelShape) -> float:
    """Load both checkpoints in fp32, each with the library of its format; compare logits of three random sequences."""
    logits, expected = _compute_megatron(megatron, shape), _compute_hf(hf, shape)
    difference, largest = float((logits - expected).abs().max()), float(expected.abs().max())
    if not difference <= _TOLERANCE * max(1.0, largest):
        raise SystemExit(f"logits of Megatron and transformers differ by {difference:.3g} (largest {largest:.3g})")
    return difference


def _make_sequences(shape: ModelShape) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (min(length, shape.max_sequence_length) for length in _LENGTHS)
    return [torch.randint(shape.vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def _compute_hf(folder: Path, shape: ModelShape) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    settings = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    return torch.cat([model.eval()(tokens[None]).logits[0] for tokens in _make_sequences(shape)])


@torch.no_grad()
def _compute_megatron(path: Path, shape: ModelShape) -> torch.Tensor:
    enable_cpu()
    from megatron.core import parallel_state, tensor_parallel

    from megarl.megatron.model import build_model, transformer_config
    from megarl.stand_ins.attention import PackedSequences

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    (model,) = build_model(shape, transformer_config(shape, {}, torch.float32))
    read_weights(path, [model])
    sequences = _make_sequences(shape)
    tokens = torch.cat(sequences)[None]
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    logits = model.eval()(
        input_ids=tokens,
        position_ids=torch.zeros_like(tokens),
        attention_mask=None,
        packed_seq_params=PackedSequences.of(bounds),
    )
    return logits[0]


def row_of(family: str, folder: Path) -> str:
    source = write_family(folder / "hf", family)
    there = convert(source, folder / "megatron", "--layers", "local")
    back = convert(folder / "megatron", folder / "back")
    bits = "every bit" if "every bit is equal" in there.said and "every bit is equal" in back.said else "DIFFERENT"
    hf_folders, shape = (source, folder / "back"), read_shape(source)
    logits = [f"{compare_logits(hf, folder / 'megatron', shape):.2g}" for hf in hf_folders]
    numbers = f"{there.peak_mib:.0f} / {back.peak_mib:.0f} | {there.seconds:.1f} / {back.seconds:.1f}"
    return f"| {family} | {logits[0]} / {logits[1]} | {bits} | {numbers} |"


def large_row(folder: Path, gib: float) -> str:
    layers = max(1, round(gib / _LARGE_LAYER_GIB))
    source = write_family(folder / "hf", "qwen3_moe", **_LARGE, num_hidden_layers=layers, dtype="bfloat16")
    size = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 2**30
    there = convert(source, folder / "megatron", "--layers", "te")
    back = convert(folder / "megatron", folder / "back", "--shard-gib", "0.5")
    return (
        f"A Qwen3-MoE of {size:.2f} GiB in bf16 ({layers} layers, {_LARGE_LAYER_GIB:.2f} GiB each): to Megatron "
        f"{there.seconds:.0f} s and {there.peak_mib:.0f} MiB, back in "
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
