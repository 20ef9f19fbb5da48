"""Files of named numpy arrays in the safetensors format."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megarl.errors import DataError, TraceError
from megarl.files.foreign_json import require_regular


def dump_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the content of a file with tensors of any shape."""
    return save({name: np.ascontiguousarray(values) for name, values in tensors.items()}, dict(metadata))


def load_tensors(
    path: Path, check: Callable[[Mapping[str, str]], None] = lambda metadata: None
) -> tuple[dict[str, np.ndarray], Mapping[str, str]]:
    """Return arrays of the stored shapes, and metadata; ``check`` gets the metadata before a tensor is read.

    TraceError if the file is damaged.
    """
    try:
        require_regular(path)
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            check(metadata)
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (not a mapping)
    except (OSError, DataError, SafetensorError, TypeError) as error:  # TypeError: a dtype without a match in numpy
        raise TraceError(f"{path}: not a readable safetensors file ({error}); expected a trace file") from error
