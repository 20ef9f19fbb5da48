"""Read the pickles in checkpoints without running code: a pickle is a program that may call any function by name.

Only the records of torch and Megatron are allowed. torch's readers and older releases of Megatron unpickle without
limits: call ``require_plain`` on a checkpoint before.
"""

import io
import pickle
import re
import reprlib
import zipfile
from argparse import Namespace
from pathlib import Path, PosixPath
from signal import Signals
from types import FunctionType, SimpleNamespace
from typing import IO, Any, ClassVar

import numpy as np
import torch

from megarl.errors import describe, refuse_if, reworded
from megarl.files.foreign_json import is_file_name, open_regular, read_regular
from megarl.files.texts import read_table

_MOST_METADATA = 1 << 30
_NO_PART = "which is no part of a checkpoint"
_NAMES = read_table(__file__)
_PLAIN = {(module, name) for module, names in _NAMES["metadata"].items() for name in names}
_Inert = type("_Inert", (), {"__new__": lambda cls, *_: object.__new__(cls)})
"""Stands for a record of Megatron's: a checkpoint can be read without Megatron."""
_SAFE = [
    *(Namespace, SimpleNamespace, PosixPath, io.BytesIO, Signals, np.ndarray, np.dtype, np.dtypes.UInt32DType),
    *((np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_Inert, f"{module}.{name}") for module, names in _NAMES["inert"].items() for name in names),
]
"""Classes for ``torch.load`` besides tensors and containers: Megatron's own list."""


_InPython: Any = pickle._Unpickler
"""The unpickler in Python can be told which objects a pickle may change; the C version cannot."""


class _PlainUnpickler(_InPython):
    def load_build(self) -> None:
        if isinstance(self.stack[-2], (type, FunctionType)):  # a changed class could pose as another class
            raise pickle.UnpicklingError(f"it changes {self.stack[-2].__name__}, {_NO_PART}")
        super().load_build()

    dispatch: ClassVar = {**_InPython.dispatch, pickle.BUILD[0]: load_build}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, {_NO_PART}")


def load_metadata(folder: Path) -> Any:
    """Return torch's Metadata in ``.metadata``. UnpicklingError if the file is damaged or names a forbidden object."""
    data = read_regular(folder / ".metadata", _MOST_METADATA)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # the unpickler itself checks its input nowhere
        raise pickle.UnpicklingError(f"its .metadata is damaged ({describe(error)})") from error


def part_of(folder: Path, stored: Any) -> Path:
    """Return the file of a record of ``.metadata``. UnpicklingError for a file outside of the folder."""
    name, begin, length = stored.relative_path, stored.offset, stored.length
    refuse_if(not is_file_name(name), pickle.UnpicklingError, "foreign_part", name=reprlib.repr(name))
    if type(begin) is not int or type(length) is not int or begin < 0 or length < 0:
        raise pickle.UnpicklingError(f"its .metadata has part {begin!r:.40}, {length!r:.40} of {name}, expected bytes")
    return folder / name


def load_plain(file: Path | IO[bytes]) -> Any:
    """Call ``torch.load`` on tensors, numbers, texts, containers and _SAFE. UnpicklingError for other objects."""
    _require_stored(file)
    try:
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([item for item in _SAFE if item not in allowed]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message is advice to load it without limits
        match = re.search(r"GLOBAL (\S+)", str(error))
        raise pickle.UnpicklingError(f"it names {match[1]}, {_NO_PART}" if match else "no plain data") from error


def load_part(folder: Path, stored: Any) -> Any:
    """Call ``load_plain`` on the bytes of a file that a record of ``.metadata`` names."""
    with open_regular(part_of(folder, stored)) as file:
        file.seek(stored.offset)
        return load_plain(io.BytesIO(file.read(stored.length)))


def _require_stored(file: Path | IO[bytes]) -> None:
    """Raise UnpicklingError for a compressed archive, whose content may be huge; torch compresses nothing."""
    try:
        with zipfile.ZipFile(file) as archive:
            compressed = [file.filename for file in archive.infolist() if file.compress_type != zipfile.ZIP_STORED]
    except zipfile.BadZipFile:  # older releases of torch write no archive
        compressed = []
    if compressed:
        raise pickle.UnpicklingError(f"it holds {reprlib.repr(compressed[0])}, compressed, {_NO_PART}")
    if not isinstance(file, Path):
        file.seek(0)


def require_plain(folder: Path) -> None:
    """Check all pickles in a ``torch_dist`` checkpoint.

    UnpicklingError if a pickle names a forbidden object; torch's own errors for damaged files.
    """
    metadata = load_metadata(folder)
    kinds = (AttributeError, IndexError, KeyError, TypeError)
    with reworded(kinds, pickle.UnpicklingError, "its .metadata is damaged (", ")", describe):
        for index, stored in metadata.storage_data.items():
            part_of(folder, stored)
            if type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata":
                load_part(folder, stored)
    for file in sorted(folder.rglob("*.pt")):
        with open_regular(file) as content:
            load_plain(content)
