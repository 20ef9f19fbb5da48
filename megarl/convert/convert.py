"""``megarl convert``: choose the direction, convert, check, and print a summary."""

import json
import os
import resource
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megarl.convert.conversion import Converted, to_hf, to_megatron
from megarl.convert.job import Options, Ranks
from megarl.convert.megatron_files import Keys, torch_dist_folder
from megarl.errors import CheckpointError, ConfigError, printable
from megarl.megatron.checkpoints.checkpoint import read_weights
from megarl.megatron.model import build_model, transformer_config
from megarl.models.hf_files import describe_left_out
from megarl.models.shapes import ModelShape
from megarl.stand_ins.attention import PackedSequences
from megarl.stand_ins.te import find_te

DTYPES = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LENGTHS = (17, 32, 5)
TOLERANCE = 1e-5
"""Largest difference of fp32 logits: absolute for logits up to 1, relative to the largest logit beyond."""


def installed_layers() -> Literal["local", "te"]:
    """Return the layers that Megatron builds in this environment."""
    return "te" if find_te()[0] else "local"


def convert(
    source: Path, out: Path, model: Path | None, options: Options, compare: bool = False, as_json: bool = False
) -> None:
    """Convert a checkpoint into the other format and print a summary; all ranks call together.

    compare: build both models, and compare the logits. ConfigError for a source that is no checkpoint.
    """
    ranks = Ranks()
    if compare and ranks.size > 1:
        raise ConfigError("--verify logits builds the models in one process, found torchrun; use --verify checksums")
    if not source.exists():
        raise ConfigError(f"{source} does not exist, expected a checkpoint folder")
    start_s = time.monotonic()
    checkpoint = torch_dist_folder(source)
    if checkpoint != source or (checkpoint / "metadata.json").is_file():
        result = to_hf(checkpoint, out, model, options, ranks)
        hf, megatron = out, checkpoint
    elif os.path.lexists(source / "config.json"):
        if model is not None:
            raise ConfigError("--model belongs to a Megatron source; a Hugging Face folder has its own config.json")
        result = to_megatron(source, out, options, ranks)
        hf, megatron = source, out
    else:
        raise ConfigError(
            f"{source} is neither a Hugging Face folder (config.json) nor a torch_dist checkpoint (metadata.json)"
        )
    if ranks.rank == 0:
        (_print_json if as_json else _print_summary)(result, time.monotonic() - start_s, options.verify)
    if compare:
        if result.keys != (needed := Keys.of_megatron(result.shape, installed_layers())):
            raise ConfigError(
                f"{result.out} is complete, but logits cannot be compared here: the Megatron checkpoint has the names "
                f"{result.keys}, and a model built here needs {needed}"
            )
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            compare_logits(hf, megatron, result.shape)


def _print_summary(result: Converted, seconds: float, verified: bool) -> None:
    if result.num_padded_rows:
        print(f"left out: {result.num_padded_rows} rows of the vocabulary beyond the model's {result.shape.vocab_size}")
    if line := describe_left_out(result.dropped):
        print(printable(line))
    if result.num_kept:
        print(f"kept {result.num_kept} of {result.num_files} files from an interrupted conversion")
    if result.source_checksums:
        print("the source's files have the checksums of the run or the conversion that wrote them")
    elif verified:
        print("the source has no checksums: whether its files are as they were written is not verified")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{result.out}: {result.num_parameters} parameters, {result.num_bytes / 2**30:.3f} GiB in {result.num_files} "
        f"files, {seconds:.1f} s, peak memory {peak:.2f} GiB ({result.shape.family}, "
        f"names of {result.keys.layers} layers)"
    )
    if verified:
        print("read back, inverted and compared with the source: every bit is equal")


def _print_json(result: Converted, seconds: float, verified: bool) -> None:
    names = ("num_parameters", "num_bytes", "num_files", "num_kept", "num_padded_rows", "source_checksums", "dropped")
    fields = {name: getattr(result, name) for name in names} | {"family": result.shape.family}
    print(json.dumps({"out": str(result.out), "seconds": seconds, "verified": verified, **fields}, indent=1))


def compare_logits(hf: Path, megatron: Path, shape: ModelShape) -> None:
    """Load both checkpoints in fp32, each with the library of its format, and compare logits of three random sequences.

    The process holds the model twice. CheckpointError if the logits differ by more than TOLERANCE.
    """
    logits, expected = _compute_megatron(megatron, shape), _compute_hf(hf, shape)
    difference, largest = float((logits - expected).abs().max()), float(expected.abs().max())
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
        bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0)
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
