"""Compares the logits of Megatron and transformers, each from its own checkpoint of the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megarl.errors import CheckpointError, ConfigError
from megarl.megatron.attention import PackedSequences
from megarl.megatron.checkpoints.checkpoint import read_weights
from megarl.megatron.model import build_model, transformer_config
from megarl.models.shapes import ModelShape

_LENGTHS = (17, 32, 5)
TOLERANCE = 1e-5
"""Largest difference of fp32 logits, for logits of size up to 1; relative to the largest one beyond."""


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    """The result of a comparison on random tokens."""

    difference: float
    """Largest absolute difference of two logits."""
    largest: float
    """Largest absolute logit of transformers."""


def compare_logits(hf: Path, megatron: Path, shape: ModelShape) -> LogitsCheck:
    """Load both checkpoints in fp32, each with its own library, and compare logits of three random sequences.

    Megatron gets the sequences packed, transformers one by one. One process must hold the model twice. Raises
    CheckpointError if a checkpoint does not load, or if logits differ by more than TOLERANCE.
    """
    found, wanted = _compute_megatron(megatron, shape), _compute_hf(hf, shape)
    check = LogitsCheck(float((found - wanted).abs().max()), float(wanted.abs().max()))
    if not check.difference <= TOLERANCE * max(1.0, check.largest):
        raise CheckpointError(
            f"logits of Megatron and transformers differ by {check.difference:.3g} (largest {check.largest:.3g}), "
            f"expected at most {TOLERANCE:g} of it: the weights are equal, so one of the two built another model"
        )
    return check


def _make_sequences(shape: ModelShape) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (min(length, shape.max_sequence_length) for length in _LENGTHS)
    return [torch.randint(shape.vocab_size, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def _compute_hf(folder: Path, shape: ModelShape) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: transformers cannot load it, so logits cannot be compared ({error})") from error
    return torch.cat([model.eval()(tokens[None]).logits[0] for tokens in _make_sequences(shape)])


@torch.no_grad()
def _compute_megatron(path: Path, shape: ModelShape) -> torch.Tensor:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() > 1:
        raise ConfigError("--verify logits runs in one process, found torchrun; verify checksums, or convert alone")
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
