"""Reads and writes Megatron's ``torch_dist`` checkpoints one tensor at a time, without a model or process group.

The format is torch's distributed checkpoint: tensors whole or in chunks of a global one, so any layout can load it.
"""

import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
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
from megarl.files.pickles import load_metadata, load_part, load_plain, part_of


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a parameter in a global tensor: ``global[(*index, ...)]`` is the parameter."""

    key: str
    index: tuple[int, ...]  # layer, expert, or both, where the global tensor has an axis for them
    sizes: tuple[int, ...]  # lengths of these axes

    def part(self, shape: Sequence[int]) -> ChunkStorageMetadata:
        """Offsets and sizes in the global tensor of a parameter with this shape."""
        offsets, sizes = (*self.index, *(0 for _ in shape)), (*(1 for _ in self.index), *shape)
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A tensor to be written; ``make`` is called when it is written, so that one at a time is in memory."""

    place: Place
    shape: tuple[int, ...]  # without the axes of ``place``
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    def part(self) -> ChunkStorageMetadata:
        return self.place.part(self.shape)

    def global_size(self) -> torch.Size:
        return torch.Size((*self.place.sizes, *self.shape))


def _make_data(chunks: Mapping[MetadataIndex, Chunk], item: WriteItem) -> torch.Tensor | io.BytesIO:
    if item.type == WriteItemType.BYTE_IO:
        buffer = io.BytesIO()
        torch.save([None], buffer)
        return buffer
    chunk = chunks[item.index]
    made = chunk.make()
    if tuple(made.shape) != chunk.shape or made.dtype != chunk.dtype:
        raise CheckpointError(
            f"{chunk.place.key}: made {made.dtype} {tuple(made.shape)}, expected {chunk.dtype} {chunk.shape}"
        )
    # torch.save would store a view with all of the memory behind it.
    return made.reshape(chunk.part().sizes).clone(memory_format=torch.contiguous_format)


Written = list[Any]
"""What ``.metadata`` says of an item, as JSON: [key, offsets, index], size, [file, first byte, length]."""


def write_file(folder: Path, number: int, chunks: Sequence[Chunk], extra_states: Sequence[str]) -> list[Written]:
    """Write file ``__<number>_0.distcp`` in any process; pass the results to ``write_metadata``."""
    items: list[WriteItem] = []
    for chunk in chunks:
        part = chunk.part()
        data = TensorWriteData(part, TensorProperties(dtype=chunk.dtype), chunk.global_size())
        items.append(WriteItem(MetadataIndex(chunk.place.key, part.offsets), WriteItemType.SHARD, tensor_data=data))
    by_index = dict(zip((item.index for item in items), chunks, strict=True))
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in extra_states]
    plan = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
    planner: Any = SimpleNamespace(resolve_data=partial(_make_data, by_index))  # all that the writer calls
    results = FileSystemWriter(folder, thread_count=1).write_data(plan, planner).wait()
    return [[astuple(one.index), one.size_in_bytes, astuple(one.storage_data)[:3]] for one in results]


def write_metadata(
    folder: Path, chunks: Iterable[Chunk], extra_states: Iterable[str], written: Sequence[list[Written]]
) -> None:
    """Make files one checkpoint: write ``.metadata`` and ``metadata.json``; the caller writes ``common.pt``."""
    tensors: dict[str, Any] = {}
    for chunk in chunks:
        meta = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), chunk.global_size(), [])
        tensors.setdefault(chunk.place.key, meta).chunks.append(chunk.part())
    objects = {name: BytesStorageMetadata() for name in extra_states}
    results = [
        [WriteResult(MetadataIndex(*index), size, _StorageInfo(*place)) for index, size, place in of_file]
        for of_file in written
    ]
    FileSystemWriter(folder).finish(Metadata({**tensors, **objects}), results)
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    about |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(about))


_COMMON = "common_state/shard_0_1"
"""Megatron's key of the object that holds the common state."""


def _part_of(target: torch.Tensor, item: ReadItem) -> torch.Tensor:
    bounds = zip(item.dest_offsets, item.lengths, strict=True)
    return target[tuple(slice(offset, offset + length) for offset, length in bounds)]


_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, OSError, ValueError),
    *(RuntimeError, AssertionError),
)
"""What pickle and torch raise for damaged files."""


@contextmanager
def _explain_damage(what: object) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CheckpointError(f"{what} cannot be read ({reason}); the file is damaged") from error


class TorchDistReader:
    """Read access by key to a ``torch_dist`` checkpoint. Raises CheckpointError for what is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "metadata.json").is_file() or not (path / ".metadata").is_file():
            raise CheckpointError(
                f"{path} holds no metadata.json and .metadata, expected the folder of a torch_dist checkpoint"
            )
        self._reader = FileSystemReader(path)
        with _explain_damage(path / ".metadata"):
            self._metadata = load_metadata(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        known = self._metadata.state_dict_metadata
        self.tensors = {key: meta for key, meta in known.items() if isinstance(meta, TensorStorageMetadata)}
        """Every tensor by its key."""
        self._require_files()

    def _require_files(self) -> None:
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            with _explain_damage(self.path / ".metadata"):
                part_of(self.path, stored)
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        for name, end in sorted(ends.items()):
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{self.path} lacks {name}, which its metadata names")
            if (size := file.stat().st_size) < end:
                raise CheckpointError(f"{file} has {size} bytes, expected at least {end}: it is truncated")

    def common(self) -> dict[str, Any]:
        """The state that Megatron keeps in ``common.pt``, or from 0.19 on among the tensors; {} if there is none."""
        file, place = self.path / "common.pt", self._metadata.storage_data.get(MetadataIndex(_COMMON))
        found: Any = None
        with _explain_damage(file if file.is_file() else f"{self.path}: its common state"):
            if file.is_file():
                found = load_plain(file)
            elif place is not None:
                found = load_part(self.path, place)[0]
        return found if isinstance(found, dict) else {}

    def read(self, place: Place) -> torch.Tensor:
        """The parameter at ``place``; the caller has compared the axes of the place with ``tensors``."""
        meta = self.tensors[place.key]
        shape = meta.size[len(place.index) :]
        wanted = place.part(shape)
        items = create_read_items_for_chunk_list(place.key, meta, [wanted])
        target = torch.empty(wanted.sizes, dtype=meta.properties.dtype)
        if sum(torch.Size(item.lengths).numel() for item in items) != target.numel():
            raise CheckpointError(f"{self.path}: the chunks of {place.key} do not cover {tuple(wanted.offsets)}")
        # All that the reader calls; it has copied a part before it commits it.
        planner: Any = SimpleNamespace(resolve_tensor=partial(_part_of, target), commit_tensor=lambda *_: None)
        with _explain_damage(f"{self.path}: {place.key}"):
            self._reader.read_data(LoadPlan(items), planner)
        return target.view(shape)
