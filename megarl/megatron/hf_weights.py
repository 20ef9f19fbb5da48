"""Weights in and out of a sharded Megatron model under their Hugging Face names, by the rules of ``models.names``."""

import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.errors import CheckpointError, reworded
from megarl.files import outputs
from megarl.files.hf_config import hf_name
from megarl.megatron.distributed import all_gather, barrier, gather_objects
from megarl.models import hf_files
from megarl.models.layouts import LAYOUTS
from megarl.models.names import Rule, hf_shapes, rules_of
from megarl.models.shapes import ModelShape
from megarl.replay.megatron_state import unwrap

_SHARD_BYTES = 4 << 30
GATHER_BYTES = 256 << 20
"""Limit for experts gathered at once, unless an expert of every rank is more."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A local parameter with rule, and with layer and expert in the whole model.

    Experts that share Hugging Face tensors [E, ...] are views [1, ...], each with its expert's number.
    """

    tensor: torch.Tensor
    rule: Rule
    layer: int
    expert: int
    hf_names: list[str]

    @property
    def layout(self) -> str:
        """Key of LAYOUTS. Local layers cut the projections to latent space, Transformer Engine keeps them whole."""
        is_whole = self.rule.layout == "column" and not getattr(self.tensor, "tensor_model_parallel", False)
        return "replicated" if is_whole else self.rule.layout


def _matchers(shape: ModelShape) -> list[tuple[re.Pattern[str], Rule]]:
    embedding = hf_name(shape.family, "model.embed_tokens.weight")
    tied = Rule(("output_layer.weight",), (embedding,), ("vocab hidden",), "vocab", "model")
    # With tied embeddings, the last stage has a copy of the embedding as output layer.
    rules = [*rules_of(shape), *([tied] if shape.tied_embeddings else [])]
    patterns = ((re.escape(pattern), rule) for rule in rules for pattern in rule.megatron)
    return [(re.compile(re.sub(r"\\\{(layer|expert)\\\}", r"(?P<\1>\\d+)", text)), rule) for text, rule in patterns]


def place_parameters(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> list[Placed]:
    """Return the rank's parameters with rules; CheckpointError if a parameter has no rule."""
    matchers = _matchers(shape)
    local_experts = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = local_experts * parallel_state.get_expert_model_parallel_rank()
    entries = []
    for chunk in map(unwrap, chunks):
        stored = chunk.state_dict().keys()
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name in stored)  # expert biases
        for name, tensor in (*chunk.named_parameters(), *buffers):
            match, rule = next(((m, rule) for regex, rule in matchers if (m := regex.fullmatch(name))), (None, None))
            if match is None or rule is None:
                raise CheckpointError(f"no rule of family {shape.family!r} covers the Megatron parameter {name!r}")
            numbers = match.groupdict()
            layer = chunk.decoder.layers[int(numbers["layer"])].layer_number - 1 if "layer" in numbers else 0
            expert = first_expert + int(numbers.get("expert", 0))
            tensor = tensor[None] if rule.scope == "experts" else tensor
            entries.append(Placed(tensor, rule, layer, expert, rule.hf_names(layer, expert)))
    return entries


def load_hf(chunks: Sequence[torch.nn.Module], shape: ModelShape, path: str | Path) -> str:
    """Copy the checkpoint in folder ``path`` into the model chunks of this rank.

    Returns a line about the prediction layers left out, "" without prediction layers. CheckpointError naming every
    missing or unknown tensor, and every wrong shape.
    """
    with hf_files.HFCheckpoint(path) as checkpoint:
        left_out = hf_files.describe_left_out(hf_files.check_tensors(checkpoint, hf_shapes(shape)))
        for entry in place_parameters(chunks, shape):
            _load_entry(entry, checkpoint, shape)
    return left_out


def _load_entry(entry: Placed, checkpoint: hf_files.HFCheckpoint, shape: ModelShape) -> None:
    if entry.rule.is_of_experts:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    experts = slice(entry.expert, entry.expert + 1) if entry.rule.scope == "experts" else None
    tensors = [checkpoint.read(name, experts) for name in entry.hf_names]
    source = f"{entry.hf_names} of shapes {[tuple(tensor.shape) for tensor in tensors]}"
    with reworded((RuntimeError, ValueError), CheckpointError, f"{source} do not fit: "):
        shard = LAYOUTS[entry.layout].cut(tensors, group.rank(), group.size(), shape)
        if shard.shape != entry.tensor.shape:
            raise ValueError(f"a shard has shape {tuple(shard.shape)}, expected {tuple(entry.tensor.shape)}")
    with torch.no_grad():
        entry.tensor.copy_(shard)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter of the whole model, or a layer's experts: the facts that every rank needs for gathering."""

    order: tuple[int, int]
    """(layer or 0, index of the rule): the canonical order of the export."""
    stage: int
    """Pipeline rank that owns the piece."""
    shape: tuple[int, ...]
    """Shape of one rank's shard, experts stacked in front."""
    dtype: torch.dtype
    layout: str
    """Key of LAYOUTS."""


def export_hf(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, receive: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor [...] of the live model, whole, in canonical order, on ranks that ``receive``.

    A collective call: exhaust the iterator, also on ranks that receive nothing. A single parameter, or ``GATHER_BYTES``
    of a layer's experts of a kind, is whole at a time; of experts that share a tensor, all. Tensors of a single rank
    may be views of the weights: copy what must outlast the next step.
    """
    rules = rules_of(shape)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    dense = [parallel_state.get_tensor_model_parallel_group(), pipeline]
    inner = parallel_state.get_expert_tensor_parallel_group(), parallel_state.get_expert_model_parallel_group()
    experts = [*inner, pipeline]
    numbers = {rule.megatron: number for number, rule in enumerate(rules)}
    local: dict[tuple[int, int], list[Placed]] = {}
    for entry in place_parameters(chunks, shape):
        if entry.rule.megatron in numbers:
            local.setdefault((entry.layer, numbers[entry.rule.megatron]), []).append(entry)
    for piece in _pieces(local):
        rule, entries = rules[piece.order[1]], sorted(local.get(piece.order, []), key=lambda entry: entry.expert)
        gathered = _gather(piece, entries, experts if rule.is_of_experts else dense, receive)
        of_experts = ((expert, LAYOUTS[piece.layout].join(shards, shape)) for expert, shards in gathered)
        if rule.scope == "experts":
            of_experts = _join_experts(of_experts)
        for expert, tensors in of_experts:
            yield from zip(rule.hf_names(piece.order[0], expert), tensors, strict=True)


def _join_experts(of_experts: Iterable[tuple[int, Sequence[torch.Tensor]]]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield the tensors [E, ...] of all experts of a layer, which come in any order; nothing without experts."""
    if in_order := [tensors for _, tensors in sorted(of_experts, key=itemgetter(0))]:
        yield 0, [torch.cat(parts) for parts in zip(*in_order, strict=True)]


def _pieces(local: dict[tuple[int, int], list[Placed]]) -> list[_Piece]:
    """Return the pieces of all pipeline stages in canonical order, the same list on every rank."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    firsts = ((order, len(entries), entries[0]) for order, entries in local.items())
    pieces = [_Piece(order, stage, (n, *e.tensor.shape), e.tensor.dtype, e.layout) for order, n, e in firsts]
    by_stage = gather_objects(pieces, parallel_state.get_pipeline_model_parallel_group())
    return sorted(itertools.chain(*by_stage), key=lambda piece: piece.order)


def _gather(
    piece: _Piece, entries: list[Placed], groups: Sequence[dist.ProcessGroup], receive: bool
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield (expert, shards of all tensor-parallel ranks) of each parameter, on the receiving ranks.

    Experts come in the order of the gathers, each of which has some experts of every rank.
    """
    if all(group.size() == 1 for group in groups):  # without gathering there is no copy
        yield from ((entry.expert, [entry.tensor.detach()]) for entry in entries if receive)
        return
    *inner, pipeline = groups
    sizes = [group.size() for group in reversed(inner)]  # [expert-parallel ranks if gathered, tensor-parallel ranks]
    num_local, *of_expert = piece.shape
    step = max(1, GATHER_BYTES // (math.prod(sizes) * math.prod(of_expert) * piece.dtype.itemsize))
    for first in range(0, num_local, step):
        num = min(step, num_local - first)
        if piece.stage == pipeline.rank():
            whole = torch.stack([entry.tensor.detach() for entry in entries[first : first + num]])
            for group in inner:
                whole = all_gather(whole, group)
        else:
            whole = torch.empty(*sizes, num, *of_expert, dtype=piece.dtype, device=torch.cuda.current_device())
        if pipeline.size() > 1:
            dist.broadcast(whole, group=pipeline, group_src=piece.stage)
        if not receive:
            continue
        for rank, shards in enumerate(whole.view(-1, sizes[-1], num, *of_expert)):
            for expert, of_ranks in enumerate(shards.unbind(1), rank * num_local + first):
                yield expert, list(of_ranks)


def save_hf(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, source: str | Path, out: str | Path, **about: Any
) -> None:
    """Write the live weights as a Hugging Face checkpoint folder ``out``: a collective call, rank 0 writes.

    Config and tokenizer files are copied from ``source``. The folder gets its name when complete. ConfigError if
    ``out`` holds anything that no earlier call wrote. about: plain data for the mark of the folder.
    """
    tensors = export_hf(chunks, shape, receive=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        _write_folder(tensors, Path(source), Path(out), about)
    else:
        deque(tensors, maxlen=0)
    barrier()


def _write_folder(
    tensors: Iterator[tuple[str, torch.Tensor]], source: Path, out: Path, about: Mapping[str, Any]
) -> None:
    out = out.resolve()  # a link stays; its target is replaced
    partial = outputs.partial_of(out)
    outputs.begin(partial, outputs.HF_FILES, source)
    listing: dict[str, str] = {}
    total, dtype = 0, None
    on_host = ((name, tensor.detach().cpu().contiguous().clone()) for name, tensor in tensors)
    for number, shard in enumerate(hf_files.split_by_size(on_host, lambda item: item[1].nbytes, _SHARD_BYTES), 1):
        file = f"model-{number:05d}.safetensors"
        hf_files.save_tensors(dict(shard), partial / file)
        listing.update((name, file) for name, _ in shard)
        total += sum(tensor.nbytes for _, tensor in shard)
        dtype = dtype or shard[0][1].dtype  # of the embedding
    hf_files.write_index(partial, listing, total)
    hf_files.copy_model_files(source, partial, dtype)
    outputs.seal(partial, **about)
    outputs.replace_folder(partial, out)
