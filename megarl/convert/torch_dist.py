"""Megatron's ``torch_dist`` checkpoints, written and read one tensor at a time, without a model or process group.

The format is torch's distributed checkpoint with Megatron's names: every tensor is stored whole or in chunks of a
global tensor, so any layout can load it. ``Keys`` says under which name Megatron looks for a parameter.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megarl.errors import CheckpointError
from megarl.models.names import Rule
from megarl.models.shapes import ModelShape

Layers = Literal["local", "te"]
"""Whose layers will load the checkpoint: Megatron's local ones, or Transformer Engine's."""

_FUSED_IN_LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names that Megatron's local layers (those with grouped attention) have in checkpoints."""
_LAYER = "layers.{layer}."


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter stands in a global tensor: ``global[(*index, ...)]`` is the parameter."""

    key: str
    index: tuple[int, ...]
    """Layer, expert, or both, where the global tensor has an axis for them."""
    sizes: tuple[int, ...]
    """Lengths of these axes."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One way in which Megatron names parameters in checkpoints; ``Keys.all_of`` are those that it has had."""

    layers: Layers
    stacked: bool
    """One tensor for all layers, [L, ...], as Megatron has it where all layers are of one kind and it is not told
    otherwise; else one for each."""
    single_experts: bool = False
    """One key per expert, and gate and up apart (``singleton_local_shards``); else one axis for the experts."""

    @staticmethod
    def all_of(shape: ModelShape) -> list[Keys]:
        one_kind = len(shape.moe_layers) in (0, shape.num_layers)
        plain = [Keys(layers, stacked) for stacked in ([False, True] if one_kind else [False]) for layers in _LAYERS]
        return [*plain, *(Keys(layers, False, single_experts=True) for layers in _LAYERS)]

    @staticmethod
    def of_megatron(shape: ModelShape, layers: Layers, stacked: bool = False) -> Keys:
        """Those that Megatron asks for: a dense model stacks layers, one with ``moe_layer_freq`` as a list does not."""
        return Keys(layers, stacked or not shape.moe_layers)

    def places(self, rule: Rule, shape: ModelShape, layer: int, expert: int) -> list[Place]:
        """One, or with ``single_experts`` the two halves of a gated matrix."""
        name = self._name(rule, shape)
        index, sizes = [], []
        if rule.scope != "model":
            if self.stacked:
                name = name.replace(_LAYER, "layers.")
                index, sizes = [layer], [shape.num_layers]
            else:
                name = name.replace(_LAYER, f"layers.{layer}.")
        if rule.scope == "expert" and self.single_experts:
            name = name.replace("{expert}", str(expert))
        elif rule.scope == "expert":
            name = name.replace("{expert}.", "")
            index, sizes = [*index, expert], [*sizes, shape.num_experts]
        halves = ("_w", "_v") if self.single_experts and rule.layout == "gate_up" else ("",)
        return [Place(name + half, tuple(index), tuple(sizes)) for half in halves]

    def _name(self, rule: Rule, shape: ModelShape) -> str:
        if rule.scope == "expert":  # both kinds of layers call it so
            return rule.megatron[0].replace("local_experts.{expert}", "experts.{expert}")
        name = rule.megatron[0 if self.layers == "local" else -1]
        if self.layers == "local" and not shape.fields.get("multi_latent_attention"):
            for local, fused in _FUSED_IN_LOCAL.items():
                name = name.replace(local, fused)
        return name

    def extra_states(self, rule: Rule, shape: ModelShape, layer: int, expert: int) -> list[str]:
        """Names of the objects that the parameter's module looks for in a checkpoint: None without FP8 training."""
        place = self.places(rule, shape, layer, expert)[0]
        module = place.key.rpartition(".")[0]
        leaf = module.rpartition(".")[2]
        is_linear = leaf.startswith("linear_")
        if (rule.scope == "model" and leaf != "final_layernorm") or not (is_linear or self.layers == "te"):
            return []
        index, sizes = (".".join(map(str, numbers)) for numbers in (place.index or (0,), place.sizes or (1,)))
        modules = [module]
        if self.layers == "te" and leaf == "linear_proj":
            modules.append(module.replace("linear_proj", "core_attention"))
        return [f"{name}._extra_state/shard_{index}_{sizes}" for name in modules if leaf != "router"]


_LAYERS: tuple[Layers, Layers] = ("local", "te")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tensor to be written, made when its turn comes."""

    place: Place
    shape: tuple[int, ...]
    """Without the axes of ``place``."""
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def offsets(self) -> tuple[int, ...]:
        return (*self.place.index, *(0 for _ in self.shape))

    @property
    def global_shape(self) -> tuple[int, ...]:
        return (*self.place.sizes, *self.shape)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        return (*(1 for _ in self.place.index), *self.shape)


class _Planner:
    """What torch's writer asks: the data of one item, at the moment when it writes it."""

    def __init__(self, chunks: Mapping[MetadataIndex, Chunk]) -> None:
        self._chunks = chunks

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([None], buffer)
            return buffer
        chunk = self._chunks[item.index]
        made = chunk.make()
        if tuple(made.shape) != chunk.shape or made.dtype != chunk.dtype:
            raise CheckpointError(
                f"{chunk.place.key}: made {made.dtype} {tuple(made.shape)}, expected {chunk.dtype} {chunk.shape}"
            )
        # A view would be stored with all of the memory that it looks into.
        return made.reshape(chunk.chunk_shape).clone(memory_format=torch.contiguous_format)


class TorchDistWriter:
    """Writes files of chunks into a folder, each by any process, then the metadata that makes them one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write_file(self, number: int, chunks: Sequence[Chunk], extra_states: Sequence[str]) -> list[WriteResult]:
        """Write file ``__<number>_0.distcp``; the results belong into ``finish``."""
        items = [_write_item(chunk) for chunk in chunks]
        by_index = dict(zip((item.index for item in items), chunks, strict=True))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in extra_states]
        plan = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
        writer = FileSystemWriter(self._folder, thread_count=1)
        return writer.write_data(plan, _Planner(by_index)).wait()  # type: ignore[arg-type]

    def finish(
        self, chunks: Iterable[Chunk], extra_states: Iterable[str], results: Sequence[list[WriteResult]]
    ) -> None:
        """Write ``.metadata`` and what Megatron wants beside it; ``common`` state is written by the caller."""
        tensors: dict[str, Any] = {}
        for chunk in chunks:
            meta = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.global_shape), [])
            one = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.chunk_shape))
            tensors.setdefault(chunk.place.key, meta).chunks.append(one)
        objects = {name: BytesStorageMetadata() for name in extra_states}
        FileSystemWriter(self._folder).finish(Metadata({**tensors, **objects}), list(results))
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        about |= {"common_backend": "torch", "common_backend_version": 1}
        (self._folder / "metadata.json").write_text(json.dumps(about))


def _write_item(chunk: Chunk) -> WriteItem:
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.chunk_shape)),
        TensorProperties(dtype=chunk.dtype),
        torch.Size(chunk.global_shape),
    )
    return WriteItem(MetadataIndex(chunk.place.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class _OneTensor:
    """What torch's reader asks: where a piece of one tensor goes."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        view = self._target
        for axis, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            view = view.narrow(axis, offset, length)
        return view

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """It is where it belongs already."""


_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, OSError, ValueError),
    *(RuntimeError, AssertionError),
)
"""What damaged files make pickle and torch raise."""


class TorchDistReader:
    """Read access by key to a ``torch_dist`` checkpoint. Raises CheckpointError for what is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "metadata.json").is_file() or not (path / ".metadata").is_file():
            raise CheckpointError(
                f"{path} holds no metadata.json and .metadata, expected the folder of a torch_dist checkpoint"
            )
        self._reader = FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except _UNREADABLE as error:
            raise CheckpointError(f"{path}/.metadata cannot be read ({type(error).__name__}: {error})") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        known = self._metadata.state_dict_metadata
        self.tensors = {key: meta for key, meta in known.items() if isinstance(meta, TensorStorageMetadata)}
        """Every tensor by its key."""
        self._require_files()

    def _require_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{self.path} lacks {name}, which its metadata names")
            if file.stat().st_size < end:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size} bytes, expected at least {end}: it is truncated"
                )

    def common(self) -> dict[str, Any]:
        """What Megatron keeps beside the tensors (``common.pt``), empty without it."""
        file = self.path / "common.pt"
        if not file.is_file():
            return {}
        try:
            found = torch.load(file, map_location="cpu", weights_only=False)
        except _UNREADABLE as error:
            raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
        return found if isinstance(found, dict) else {}

    def read(self, place: Place) -> torch.Tensor:
        """The parameter at ``place``."""
        meta = self.tensors[place.key]
        if tuple(meta.size[: len(place.sizes)]) != place.sizes:
            raise CheckpointError(
                f"{self.path}: {place.key} has shape {tuple(meta.size)}, expected {place.sizes} in front"
            )
        shape = tuple(meta.size[len(place.index) :])
        wanted = ChunkStorageMetadata(
            torch.Size((*place.index, *(0 for _ in shape))), torch.Size((*(1 for _ in place.index), *shape))
        )
        items = create_read_items_for_chunk_list(place.key, meta, [wanted])
        target = torch.empty(wanted.sizes, dtype=meta.properties.dtype)
        if sum(torch.Size(item.lengths).numel() for item in items) != target.numel():
            raise CheckpointError(f"{self.path}: the chunks of {place.key} do not cover {tuple(wanted.offsets)}")
        try:
            self._reader.read_data(LoadPlan(items), _OneTensor(target))  # type: ignore[arg-type]
        except _UNREADABLE as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{self.path}: {place.key} cannot be read ({type(error).__name__}: {reason[:200]}); the file is damaged"
            ) from error
        return target.view(shape)
