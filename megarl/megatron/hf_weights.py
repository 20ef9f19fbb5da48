"""Weights in and out of a sharded Megatron model under their Hugging Face names, by the rules of ``models.names``."""

from __future__ import annotations

import itertools
import re
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.data.files import replace_folder, sync_all
from megarl.errors import CheckpointError
from megarl.megatron.distributed import all_gather, gather_objects
from megarl.megatron.model import unwrap
from megarl.models.hf_files import (
    HFCheckpoint,
    check_tensors,
    copy_model_files,
    save_tensors,
    split_by_size,
    write_index,
)
from megarl.models.names import LAYOUTS, Rule, hf_shapes, rules_of
from megarl.models.shapes import ModelShape

_SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class _Placed:
    """A local parameter, its rule, and its layer and expert in the whole model."""

    tensor: torch.Tensor
    rule: Rule
    layer: int
    expert: int

    @property
    def layout(self) -> str:
        """Key of LAYOUTS. Transformer Engine keeps the projections to latent space whole, the local layers cut them."""
        is_whole = self.rule.layout == "column" and not getattr(self.tensor, "tensor_model_parallel", False)
        return "replicated" if is_whole else self.rule.layout


def _matchers(shape: ModelShape) -> list[tuple[re.Pattern[str], Rule]]:
    tied = Rule(("output_layer.weight",), ("model.embed_tokens.weight",), ("vocab hidden",), "vocab", "model")
    # With tied embeddings, the last stage has a copy of the embedding as output layer.
    rules = [*rules_of(shape), *([tied] if shape.tied_embeddings else [])]
    return [
        (re.compile(re.sub(r"\\\{(layer|expert)\\\}", r"(?P<\1>\\d+)", re.escape(pattern))), rule)
        for rule in rules
        for pattern in rule.megatron
    ]


def _place(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> list[_Placed]:
    """All parameters of this rank with their rules; CheckpointError if no rule covers one."""
    matchers = _matchers(shape)
    local_experts = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = local_experts * parallel_state.get_expert_model_parallel_rank()
    placed = []
    for chunk in map(unwrap, chunks):
        stored = chunk.state_dict().keys()
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name in stored)  # expert biases
        for name, tensor in (*chunk.named_parameters(), *buffers):
            match, rule = next(((m, rule) for regex, rule in matchers if (m := regex.fullmatch(name))), (None, None))
            if match is None or rule is None:
                raise CheckpointError(f"no rule of family {shape.family!r} covers the Megatron parameter {name!r}")
            parts = match.groupdict()
            layer = chunk.decoder.layers[int(parts["layer"])].layer_number - 1 if "layer" in parts else 0
            placed.append(_Placed(tensor, rule, layer, first_expert + int(parts.get("expert", 0))))
    return placed


def load_hf(chunks: Sequence[torch.nn.Module], shape: ModelShape, path: str | Path) -> None:
    """Copy the checkpoint in folder ``path`` into the model chunks of this rank.

    Raises CheckpointError naming every tensor that is missing, unknown or of another shape; nothing is skipped.
    """
    with HFCheckpoint(path) as checkpoint:
        check_tensors(checkpoint, hf_shapes(shape))
        for entry in _place(chunks, shape):
            _load_one(entry, checkpoint, shape)


def _load_one(entry: _Placed, checkpoint: HFCheckpoint, shape: ModelShape) -> None:
    group = _tensor_group(entry.rule)
    names = entry.rule.hf_names(entry.layer, entry.expert)
    tensors = [checkpoint.read(name) for name in names]
    said = f"{names} of shapes {[tuple(tensor.shape) for tensor in tensors]}"
    try:
        local = LAYOUTS[entry.layout].cut(tensors, group.rank(), group.size(), shape)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{said} do not fit: {error}") from error
    if local.shape != entry.tensor.shape:
        found, expected = tuple(local.shape), tuple(entry.tensor.shape)
        raise CheckpointError(f"{said} give a shard of shape {found}, expected {expected}")
    with torch.no_grad():
        entry.tensor.copy_(local)


def _tensor_group(rule: Rule) -> dist.ProcessGroup:
    if rule.scope == "expert":
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


@dataclass(frozen=True, slots=True)
class _Piece:
    """One parameter of the whole model, or one layer's experts: what every rank must know to gather it."""

    order: tuple[int, int]
    """(layer or 0, index of the rule): the canonical order of the export."""
    stage: int
    """Pipeline rank that owns it."""
    shape: tuple[int, ...]
    """Shape of one rank's shard, experts stacked in front."""
    dtype: torch.dtype
    layout: str
    """Key of LAYOUTS."""


def export_hf(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor of the live model, whole, on every rank, in one canonical order.

    A collective call: exhaust the iterator. One parameter, or one layer's experts of one kind, is whole at a time.
    """
    rules = rules_of(shape)
    local: dict[tuple[int, int], list[_Placed]] = {}
    for entry in _place(chunks, shape):
        if entry.rule in rules:
            local.setdefault((entry.layer, rules.index(entry.rule)), []).append(entry)
    for piece in _all_pieces(local):
        rule = rules[piece.order[1]]
        entries = sorted(local.get(piece.order, []), key=lambda entry: entry.expert)
        for expert, shards in enumerate(_gather(piece, rule, entries)):
            tensors = LAYOUTS[piece.layout].join(shards, shape)
            yield from zip(rule.hf_names(piece.order[0], expert), tensors, strict=True)


def _all_pieces(local: dict[tuple[int, int], list[_Placed]]) -> list[_Piece]:
    """The pieces of all pipeline stages, in canonical order, the same list on every rank."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    mine = [
        _Piece(order, stage, (len(entries), *entries[0].tensor.shape), entries[0].tensor.dtype, entries[0].layout)
        for order, entries in local.items()
    ]
    group = parallel_state.get_pipeline_model_parallel_group()
    return sorted(itertools.chain(*gather_objects(mine, group)), key=lambda piece: piece.order)


def _gather(piece: _Piece, rule: Rule, entries: list[_Placed]) -> Iterator[list[torch.Tensor]]:
    """For each expert (or once), the shards of all tensor-parallel ranks, on every rank of the pipeline group."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    experts = [parallel_state.get_expert_model_parallel_group()] if rule.scope == "expert" else []
    groups = [_tensor_group(rule), *experts]
    if piece.stage == pipeline.rank():
        whole = torch.stack([entry.tensor.detach() for entry in entries])
        for group in groups:
            whole = all_gather(whole, group)
    else:
        whole_shape = (*(group.size() for group in reversed(groups)), *piece.shape)
        whole = torch.empty(whole_shape, dtype=piece.dtype, device=torch.cuda.current_device())
    if pipeline.size() > 1:
        whole = whole.contiguous()
        dist.broadcast(whole, dist.get_global_rank(pipeline, piece.stage), group=pipeline)
    for of_rank in whole if experts else whole[None]:  # [tensor-parallel ranks, local experts, ...]
        yield from map(list, of_rank.unbind(1))


def save_hf(chunks: Sequence[torch.nn.Module], shape: ModelShape, source: str | Path, out: str | Path) -> None:
    """Write the live weights as a Hugging Face checkpoint folder ``out``: a collective call, rank 0 writes.

    Config and tokenizer files are copied from ``source``. The folder appears under its name when it is complete.
    """
    tensors = export_hf(chunks, shape)
    if dist.get_rank() == 0:
        _write_folder(tensors, Path(source), Path(out))
    else:
        deque(tensors, maxlen=0)
    dist.barrier()


def _write_folder(tensors: Iterator[tuple[str, torch.Tensor]], source: Path, out: Path) -> None:
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    listing: dict[str, str] = {}
    total, dtype = 0, None
    on_host = ((name, tensor.detach().cpu().contiguous().clone()) for name, tensor in tensors)
    for number, shard in enumerate(split_by_size(on_host, lambda item: item[1].nbytes, _SHARD_BYTES), 1):
        file = f"model-{number:05d}.safetensors"
        save_tensors(dict(shard), partial / file)
        listing.update((name, file) for name, _ in shard)
        total += sum(tensor.nbytes for _, tensor in shard)
        dtype = dtype or shard[0][1].dtype  # of the embedding
    write_index(partial, listing, total)
    copy_model_files(source, partial, dtype)
    sync_all(partial)
    replace_folder(partial, out)
