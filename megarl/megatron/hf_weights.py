"""Weights in and out of a sharded Megatron model under their Hugging Face names.

``load_hf`` reads a checkpoint folder. ``export_hf`` streams the live weights one parameter (or one layer's experts) at
a time. ``save_hf`` writes a checkpoint folder. ``models.names`` says which tensor is split how.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.data.files import replace_folder
from megarl.errors import CheckpointError
from megarl.megatron.distributed import all_gather
from megarl.megatron.model import unwrap
from megarl.models.hf_reader import HFCheckpoint, check_tensors
from megarl.models.hf_writer import copy_model_files, save_tensors, write_index
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

    def hf_names(self) -> list[str]:
        return self.rule.hf_names(self.layer, self.expert)

    @property
    def layout(self) -> str:
        """Key of LAYOUTS. Transformer Engine keeps the projections to latent space whole, the local layers cut them."""
        is_whole = self.rule.layout == "column" and not getattr(self.tensor, "tensor_model_parallel", False)
        return "replicated" if is_whole else self.rule.layout


def _matchers(shape: ModelShape) -> list[tuple[re.Pattern[str], Rule]]:
    rules = [*rules_of(shape)]
    if shape.tied_embeddings:  # the last stage has a copy of the embedding as output layer
        rules.append(
            Rule(("output_layer.weight",), ("model.embed_tokens.weight",), ("vocab hidden",), "vocab", "model")
        )
    found = []
    for rule in rules:
        for pattern in rule.megatron:
            regex = (
                re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
            )
            found.append((re.compile(regex), rule))
    return found


def _place(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> list[_Placed]:
    """All parameters of this rank with their rules; CheckpointError if no rule covers one."""
    matchers = _matchers(shape)
    local_experts = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = local_experts * parallel_state.get_expert_model_parallel_rank()
    placed = []
    for chunk in map(unwrap, chunks):
        for name, tensor in _tensors(chunk):
            match, rule = next(((m, rule) for regex, rule in matchers if (m := regex.fullmatch(name))), (None, None))
            if match is None or rule is None:
                raise CheckpointError(f"no rule of family {shape.family!r} covers the Megatron parameter {name!r}")
            parts = match.groupdict()
            layer = chunk.decoder.layers[int(parts["layer"])].layer_number - 1 if "layer" in parts else 0
            placed.append(_Placed(tensor, rule, layer, first_expert + int(parts.get("expert", 0))))
    return placed


def _tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that are in checkpoints (expert biases)."""
    yield from chunk.named_parameters()
    stored = chunk.state_dict().keys()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name in stored)


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
    names = entry.hf_names()
    tensors = [checkpoint.read(name) for name in names]
    try:
        local = LAYOUTS[entry.layout].cut(tensors, group.rank(), group.size(), shape)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{names} of shapes {[tuple(t.shape) for t in tensors]} do not fit: {error}") from error
    if local.shape != entry.tensor.shape:
        raise CheckpointError(
            f"{names} of shapes {[tuple(t.shape) for t in tensors]} give a shard of shape {tuple(local.shape)}, "
            f"expected {tuple(entry.tensor.shape)}"
        )
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

    A collective call: all ranks must exhaust the iterator. At most one parameter, or one layer's experts of one kind,
    is whole at a time.
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
    gathered: list[list[_Piece]] = [mine] * group.size()
    if group.size() > 1:
        dist.all_gather_object(gathered, mine, group=group)
    return sorted((piece for pieces in gathered for piece in pieces), key=lambda piece: piece.order)


def _gather(piece: _Piece, rule: Rule, entries: list[_Placed]) -> Iterator[list[torch.Tensor]]:
    """For each expert (or once), the shards of all tensor-parallel ranks, on every rank of the pipeline group."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    groups = [_tensor_group(rule)]
    if rule.scope == "expert":
        groups.append(parallel_state.get_expert_model_parallel_group())
    whole_shape = (*(group.size() for group in reversed(groups)), *piece.shape)
    if piece.stage == pipeline.rank():
        whole = torch.stack([entry.tensor.detach() for entry in entries])
        for group in groups:
            whole = all_gather(whole, group)
    else:
        whole = torch.empty(whole_shape, dtype=piece.dtype, device=torch.cuda.current_device())
    if pipeline.size() > 1:
        whole = whole.contiguous()
        dist.broadcast(whole, dist.get_global_rank(pipeline, piece.stage), group=pipeline)
    if rule.scope != "expert":
        whole = whole[None]
    for of_rank in whole:  # [tensor-parallel ranks, local experts, ...]
        for expert in range(of_rank.size(1)):
            yield list(of_rank[:, expert])


def save_hf(chunks: Sequence[torch.nn.Module], shape: ModelShape, source: str | Path, out: str | Path) -> None:
    """Write the live weights as a Hugging Face checkpoint folder ``out``: a collective call, rank 0 writes.

    Config and tokenizer files are copied from ``source``. The folder appears under its name when it is complete.
    """
    writer = _FolderWriter(Path(source), Path(out)) if dist.get_rank() == 0 else None
    for name, tensor in export_hf(chunks, shape):
        if writer:
            writer.add(name, tensor)
    if writer:
        writer.close()
    dist.barrier()


class _FolderWriter:
    def __init__(self, source: Path, out: Path) -> None:
        self._out, self._partial = out, out.with_name(out.name + ".partial")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._source, self._dtype = source, None
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = self._total = 0
        self._weight_map: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._bytes + tensor.nbytes > _SHARD_BYTES:
            self._flush()
        self._dtype = self._dtype or tensor.dtype  # the first is the embedding
        self._pending[name] = tensor.detach().cpu().contiguous().clone()
        self._bytes += tensor.nbytes

    def _flush(self) -> None:
        file = f"model-{len(set(self._weight_map.values())) + 1:05d}.safetensors"
        save_tensors(self._pending, self._partial / file)
        self._weight_map.update(dict.fromkeys(self._pending, file))
        self._total += self._bytes
        self._pending, self._bytes = {}, 0

    def close(self) -> None:
        self._flush()
        write_index(self._partial, self._weight_map, self._total)
        copy_model_files(self._source, self._partial, self._dtype)
        replace_folder(self._partial, self._out)
