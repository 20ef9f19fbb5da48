"""Hugging Face checkpoint folders: read by name, one file open at a time, and written."""

import fnmatch
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.core.fp8 import SCALE, dequantize_fp8, grid_of
from megarl.data.files import model_files
from megarl.errors import CheckpointError

INDEX = "model.safetensors.index.json"
MANIFEST = "conversion.json"
"""What a conversion writes beside the files: their checksums, and what it left out."""
FP8_ERRORS = "fp8_errors.json"
"""What a folder with FP8 blocks says about the errors of each tensor."""
T = TypeVar("T")
_MAPPED_BYTES = 256 << 20
"""A file is opened anew when this much of it has been read, for what was read stays mapped into memory."""
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8},
}


class HFCheckpoint:
    """Read access by name to the safetensors files of a Hugging Face checkpoint folder; a context manager.

    Block-quantised FP8 weights (``quantization_config`` with ``weight_block_size``) are read as what they stand for, in
    the dtype of the config; their scales have no name of their own here. Raises CheckpointError, naming the file or
    tensor, for what is missing, unreadable, or contradicts the index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._config = read_json(self.path / "config.json") if (self.path / "config.json").is_file() else {}
        self._open: tuple[Path, Any] | None = None
        self._num_read = 0
        self._where = self._locate()
        self._block = self._fp8_block()
        scales = {name + SCALE for name in self._where} if self._block else set()
        self._names = {name: None for name in self._where if name not in scales}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = None  # nothing else refers to the handle: the file is unmapped

    def names(self) -> KeysView[str]:
        return self._names.keys()

    def files(self) -> list[Path]:
        return sorted(set(self._where.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._handle(name).get_slice(name).get_dtype()
        if stored not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise CheckpointError(f"{self._where[name]}: {name} has dtype {stored}, expected one of {known}")
        is_fp8 = self._block is not None and name + SCALE in self._where
        return self._high_precision() if is_fp8 else _DTYPES[stored]

    def stored(self, name: str) -> torch.Tensor:
        """The tensor as it stands in its file, FP8 weights and their scales too."""
        if name not in self._where:
            raise CheckpointError(f"{self.path} holds no {name}")
        handle = self._handle(name)
        try:
            tensor = handle.get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{self._where[name]}: {name} cannot be read ({error})") from error
        self._num_read += tensor.nbytes
        return tensor

    def read(self, name: str) -> torch.Tensor:
        tensor = self.stored(name)
        if self._block is None or tensor.dtype != torch.float8_e4m3fn:
            return tensor
        if name + SCALE not in self._where:
            file = self._where[name]
            raise CheckpointError(f"{file}: {name} is FP8 without {name}{SCALE}, expected a scale for each block")
        scales, grid = self.stored(name + SCALE), grid_of(tensor.shape, self._block)
        if scales.shape != grid:
            file = self._where[name + SCALE]
            raise CheckpointError(
                f"{file}: {name}{SCALE} has shape {tuple(scales.shape)}, expected {grid} for blocks of {self._block}"
            )
        return dequantize_fp8(tensor, scales.float(), self._block).to(self._high_precision())

    def _handle(self, name: str) -> Any:
        file = self._where[name]
        if self._open is None or self._open[0] != file or self._num_read > _MAPPED_BYTES:
            self._open, self._num_read = (file, _opened(file)), 0
        return self._open[1]

    def _high_precision(self) -> torch.dtype:
        return getattr(torch, str(self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"))

    def _fp8_block(self) -> tuple[int, int] | None:
        quantised = self._config.get("quantization_config")
        if not quantised:
            return None
        if not isinstance(quantised, dict):
            raise CheckpointError(f"{self.path}: quantization_config is {quantised!r}, expected a table")
        if quantised.get("quant_method") != "fp8" or len(quantised.get("weight_block_size") or ()) != 2:
            raise CheckpointError(
                f"{self.path} is quantised by {quantised.get('quant_method')!r} with blocks "
                f"{quantised.get('weight_block_size')}; expected high precision, or 'fp8' with blocks of two dimensions"
            )
        rows, columns = quantised["weight_block_size"]
        return rows, columns

    def _locate(self) -> dict[str, Path]:
        """Tensor name -> file; what the index says and what the files hold must be the same."""
        index = self.path / INDEX
        listed = read_json(index).get("weight_map", {}) if index.is_file() else None
        if listed is not None and not isinstance(listed, dict):
            raise CheckpointError(f"{index}: weight_map is no table of names and files")
        alone = self.path / "model.safetensors"  # where it is, others beside it are copies in another form
        files = [alone] if alone.is_file() else sorted(self.path.glob("*.safetensors"))
        if listed is not None:
            files = sorted({self.path / name for name in listed.values()})
            if absent := [file.name for file in files if not file.is_file()]:
                raise CheckpointError(f"{self.path}: {INDEX} names {some(absent)}, which are not there")
        if not files:
            raise CheckpointError(f"{self.path} holds no *.safetensors file, expected a Hugging Face checkpoint folder")
        where: dict[str, Path] = {}
        for file in files:
            for name in _opened(file).keys():  # noqa: SIM118  (no mapping)
                if name in where:
                    raise CheckpointError(f"{name} is both in {where[name]} and in {file.name}, expected it once")
                where[name] = file
        if listed is None:
            return where
        if absent := [name for name, file in listed.items() if name not in where or where[name].name != file]:
            raise CheckpointError(f"{self.path}: {INDEX} names {some(absent)}, which are not in the file that it says")
        if unlisted := [name for name in where if name not in listed]:
            raise CheckpointError(f"{self.path}: the files hold {some(unlisted)}, which {INDEX} does not name")
        return where


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); truncated, or no safetensors file") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def some(names: Sequence[str]) -> str:
    """The first three names of a list that may be long, and how many more there are."""
    told = ", ".join(sorted(names)[:3])
    return told if len(names) <= 3 else f"{told} and {len(names) - 3} more"


def describe_faults(faults: Mapping[str, Sequence[str]]) -> str:
    """What is wrong, with the names of tensors for each kind of fault; "" if there are none."""
    return "; ".join(f"{len(names)} tensors {what}: {some(names)}" for what, names in faults.items() if names)


def check_tensors(found: HFCheckpoint, expected: dict[str, tuple[int, ...]], drop: Iterable[str] = ()) -> list[str]:
    """Compare a checkpoint with what its config promises, by name and shape; CheckpointError names all differences.

    Returns the unknown names that ``drop`` (globs) matches.
    """
    unknown = {name for name in found.names() - set(expected) if not _is_known_copy(name, found, expected)}
    dropped = {name for pattern in drop for name in fnmatch.filter(unknown, pattern)}
    faults = {
        "missing": list(set(expected) - found.names()),
        "unknown": list(unknown - dropped),
        "of another shape": [
            f"{name} {found.shape(name)} (expected {shape})"
            for name, shape in expected.items()
            if name in found.names() and found.shape(name) != shape
        ],
    }
    if told := describe_faults(faults):
        hint = "; what may be left out is for --drop GLOB of megarl convert" if faults["unknown"] else ""
        raise CheckpointError(f"{found.path} does not hold the model of its config.json: {told}{hint}")
    return sorted(dropped)


def _is_known_copy(name: str, found: HFCheckpoint, expected: dict[str, tuple[int, ...]]) -> bool:
    """Whether a tensor says nothing new: rotary frequencies, a tied output layer equal to the embedding."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    embedding = "model.embed_tokens.weight"
    if name != "lm_head.weight" or not {embedding} & found.names() & set(expected):
        return False
    return found.shape(name) == found.shape(embedding) and torch.equal(found.read(name), found.read(embedding))


def pack_shards(pieces: Sequence[T], sizes: Sequence[int], shard_bytes: int) -> tuple[list[list[T]], list[int]]:
    """What goes into each file, in order, and its bytes; a file is larger than ``shard_bytes`` only if one piece is."""
    parts = zip(pieces, sizes, strict=True)
    shards = [list(shard) for shard in split_by_size(parts, lambda part: part[1], shard_bytes)]
    return [[piece for piece, _ in shard] for shard in shards], [sum(size for _, size in shard) for shard in shards]


def split_by_size(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields the items in groups of at most this size, or of one larger item; a group is emptied before the next one,
    so that what it holds can be freed."""
    group: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and total + size > most:
            yield group
            group.clear()
            total = 0
        group.append(item)
        total += size
    if group:
        yield group


def bucket_bytes(num_values: int, most: int) -> int:
    """Bytes of a bucket of a weight update: a sixteenth of a small model's in float32, so that little of the sending
    waits for the first bucket or follows the last."""
    return min(most, max(8 << 20, num_values // 4))


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors 0.8 makes it private


def write_index(folder: Path, listing: Mapping[str, str], num_bytes: int) -> None:
    index = {"metadata": {"total_size": num_bytes}, "weight_map": listing}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def copy_model_files(
    source: Path, target: Path, dtype: torch.dtype | None, quantization: Mapping[str, Any] | None = None
) -> None:
    """Config, tokenizer, code; the config says what the weights now are."""
    for file in model_files(source):
        if file.name not in (MANIFEST, FP8_ERRORS):
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2))
