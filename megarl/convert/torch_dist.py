"""Read and write Megatron's ``torch_dist`` checkpoints a tensor at a time, without a model or a process group.

The format is torch's distributed checkpoint: tensors whole or in chunks of a global tensor, for every layout.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megarl.errors import CheckpointError, describe, refuse_if, reworded
from megarl.files.pickles import load_metadata, load_part, load_plain, part_of


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a parameter in a global tensor: the parameter is ``global[(*index, ...)]``."""

    key: str
    index: tuple[int, ...]
    """Layer, expert, or both, where the global tensor has an axis for them."""
    sizes: tuple[int, ...]
    """Lengths of these axes."""

    def chunk(self, shape: Sequence[int]) -> dcp.ChunkStorageMetadata:
        """Return offsets and sizes in the global tensor of a parameter with this shape."""
        offsets, sizes = (*self.index, *(0 for _ in shape)), (*(1 for _ in self.index), *shape)
        return dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tensor to be written. ``make`` is called at the time of writing, so that memory holds a single tensor."""

    place: Place
    shape: tuple[int, ...]
    """Without the axes of ``place``."""
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    def bounds(self) -> dcp.ChunkStorageMetadata:
        return self.place.chunk(self.shape)

    def global_size(self) -> torch.Size:
        return torch.Size((*self.place.sizes, *self.shape))


def _make_data(chunks: Mapping[dcp.MetadataIndex, Chunk], item: WriteItem) -> torch.Tensor | io.BytesIO:
    if item.type == WriteItemType.BYTE_IO:
        buffer = io.BytesIO()
        torch.save([None], buffer)
        return buffer
    chunk = chunks[item.index]
    # torch.save would store a view with all of the memory behind the view.
    return chunk.make().reshape(chunk.bounds().sizes).clone(memory_format=torch.contiguous_format)


def write_file(folder: Path, number: int, chunks: Sequence[Chunk], extra_states: Sequence[str]) -> list[WriteResult]:
    """Write file ``__<number>_0.distcp``; pass the results to ``write_metadata``."""
    items: list[WriteItem] = []
    for chunk in chunks:
        bounds = chunk.bounds()
        data = TensorWriteData(bounds, dcp.TensorProperties(dtype=chunk.dtype), chunk.global_size())
        index = dcp.MetadataIndex(chunk.place.key, bounds.offsets)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    by_index = dict(zip((item.index for item in items), chunks, strict=True))
    items += [WriteItem(dcp.MetadataIndex(name), WriteItemType.BYTE_IO) for name in extra_states]
    plan = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
    planner: Any = SimpleNamespace(resolve_data=partial(_make_data, by_index))  # the only method that the writer calls
    return FileSystemWriter(folder, thread_count=1).write_data(plan, planner).wait()


def write_metadata(
    folder: Path, chunks: Iterable[Chunk], extra_states: Iterable[str], written: list[list[WriteResult]]
) -> None:
    """Write ``.metadata`` and ``metadata.json`` for the files; the caller writes ``common.pt``."""
    tensors: dict[str, Any] = {}
    for chunk in chunks:
        meta = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=chunk.dtype), chunk.global_size(), [])
        tensors.setdefault(chunk.place.key, meta).chunks.append(chunk.bounds())
    objects = {name: dcp.BytesStorageMetadata() for name in extra_states}
    FileSystemWriter(folder).finish(dcp.Metadata({**tensors, **objects}), written)
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    about |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(about))


_COMMON = "common_state/shard_0_1"
"""Megatron's key of the object that holds the common state."""


def _view_of(target: torch.Tensor, item: ReadItem) -> torch.Tensor:
    bounds = zip(item.dest_offsets, item.lengths, strict=True)
    return target[tuple(slice(offset, offset + length) for offset, length in bounds)]


_WRONG = (AssertionError, AttributeError, EOFError, ImportError, LookupError, OSError, RuntimeError, ValueError)
_UNREADABLE = (*_WRONG, pickle.UnpicklingError)
"""Errors of pickle and torch for damaged files."""


def _explain_damage(subject: object) -> AbstractContextManager[None]:
    problem, advice = f"{subject} cannot be read (", "); the file is damaged"
    return reworded(_UNREADABLE, CheckpointError, problem, advice, describe)


class TorchDistReader:
    """Read access by key to a ``torch_dist`` checkpoint. CheckpointError for missing and damaged files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "metadata.json").is_file() or not (path / ".metadata").is_file():
            raise CheckpointError(f"{path} holds no metadata.json and .metadata, expected a torch_dist checkpoint")
        self._reader = FileSystemReader(path)
        with _explain_damage(path / ".metadata"):
            self._metadata = load_metadata(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        stored = self._metadata.state_dict_metadata
        self.tensors = {key: meta for key, meta in stored.items() if isinstance(meta, dcp.TensorStorageMetadata)}
        """Every tensor by key."""
        for stored in self._metadata.storage_data.values():
            with _explain_damage(path / ".metadata"):
                file = part_of(path, stored)
            refuse_if(not file.is_file(), CheckpointError, "missing_part", path=path, file=file)

    def common(self) -> dict[str, Any]:
        """Return the state of ``common.pt``, from Megatron 0.19 on stored among the tensors; {} without a state."""
        file, place = self.path / "common.pt", self._metadata.storage_data.get(dcp.MetadataIndex(_COMMON))
        state: Any = None
        with _explain_damage(file if file.is_file() else f"{self.path}: its common state"):
            if file.is_file():
                state = load_plain(file)
            elif place is not None:
                state = load_part(self.path, place)[0]
        return state if isinstance(state, dict) else {}

    def read(self, place: Place) -> torch.Tensor:
        """Return the parameter [...] at ``place``, without the axes of the place. CheckpointError for missing chunks.

        The caller has compared the axes of the place with ``tensors``.
        """
        meta = self.tensors[place.key]
        shape = meta.size[len(place.index) :]
        chunk = place.chunk(shape)
        items = create_read_items_for_chunk_list(place.key, meta, [chunk])
        target = torch.empty(chunk.sizes, dtype=meta.properties.dtype)
        if sum(torch.Size(item.lengths).numel() for item in items) != target.numel():
            raise CheckpointError(f"{self.path}: the chunks of {place.key} do not cover {tuple(chunk.offsets)}")
        # The only methods that the reader calls. The reader copies the data before commit_tensor.
        planner: Any = SimpleNamespace(resolve_tensor=partial(_view_of, target), commit_tensor=lambda *_: None)
        with _explain_damage(f"{self.path}: {place.key}"):
            self._reader.read_data(LoadPlan(items), planner)
        return target.view(shape)
