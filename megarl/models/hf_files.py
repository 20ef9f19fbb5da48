"""Read Hugging Face checkpoint folders by tensor name, with a single open file, and write such folders."""

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.errors import CheckpointError, ConfigError, DataError, refusal, refuse_if, reworded, some
from megarl.files import hf_config
from megarl.files.foreign_json import require_regular
from megarl.files.texts import read_table
from megarl.files.writing import model_files
from megarl.models.hf_folder import INDEX, SINGLE, read_json, weight_files
from megarl.models.quantized import FLOATS, SCALES, dequantize, describe_misfit, pair_codes, shape_of_weight

MANIFEST = "conversion.json"
"""A conversion's file with checksums, and with the names of left-out tensors."""
_READ_ERRORS = (SafetensorError, RuntimeError, ValueError)
T = TypeVar("T")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in read_table(__file__).items()}


_LAYER = re.compile(r"(?:^|\.)model\.(?:language_model\.)?layers\.(\d+)\.(.+)")


class HFCheckpoint:
    """Read access by name to the safetensors files of a Hugging Face checkpoint folder; a context manager.

    Quantised weights (``megarl.models.quantized`` lists the forms) have the names, shapes and values of the dequantised
    model, in the dtype of the config; scales have no names.

    CheckpointError, naming the file or tensor, for a tensor that is missing, unreadable, or contradicts the index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config = read_json(self.path / "config.json") if (self.path / "config.json").is_file() else {}
        self._config = hf_config.flatten(config)
        self._kind = str(config.get("model_type"))
        self._open: tuple[Path, Any] | None = None
        with reworded(ConfigError, CheckpointError, f"{self.path}: "):
            self._block = hf_config.read_weight_block(self._config)
        self._files = self._locate()
        is_quantized = hf_config.find_quantization(self._config) is not None
        self._codes, hidden = pair_codes({n: self._slice(n).get_dtype() for n in self._files} if is_quantized else {})
        self._names = dict.fromkeys((*(name for name in self._files if name not in hidden), *self._codes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = None  # the last reference to the handle: the file is unmapped

    def names(self) -> KeysView[str]:
        """Return the names of all tensors, without scales."""
        return self._names.keys()

    def names_of_prediction_layers(self) -> set[str]:
        """Return the tensors of layers behind the model's layers that have an ``eh_proj``, and Qwen's ``mtp``."""
        last, layers = self._config.get("num_hidden_layers") or 0, self.text_name("model.layers.")
        matches = (_LAYER.search(name) for name in self.names() if name.endswith(".eh_proj.weight"))
        prefixes = ("mtp.", *(f"{layers}{match[1]}." for match in matches if match and int(match[1]) >= last))
        return {name for name in self.names() if name.startswith(prefixes)}

    def text_name(self, name: str) -> str:
        """Return the name that a tensor of a text model has in this checkpoint."""
        return hf_config.hf_name(self._kind, name)

    def names_of_text(self) -> set[str]:
        """Return the tensors of the text model, without prediction layers."""
        return {*self.names()} - self.names_of_prediction_layers() - {*self.names_beside_text()}

    def names_beside_text(self) -> list[str]:
        """Return the tensors of a larger model that do not belong to its text model, such as a vision tower's."""
        return sorted(name for name in self.names() if hf_config.is_beside_text(self._kind, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of ``read(name)``, from the file's header."""
        shape = self._stored_shape(name)
        return (shape[0], shape[2], shape[1]) if self._is_turned(name, shape) else shape

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        codes = self._slice(self._codes[name][0] if name in self._codes else name)
        shape = tuple(codes.get_shape())
        return shape_of_weight(shape, codes.get_dtype()) if name in self._codes else shape

    def _is_turned(self, name: str, shape: tuple[int, ...]) -> bool:
        with reworded(DataError, CheckpointError, f"{self._files.get(name, self.path)}: "):  # codes have other names
            return hf_config.is_turned(self._kind, name, shape, self._config.get("hidden_size", 0))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of ``read(name)``. CheckpointError for an unknown dtype."""
        if name in self._codes:
            return self._high_precision()
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            problem = f"{name} has dtype {stored}, expected one of {', '.join(_DTYPES)}"
            raise CheckpointError(f"{self._files[name]}: {problem}")
        return _DTYPES[stored]

    def stored(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor [...] as stored, also codes and scales. CheckpointError if unreadable.

        rows: of the first axis, read without the others.
        """
        refuse_if(name not in self._files, CheckpointError, "no_tensor", path=self.path, name=name)
        file = self._files[name]
        with reworded(_READ_ERRORS, CheckpointError, f"{file}: {name} cannot be read (", ")"):
            return self._handle(file).get_tensor(name) if rows is None else self._slice(name)[rows]

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor of ``shape(name)``, dequantised if quantised. CheckpointError if unreadable.

        rows: of the first axis, read without the others, for example an expert of a stack.
        """
        tensor = self._read_stored(name, rows)
        return tensor.transpose(1, 2) if self._is_turned(name, tuple(tensor.shape)) else tensor

    def _read_stored(self, name: str, rows: slice | None) -> torch.Tensor:
        if name not in self._codes:
            return self.stored(name, rows)
        self.check_values(name)
        codes, scales = self._codes[name]
        shape = self._stored_shape(name)
        if rows is not None and len(shape) < 3:  # rows of a matrix may begin inside a block
            return self._read_stored(name, None)[rows]
        if rows is None and len(shape) > 2 and shape[0] > 1:  # one by one: float32 values of all experts are large
            whole = torch.empty(shape, dtype=self._high_precision())
            for index in range(len(whole)):
                whole[index] = self._read_stored(name, slice(index, index + 1))[0]
            return whole
        is_shared = self._slice(scales).get_shape()[:1] in ([], [1])
        values = self.stored(codes, rows), self.stored(scales, None if is_shared else rows)
        return dequantize(*values, self._block_of(codes)).to(self._high_precision())

    def check_values(self, name: str) -> None:
        """Raise CheckpointError for a tensor of integers, and for codes without fitting scales; reads headers."""
        codes, scales = self._codes.get(name, (name, ""))
        stored = self._slice(codes).get_dtype()
        if not scales:
            if stored not in FLOATS:
                raise CheckpointError(refusal("no_weights", file=self._files[name], name=name, dtype=stored))
            return
        shape, found = self._stored_shape(name), tuple(self._slice(scales).get_shape())
        rows = (*shape[:-2], *shape[:-3:-1]) if stored == "U8" else shape  # MXFP4 is transposed
        if (kind := self._slice(scales).get_dtype()) not in SCALES.get(stored, FLOATS):
            raise CheckpointError(f"{self._files[codes]}: {scales} is {kind}, expected {SCALES.get(stored, FLOATS)}")
        if expected := describe_misfit(rows, found, self._block_of(codes)):
            raise CheckpointError(f"{self._files[codes]}: {scales} is {found}, expected {expected}")

    def _block_of(self, codes: str) -> tuple[int, int] | None:
        return (1, 32) if self._slice(codes).get_dtype() in ("U8", "I8") else self._block

    def _slice(self, name: str) -> Any:
        return self._handle(self._files[name]).get_slice(name)

    def _handle(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = file, _opened(file)
        return self._open[1]

    def _high_precision(self) -> torch.dtype:
        return getattr(torch, hf_config.read_dtype(self._config))

    def _locate(self) -> dict[str, Path]:
        """Return tensor name -> file. CheckpointError if index and files differ."""
        files, listed = weight_files(self.path)
        places: dict[str, Path] = {}
        for file in files:
            for name in _opened(file).keys():  # noqa: SIM118  (no mapping)
                if name in places:
                    raise CheckpointError(f"{name} is both in {places[name]} and in {file.name}, expected it once")
                places[name] = file
        if listed is None:
            for file in sorted({*self.path.glob("[!.]*.safetensors")} - {*files}):
                if doubled := [name for name in _opened(file).keys() if name in places]:  # noqa: SIM118
                    facts = {"path": self.path, "doubled": some(doubled), "single": SINGLE, "file": file.name}
                    raise CheckpointError(refusal("tensors_twice", **facts))
            return places
        if absent := [name for name, file in listed.items() if name not in places or places[name].name != file]:
            raise CheckpointError(f"{self.path}: {INDEX} names {some(absent)}, which are not in the file that it says")
        if unlisted := [name for name in places if name not in listed]:
            raise CheckpointError(f"{self.path}: the files hold {some(unlisted)}, which {INDEX} does not name")
        return places


def _opened(file: Path) -> Any:
    kinds, advice = (SafetensorError, OSError, DataError), "); truncated, or no safetensors file"
    with reworded(kinds, CheckpointError, f"{file} cannot be read (", advice):
        require_regular(file)
        return safe_open(file, framework="pt")


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
    unknown -= {*hf.names_beside_text()}
    shapes = {name: hf.shape(name) for name in expected.keys() & hf.names()}
    reshaped = [f"{n} {shape} (expected {expected[n]})" for n, shape in shapes.items() if shape != expected[n]]
    faults = {"missing": [*expected.keys() - hf.names()], "unknown": [*unknown - dropped], "of another shape": reshaped}
    if text := describe_faults(faults):
        hint = "; what may be left out is for --drop GLOB of megarl convert" if faults["unknown"] else ""
        raise CheckpointError(f"{hf.path} does not hold the model of its config.json: {text}{hint}")
    for name in expected:
        hf.check_values(name)
    return sorted(dropped)


def describe_left_out(names: Sequence[str]) -> str:
    """Return a line about the tensors that ``check_tensors`` leaves out; "" for no tensors."""
    layers = sorted({int(match[1]) for name in names if (match := _LAYER.search(name))})
    of_layers = f" of prediction layer {', '.join(map(str, layers))}" if layers else ""
    return f"left out: {len(names)} tensors{of_layers} ({some(names)})" if names else ""


def _is_known_copy(name: str, hf: HFCheckpoint, expected: dict[str, tuple[int, ...]]) -> bool:
    """Whether a tensor is redundant: rotary frequencies, or a tied output layer equal to the embedding."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    embedding, head = hf.text_name("model.embed_tokens.weight"), hf.text_name("lm_head.weight")
    if name != head or not {embedding} & hf.names() & set(expected):
        return False
    return hf.shape(name) == hf.shape(embedding) and torch.equal(hf.read(name), hf.read(embedding))


def pack_shards(pieces: Sequence[T], sizes: Sequence[int], shard_bytes: int) -> list[list[T]]:
    """Return the pieces of each file, in order. Only a single larger piece exceeds ``shard_bytes``."""
    shards = split_by_size(zip(pieces, sizes, strict=True), lambda pair: pair[1], shard_bytes)
    return [[piece for piece, _ in shard] for shard in shards]


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
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": listing}, indent=1))


_PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the number of prediction layers."""
_BESIDE = "model-beside-text.safetensors"


def _copy_beside_text(source: Path, target: Path) -> None:
    with HFCheckpoint(source) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.names_beside_text()}
    refuse_if(not tensors, CheckpointError, "text_alone", source=source)
    save_tensors(tensors, target / _BESIDE)
    empty = {"metadata": {"total_size": 0}, "weight_map": {}}
    index = read_json(target / INDEX) if (target / INDEX).is_file() else empty
    num_bytes = index["metadata"]["total_size"] + sum(tensor.nbytes for tensor in tensors.values())
    write_index(target, index["weight_map"] | dict.fromkeys(tensors, _BESIDE), num_bytes)


def copy_model_files(
    source: Path,
    target: Path,
    dtype: torch.dtype | None,
    quantization: Mapping[str, Any] | None = None,
    is_whole: bool = False,
) -> None:
    """Copy config, tokenizer and code, with dtype and quantisation of the new weights in the config.

    Of a text model inside a larger model, the rest of the larger model is copied too, and enters the index of
    ``target``; CheckpointError if it is absent. is_whole: the new checkpoint has it already, and prediction layers.
    """
    for file in model_files(source):
        if file.name != MANIFEST:
            shutil.copyfile(file, target / file.name)
    config = read_json(source / "config.json")
    if not is_whole and hf_config.family_entry(str(config.get("model_type")), "beside"):
        _copy_beside_text(source, target)
    for table in (config, config.get("text_config") or {}):
        for key in hf_config.QUANTIZATION:
            table.pop(key, None)
        # Otherwise engines would look for missing tensors.
        table |= {key: 0 for key in _PREDICTION_LAYERS if table.get(key) and not is_whole}
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config, indent=2))
