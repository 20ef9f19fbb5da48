"""``megarl convert``: chooses the direction, converts, checks, and prints a summary."""

from __future__ import annotations

import importlib.util
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from megarl.convert.conversion import Converted, Options, to_hf, to_megatron
from megarl.convert.integrity import Ranks
from megarl.convert.keys import Keys, Layers
from megarl.convert.megatron_files import torch_dist_folder
from megarl.errors import ConfigError

DTYPES = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Verify = Literal["none", "checksums", "logits"]


def installed_layers() -> Layers:
    """The layers of a Megatron model in this environment."""
    return "te" if importlib.util.find_spec("transformer_engine") else "local"


def convert(source: Path, out: Path, model: Path | None, options: Options, verify: Verify) -> Converted:
    """Convert a checkpoint into the other format, check it as asked, and print what was done.

    A collective call under torchrun. Raises ConfigError and CheckpointError as the conversions do. A failed comparison
    of logits leaves ``out`` in place: its weights equal the source's.
    """
    ranks = Ranks()
    if verify == "logits" and ranks.size > 1:
        raise ConfigError("--verify logits builds the models in one process, found torchrun; use --verify checksums")
    if not source.exists():
        raise ConfigError(f"{source} does not exist, expected a checkpoint folder")
    begun = time.monotonic()
    options = replace(options, verify=verify != "none")
    checkpoint = torch_dist_folder(source)
    if checkpoint != source or (checkpoint / "metadata.json").is_file():
        done = to_hf(checkpoint, out, model, options, ranks)
        pair = (out, checkpoint)
    elif (source / "config.json").is_file():
        if model is not None:
            raise ConfigError("--model belongs to a Megatron source; a Hugging Face folder has its own config.json")
        done = to_megatron(source, out, options, ranks)
        pair = (source, out)
    else:
        raise ConfigError(
            f"{source} is neither a Hugging Face folder (config.json) nor a torch_dist checkpoint (metadata.json)"
        )
    if ranks.rank == 0:
        _print_summary(done, time.monotonic() - begun, options.verify)
        if verify == "logits":
            _check_logits(done, *pair)
    return done


def _print_summary(done: Converted, seconds: float, verified: bool) -> None:
    if done.num_padded_rows:
        print(f"left out: {done.num_padded_rows} rows of the vocabulary beyond the model's {done.shape.vocab_size}")
    for name in done.dropped:
        print(f"left out, as asked: {name}")
    if done.num_kept:
        print(f"kept {done.num_kept} of {done.num_files} files from an interrupted conversion")
    if done.source_checksums:
        print("the source's files have the checksums of the conversion that wrote them")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{done.out}: {done.num_parameters} parameters, {done.num_bytes / 2**30:.3f} GiB in {done.num_files} files, "
        f"{seconds:.1f} s, peak memory {peak:.2f} GiB ({done.shape.family}, names of {done.keys.layers} layers)"
    )
    if verified:
        print("read back, inverted and compared with the source: every bit is equal")


def _check_logits(done: Converted, hf: Path, megatron: Path) -> None:
    wanted = Keys.of_megatron(done.shape, installed_layers())
    if done.keys != wanted:
        raise ConfigError(
            f"{done.out} is complete, but logits cannot be compared here: the Megatron checkpoint has the names "
            f"{done.keys}, and a model built here needs {wanted}"
        )
    from megarl.convert.logits import compare_logits

    check = compare_logits(hf, megatron, done.shape)
    print(f"logits of Megatron and transformers differ by at most {check.difference:.2g} (largest {check.largest:.3g})")
