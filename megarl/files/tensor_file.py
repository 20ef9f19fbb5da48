"""Files of named arrays in the safetensors format, with numpy alone (huggingface.co/docs/safetensors, "Format").

    8 bytes: length N of the header, little-endian; N bytes: the header, JSON; then the bytes of all tensors

The header holds dtype, shape and [begin, end) among the bytes of each tensor, and texts under ``__metadata__``.
``megarl trace`` runs without the package safetensors.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import DataError, TraceError
from megarl.files.foreign_files import require_regular
from megarl.files.foreign_json import parse_json

_DTYPES = {f"{letter.upper()}{8 * size}": np.dtype(f"<{letter}{size}") for letter in "ui" for size in (1, 2, 4, 8)}
"""Integers alone: more than a routing trace has."""
MOST_HEADER_BYTES = 100_000_000
_ALIGNMENT = 8


def dump_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file with tensors of any shape, the widest dtypes first: every tensor is aligned."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    contents, end = [], 0
    for key, values in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        contents.append(np.ascontiguousarray(values).tobytes())
        begin, end = end, end + len(contents[-1])
        header[key] = {"dtype": names[values.dtype], "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text, *contents])


def load_tensors(
    path: Path, check: Callable[[Mapping[str, str]], None] = lambda metadata: None, *, mapped: bool = False
) -> tuple[dict[str, np.ndarray], Mapping[str, str]]:
    """Return arrays of the stored shapes, and metadata; ``check`` gets the metadata before a tensor is read.

    mapped: leave the arrays in the file, memory-mapped and read-only.

    TraceError if the file is damaged or has a tensor of another dtype.
    """
    try:
        require_regular(path)
        is_mapped = mapped and path.stat().st_size > 0  # an empty file cannot be mapped
        content = np.memmap(path, np.uint8, "r") if is_mapped else np.frombuffer(path.read_bytes(), np.uint8)
        length = int.from_bytes(content[:8].tobytes(), "little")
        if len(content) < 8 or length > min(len(content) - 8, MOST_HEADER_BYTES):
            raise _damaged(path, f"{len(content)} bytes cannot hold a header of {length}")
        header = parse_json(content[8 : 8 + length].tobytes(), "its header", MOST_HEADER_BYTES)
    except (OSError, DataError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no table")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its metadata are no texts")
    check(metadata)
    data = content[8 + length :]
    tensors, end = {}, 0
    try:
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = entry["data_offsets"]
            dtype, shape = _DTYPES[entry["dtype"]], [*map(_natural, entry["shape"])]
            if begin != end or stop - begin != math.prod(shape) * dtype.itemsize:
                raise _damaged(path, f"tensor {name} has bytes {begin} to {stop}")
            tensors[name], end = data[begin:stop].view(dtype).reshape(shape), stop
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"its header is wrong: {type(error).__name__} {error}") from error
    if end != len(data):
        raise _damaged(path, f"{len(data)} bytes of tensors, expected {end}")
    return tensors, metadata


def _natural(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no length")
    return value


def _damaged(path: Path, reason: str) -> TraceError:
    return TraceError(f"{path}: not a readable safetensors file ({reason}); expected a trace file")
