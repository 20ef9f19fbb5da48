"""``megarl convert``: chooses the direction, converts, checks, and prints a summary."""

import json
import os
import resource
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megarl.convert.conversion import Converted, Options, to_hf, to_megatron
from megarl.convert.job import Ranks
from megarl.convert.megatron_files import Keys, Layers, torch_dist_folder
from megarl.errors import CheckpointError, ConfigError, printable
from megarl.megatron.checkpoints.checkpoint import read_weights
from megarl.megatron.model import build_model, transformer_config
from megarl.models.hf_files import describe_left_out
from megarl.models.shapes import ModelShape
from megarl.stand_ins.attention import PackedSequences
from megarl.stand_ins.te import find_te

DTYPES = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Verify = Literal["none", "checksums", "logits"]
_LENGTHS = (17, 32, 5)
TOLERANCE = 1e-5
"""Largest difference of fp32 logits, for logits of size up to 1; relative to the largest one beyond."""


def installed_layers() -> Layers:
    return "te" if find_te()[0] else "local"


def convert(
    source: Path, out: Path, model: Path | None, options: Options, verify: Verify, as_json: bool = False
) -> None:
    """Convert a checkpoint into the other format, check it as asked, and print what was done; a collective call."""
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
    elif os.path.lexists(source / "config.json"):
        if model is not None:
            raise ConfigError("--model belongs to a Megatron source; a Hugging Face folder has its own config.json")
        done = to_megatron(source, out, options, ranks)
        pair = (source, out)
    else:
        raise ConfigError(
            f"{source} is neither a Hugging Face folder (config.json) nor a torch_dist checkpoint (metadata.json)"
        )
    if ranks.rank == 0:
        (_print_json if as_json else _print_summary)(done, time.monotonic() - begun, options.verify)
    if verify == "logits":
        if done.keys != (wanted := Keys.of_megatron(done.shape, installed_layers())):
            raise ConfigError(
                f"{done.out} is complete, but logits cannot be compared here: the Megatron checkpoint has the names "
                f"{done.keys}, and a model built here needs {wanted}"
            )
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            compare_logits(*pair, done.shape)


def _print_summary(done: Converted, seconds: float, verified: bool) -> None:
    if done.num_padded_rows:
        print(f"left out: {done.num_padded_rows} rows of the vocabulary beyond the model's {done.shape.vocab_size}")
    if left_out := describe_left_out(done.dropped):
        print(printable(left_out))
    if done.num_kept:
        print(f"kept {done.num_kept} of {done.num_files} files from an interrupted conversion")
    if done.source_checksums:
        print("the source's files have the checksums of the run or the conversion that wrote them")
    elif verified:
        print("the source has no checksums: whether its files are as they were written is not verified")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{done.out}: {done.num_parameters} parameters, {done.num_bytes / 2**30:.3f} GiB in {done.num_files} files, "
        f"{seconds:.1f} s, peak memory {peak:.2f} GiB ({done.shape.family}, names of {done.keys.layers} layers)"
    )
    if verified:
        print("read back, inverted and compared with the source: every bit is equal")


def _print_json(done: Converted, seconds: float, verified: bool) -> None:
    names = ("num_parameters", "num_bytes", "num_files", "num_kept", "num_padded_rows", "source_checksums")
    found = {name: getattr(done, name) for name in names} | {"dropped": [*done.dropped], "family": done.shape.family}
    print(json.dumps({"out": str(done.out), "seconds": seconds, "verified": verified, **found}, indent=1))


def compare_logits(hf: Path, megatron: Path, shape: ModelShape) -> None:
    """Load both checkpoints in fp32, each with its own library, and compare logits of three random sequences.

    One process must hold the model twice. CheckpointError if they differ by more than TOLERANCE.
    """
    found, wanted = _compute_megatron(megatron, shape), _compute_hf(hf, shape)
    difference, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not difference <= TOLERANCE * max(1.0, largest):
        raise CheckpointError(
            f"logits of Megatron and transformers differ by {difference:.3g} (largest {largest:.3g}), expected at most "
            f"{TOLERANCE:g} of it: the weights are equal, so one of the two built another model"
        )
    print(f"logits of Megatron and transformers differ by at most {difference:.2g} (largest {largest:.3g})")


def _make_sequences(shape: ModelShape) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (min(length, shape.max_sequence_length) for length in _LENGTHS)
    return [torch.randint(shape.vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def _compute_hf(folder: Path, shape: ModelShape) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    try:
        settings = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: transformers cannot load it, so logits cannot be compared ({error})") from error
    return torch.cat([model.eval()(tokens[None]).logits[0] for tokens in _make_sequences(shape)])


@torch.no_grad()
def _compute_megatron(path: Path, shape: ModelShape) -> torch.Tensor:
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    is_guest = parallel_state.model_parallel_is_initialized()  # another model lives in this process
    if not is_guest:
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        (model,) = build_model(shape, transformer_config(shape, {}, torch.float32))
        read_weights(path, [model])
        sequences = _make_sequences(shape)
        tokens = torch.cat(sequences)[None]
        bounds = torch.tensor([0, *(len(one) for one in sequences)]).cumsum(0)
        logits = model.eval()(
            input_ids=tokens,
            position_ids=torch.zeros_like(tokens),
            attention_mask=None,
            packed_seq_params=PackedSequences.of(bounds),
        )
    finally:
        if not is_guest:
            parallel_state.destroy_model_parallel()
    return logits[0]
