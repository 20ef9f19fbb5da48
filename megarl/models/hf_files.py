"""Read Hugging Face checkpoint folders by tensor name, with a single open file, and write such folders."""

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.core.fp8 import SCALE, dequantize_fp8, grid_of
from megarl.errors import CheckpointError, ConfigError, DataError, some
from megarl.files.foreign_json import require_regular
from megarl.files.hf_config import QUANTIZATION, count_prediction_layers, read_dtype, read_fp8_block
from megarl.files.writing import model_files
from megarl.models.hf_folder import INDEX, SINGLE, read_json, weight_files

MANIFEST = "conversion.json"
"""A conversion's file with checksums, and with the names of left-out tensors."""
FP8_ERRORS = "fp8_errors.json"
"""File of an FP8 folder with the errors of each tensor."""
T = TypeVar("T")
_MAPPED_BYTES = 256 << 20
"""After reading this many bytes a file is reopened, because the pages stay mapped into memory."""
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8},
}


# Family with other expert names than Qwen's -> names of the MoE module, of gate, up and down.
_EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
_OF_QWEN = ("mlp", "gate_proj", "up_proj", "down_proj")
_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_scale_inv)?")
"""All experts of a layer in a single tensor of transformers 5: [E, 2 I, H], the gates first, and [E, H, I]."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a tensor in a file."""

    file: Path
    name: str
    """Name in the file."""
    expert: int | None = None
    """Index in a fused tensor [E, rows, columns]; None for a separate tensor."""
    first: int = 0
    height: int = 0
    """First row and number of rows within the expert."""


class HFCheckpoint:
    """Read access by name to the safetensors files of a Hugging Face checkpoint folder; a context manager.

    Block-quantised FP8 weights (``quantization_config`` with ``weight_block_size``) are dequantised to the dtype of the
    config; scales have no names. Fused experts of transformers 5 have the names of single experts, and are read singly.

    CheckpointError, naming the file or tensor, for a tensor that is missing, unreadable, or contradicts the index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._config = read_json(self.path / "config.json") if (self.path / "config.json").is_file() else {}
        self._open: tuple[Path, Any] | None = None
        self.num_read = 0
        try:
            self._block = read_fp8_block(self._config)
            self._num_prediction_layers = count_prediction_layers(self._config)
        except ConfigError as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        self._places = self._unfuse(self._locate())
        scales = {name + SCALE for name in self._places} if self._block else set()
        self._names = {name: None for name in self._places if name not in scales}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = None  # the last reference to the handle: the file is unmapped

    def names(self) -> KeysView[str]:
        """Return the names of all tensors, without FP8 scales."""
        return self._names.keys()

    def files(self) -> list[Path]:
        """Return the files of the weights."""
        return sorted({place.file for place in self._places.values()})

    @property
    def is_fused(self) -> bool:
        """Whether the files hold the experts of a layer in a single tensor."""
        return any(place.expert is not None for place in self._places.values())

    def names_of_prediction_layers(self) -> set[str]:
        """Return the tensors of layers behind the model's layers: with ``eh_proj``, or counted by the config."""
        last = self._config.get("num_hidden_layers") or 0
        layers: dict[int, dict[str, str]] = {}
        for name in self.names():
            if (match := _LAYER.fullmatch(name)) and int(match[1]) >= last:
                layers.setdefault(int(match[1]), {})[match[2]] = name
        predicting = {layer for layer, names in layers.items() if "eh_proj.weight" in names}
        predicting = predicting or {*range(last + self._num_prediction_layers)}
        selected = [names for layer, names in layers.items() if layer in predicting]
        return {name for names in selected for name in names.values()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the file's header."""
        place = self._places[name]
        shape = tuple(self._handle(place.file).get_slice(place.name).get_shape())
        return shape if place.expert is None else (place.height, *shape[2:])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of ``read(name)``. CheckpointError for an unknown dtype."""
        place = self._places[name]
        stored = self._handle(place.file).get_slice(place.name).get_dtype()
        if stored not in _DTYPES:
            raise CheckpointError(f"{place.file}: {name} has dtype {stored}, expected one of {', '.join(_DTYPES)}")
        is_fp8 = self._block is not None and name + SCALE in self._places
        return self._high_precision() if is_fp8 else _DTYPES[stored]

    def stored(self, name: str) -> torch.Tensor:
        """Return a tensor of ``shape(name)`` as stored, also FP8 weights and scales. CheckpointError if unreadable."""
        if name not in self._places:
            raise CheckpointError(f"{self.path} holds no {name}")
        place = self._places[name]
        handle = self._handle(place.file)
        try:
            if place.expert is None:
                tensor = handle.get_tensor(place.name)
            else:
                rows = slice(place.first, place.first + place.height)
                tensor = handle.get_slice(place.name)[place.expert, rows]
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{place.file}: {name} cannot be read ({error})") from error
        self.num_read += tensor.nbytes
        return tensor

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of ``shape(name)``, dequantised if stored in FP8. CheckpointError if unreadable."""
        tensor = self.stored(name)
        if self._block is None or tensor.dtype != torch.float8_e4m3fn:
            return tensor
        self.check_values(name)
        return dequantize_fp8(tensor, self.stored(name + SCALE).float(), self._block).to(self._high_precision())

    def check_values(self, name: str) -> None:
        """Raise CheckpointError for a tensor of integers, and for FP8 without a scale for each block; reads headers."""
        place = self._places[name]
        stored = self._handle(place.file).get_slice(place.name).get_dtype()
        if stored in ("F64", "F32", "F16", "BF16"):
            return
        if self._block is None or stored != "F8_E4M3":
            expected = "weights in 16 bits or more, or in FP8 with a quantization_config that says so"
            raise CheckpointError(f"{place.file}: {name} has dtype {stored}, expected {expected}")
        shape = self.shape(name)
        expected = grid_of(shape, self._block) if len(shape) == 2 else "a matrix"
        scale = self.shape(name + SCALE) if name + SCALE in self._places else "absent"
        if scale != expected:
            problem = f"{name}{SCALE} of this FP8 tensor is {scale}, expected {expected} for blocks of {self._block}"
            raise CheckpointError(f"{place.file}: {problem}")

    def _handle(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file or self.num_read > _MAPPED_BYTES:
            self._open, self.num_read = (file, _opened(file)), 0
        return self._open[1]

    def _high_precision(self) -> torch.dtype:
        return getattr(torch, read_dtype(self._config))

    def _locate(self) -> dict[str, _Place]:
        """Return tensor name -> place. CheckpointError if index and files differ."""
        files, listed = weight_files(self.path)
        places: dict[str, _Place] = {}
        for file in files:
            for name in _opened(file).keys():  # noqa: SIM118  (no mapping)
                if name in places:
                    raise CheckpointError(f"{name} is both in {places[name].file} and in {file.name}, expected it once")
                places[name] = _Place(file, name)
        if listed is None:
            for file in sorted({*self.path.glob("[!.]*.safetensors")} - {*files}):
                if doubled := [name for name in _opened(file).keys() if name in places]:  # noqa: SIM118
                    raise CheckpointError(
                        f"{self.path} holds {some(doubled)} both in {SINGLE}, which transformers reads, and in "
                        f"{file.name}, which SGLang reads too: move the file away that is not the model"
                    )
            return places
        if absent := [name for name, file in listed.items() if name not in places or places[name].file.name != file]:
            raise CheckpointError(f"{self.path}: {INDEX} names {some(absent)}, which are not in the file that it says")
        if unlisted := [name for name in places if name not in listed]:
            raise CheckpointError(f"{self.path}: the files hold {some(unlisted)}, which {INDEX} does not name")
        return places

    def _unfuse(self, stored: dict[str, _Place]) -> dict[str, _Place]:
        """Return the places by the names of the family's checkpoints, which differ from the names in transformers 5."""
        module, *projections = _EXPERTS.get(str(self._config.get("model_type")), _OF_QWEN)
        places: dict[str, _Place] = {}
        for name, place in stored.items():
            family_name = name.replace(".mlp.", f".{module}.")
            match = _FUSED.fullmatch(family_name)
            members = {family_name: place} if match is None else self._experts(place, match, projections)
            if doubled := members.keys() & places.keys():
                raise CheckpointError(f"{place.file}: {name} holds {some([*doubled])}, which another tensor holds too")
            places |= members
        return places

    def _experts(self, place: _Place, match: re.Match[str], projections: Sequence[str]) -> dict[str, _Place]:
        """Return name -> place of each matrix, or of each matrix of scales, in a fused tensor."""
        experts, kind, scale = match.groups(default="")
        fused = self._handle(place.file).get_slice(place.name)
        shape = fused.get_shape()
        names = projections[:2] if kind == "gate_up_proj" else projections[2:]
        if len(shape) != 3 or shape[1] % len(names):
            expected = "[experts, 2 x width, hidden size]" if len(names) == 2 else "[experts, hidden size, width]"
            raise CheckpointError(f"{place.file}: {place.name} has shape {tuple(shape)}, expected {expected}")
        height = shape[1] // len(names)
        if len(names) == 2 and self._block and fused.get_dtype() == "F8_E4M3" and height % self._block[0]:
            raise CheckpointError(
                f"{place.file}: {place.name} has gates of {height} rows, expected a multiple of the {self._block[0]} "
                "that share a scale: a block would belong to gate and up projection"
            )
        return {
            f"{experts}.{expert}.{name}.weight{scale}": _Place(place.file, place.name, expert, number * height, height)
            for expert in range(shape[0])
            for number, name in enumerate(names)
        }


def _opened(file: Path) -> Any:
    try:
        require_regular(file)
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, DataError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); truncated, or no safetensors file") from error


def describe_faults(faults: Mapping[str, Sequence[str]]) -> str:
    """Return fault -> names of tensors in words; "" without faults."""
    return "; ".join(f"{len(names)} tensors {fault}: {some(names)}" for fault, names in faults.items() if names)


def check_tensors(hf: HFCheckpoint, expected: dict[str, tuple[int, ...]], drop: Iterable[str] = ()) -> list[str]:
    """Compare names and shapes with the config's model. CheckpointError names all differences.

    Return the unknown names that are left out: of prediction layers, and matches of ``drop`` (globs).
    """
    unknown = {name for name in hf.names() - set(expected) if not _is_known_copy(name, hf, expected)}
    dropped = {name for pattern in drop for name in fnmatch.filter(unknown, pattern)}
    dropped |= unknown & hf.names_of_prediction_layers()
    faults = {
        "missing": list(set(expected) - hf.names()),
        "unknown": list(unknown - dropped),
        "of another shape": [
            f"{name} {hf.shape(name)} (expected {shape})"
            for name, shape in expected.items()
            if name in hf.names() and hf.shape(name) != shape
        ],
    }
    if text := describe_faults(faults):
        hint = "; what may be left out is for --drop GLOB of megarl convert" if faults["unknown"] else ""
        if any(_LAYER.fullmatch(name) for name in faults["unknown"]):
            hint += ", or, where these are prediction layers, for num_nextn_predict_layers of config.json"
        raise CheckpointError(f"{hf.path} does not hold the model of its config.json: {text}{hint}")
    for name in expected:
        hf.check_values(name)
    return sorted(dropped)


def describe_left_out(names: Sequence[str]) -> str:
    """Return a line about the tensors that ``check_tensors`` leaves out; "" for no tensors."""
    layers = sorted({int(match[1]) for name in names if (match := _LAYER.fullmatch(name))})
    of_layers = f" of prediction layer {', '.join(map(str, layers))}" if layers else ""
    return f"left out: {len(names)} tensors{of_layers} ({some(names)})" if names else ""


def _is_known_copy(name: str, hf: HFCheckpoint, expected: dict[str, tuple[int, ...]]) -> bool:
    """Whether a tensor is redundant: rotary frequencies, or a tied output layer equal to the embedding."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    embedding = "model.embed_tokens.weight"
    if name != "lm_head.weight" or not {embedding} & hf.names() & set(expected):
        return False
    return hf.shape(name) == hf.shape(embedding) and torch.equal(hf.read(name), hf.read(embedding))


def pack_shards(pieces: Sequence[T], sizes: Sequence[int], shard_bytes: int) -> tuple[list[list[T]], list[int]]:
    """Return (pieces of each file in order, bytes of each file). Only a single larger piece exceeds ``shard_bytes``."""
    pairs = zip(pieces, sizes, strict=True)
    shards = [list(shard) for shard in split_by_size(pairs, lambda pair: pair[1], shard_bytes)]
    return [[piece for piece, _ in shard] for shard in shards], [sum(size for _, size in shard) for shard in shards]


def split_by_size(items: Iterable[T], size_of: Callable[[T], int], max_size: int) -> Iterator[list[T]]:
    """Yield the items in groups of at most ``max_size``, or of a single larger item.

    A group is emptied before the next group, so that the items can be freed.
    """
    group: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and total + size > max_size:
            yield group
            group.clear()
            total = 0
        group.append(item)
        total += size
    if group:
        yield group


def bucket_bytes(num_values: int, max_bytes: int) -> int:
    """Return the bytes of a bucket of a weight update: a sixteenth of a small model in float32.

    Sending then overlaps with all but a small fraction of the work.
    """
    return min(max_bytes, max(8 << 20, num_values // 4))


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors of any shape to a safetensors file. OSError for disk errors, which safetensors wraps."""
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error
    file.chmod(0o644)  # safetensors 0.8 makes private files


def write_index(folder: Path, listing: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of a checkpoint; listing: tensor -> file."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": listing}
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def copy_model_files(
    source: Path,
    target: Path,
    dtype: torch.dtype | None,
    quantization: Mapping[str, Any] | None = None,
    predicts: bool = False,
) -> None:
    """Copy config, tokenizer and code, with dtype and quantisation of the new weights in the config.

    predicts: the new checkpoint has the prediction layers.
    """
    for file in model_files(source):
        if file.name not in (MANIFEST, FP8_ERRORS):
            shutil.copyfile(file, target / file.name)
    config = read_json(source / "config.json")
    for key in QUANTIZATION:
        config.pop(key, None)
    if not predicts and config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0  # otherwise engines would look for missing tensors
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2))
