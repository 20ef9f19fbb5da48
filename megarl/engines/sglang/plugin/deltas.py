"""A bucket of a weight update on the wire: the bytes that differ from those that the server got last.

message   uint32 length of the header | header | the parts of the tensors, back to back
header    JSON, for each tensor: name, dtype, shape, bytes of an item, checksum before, checksum after, form, part's bytes

A part takes the form with the fewest bytes, for n items of s bytes, of which c have changed:

    same     none have changed       0
    places   in blocks of 65,536:    4 ceil(n / 65536) + (2 + s) c, counts and places, uint32 and uint16, and items
    bitmap   a bit for each item     ceil(n / 8) + s c
    whole    all items               n s

Checksums are CRC-32 of a whole tensor. They name the base in place of a version: a resumed run repeats version numbers.
Numbers are little-endian. The module needs numpy only, and torch for ``pack``.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from megarl.errors import WeightSyncError

FORMAT = "megarl_delta_1"
"""``load_format`` of a message. A server with the plugin answers an empty message with this word."""
_BLOCK = 1 << 16
_LENGTH = struct.Struct("<I")
Bytes = np.ndarray
"""uint8 [bytes]."""


class _Entry(NamedTuple):
    """A tensor in the header."""

    name: str
    dtype: str
    shape: list[int]
    item_bytes: int
    before: int | None
    after: int
    form: str
    part_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def unit(self) -> str:
        return f"<u{self.item_bytes}"


def encode(places: Sequence[Any], flat: Bytes, base: Bytes | None = None) -> tuple[bytes, str]:
    """Return the message of a bucket, and the receipt of a server that has loaded the bucket.

    places: ``Bucket.places``. base: uint8 [bytes], the bucket that the server got last; None: everything is sent.
    """
    with ThreadPoolExecutor() as threads:
        encoded = list(threads.map(partial(_encode, flat, base), places))
    header = json.dumps([entry for entry, _ in encoded], separators=(",", ":")).encode()
    parts = (np.ascontiguousarray(array).data for _, arrays in encoded for array in arrays)
    return b"".join((_LENGTH.pack(len(header)), header, *parts)), _receipt(header)


def _receipt(header: bytes) -> str:
    return f"{FORMAT} {zlib.crc32(header)}"


def _encode(flat: Bytes, base: Bytes | None, place: Any) -> tuple[_Entry, list[np.ndarray]]:
    name, dtype, shape, begin, end = place
    after = flat[begin:end]
    fields = name, str(dtype).removeprefix("torch."), list(shape), dtype.itemsize
    if base is None:
        return _Entry(*fields, None, zlib.crc32(after), "whole", len(after)), [after]
    before, unit = base[begin:end], f"<u{dtype.itemsize}"
    items = after.view(unit)
    differ = items != before.view(unit)
    count, num_blocks = int(np.count_nonzero(differ)), -(-len(items) // _BLOCK)
    values = count * dtype.itemsize
    sizes = {"same": 0} if count == 0 else {}
    sizes |= {"whole": len(after), "bitmap": -(-len(items) // 8) + values, "places": 4 * num_blocks + 2 * count + values}
    form = min(sizes, key=lambda form: sizes[form])
    parts = {"same": [], "whole": [after], "bitmap": [], "places": []}[form]
    if form == "bitmap":
        parts = [np.packbits(differ), items[differ]]
    elif form == "places":
        positions = np.flatnonzero(differ)
        counts = np.bincount(positions // _BLOCK, minlength=num_blocks).astype("<u4")
        parts = [counts, (positions % _BLOCK).astype("<u2"), items[positions]]
    checksum = None if form == "whole" else zlib.crc32(before)
    return _Entry(*fields, checksum, zlib.crc32(after), form, sizes[form]), parts


class Bases:
    """The bytes that a server got last."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Bytes, int]] = {}
        """Bytes and checksum, by name."""
        self._lock = threading.Lock()

    def expand(self, message: bytes) -> tuple[list[_Entry], Bytes, str]:
        """Return the tensors of a message, their bytes back to back, uint8 [bytes], and the receipt.

        WeightSyncError, with all bases as before, if a tensor has another base, or a result another checksum.
        """
        (length,) = _LENGTH.unpack_from(message)
        header = message[_LENGTH.size : _LENGTH.size + length]
        entries = [_Entry(*fields) for fields in json.loads(header)]
        ends = np.cumsum([entry.num_bytes for entry in entries])
        starts = _LENGTH.size + length + np.cumsum([0, *(entry.part_bytes for entry in entries)])
        flat = np.empty(ends[-1], np.uint8)
        pieces = [flat[end - entry.num_bytes : end] for entry, end in zip(entries, ends, strict=True)]
        with self._lock, ThreadPoolExecutor() as threads:
            list(threads.map(partial(self._fill, message), entries, pieces, starts[:-1].tolist()))
            for entry, piece in zip(entries, pieces, strict=True):
                self._held[entry.name] = piece, entry.after
        return entries, flat, _receipt(header)

    def _fill(self, message: bytes, entry: _Entry, piece: Bytes, start: int) -> None:
        part = np.frombuffer(message, np.uint8, entry.part_bytes, start)
        if entry.form == "whole":
            piece[:] = part
        else:
            before, checksum = self._held.get(entry.name, (None, None))
            if before is None or checksum != entry.before:
                raise WeightSyncError(
                    f"{entry.name}: a delta from bytes with checksum {entry.before}, but the server holds {checksum}: "
                    "send everything"
                )
            piece[:] = before
            places, values = _read_places(entry, part)
            piece.view(entry.unit)[places] = values.view(entry.unit)
        if (checksum := zlib.crc32(piece)) != entry.after:
            raise WeightSyncError(f"{entry.name} has checksum {checksum} now, expected {entry.after}: send everything")


def _read_places(entry: _Entry, part: Bytes) -> tuple[np.ndarray, Bytes]:
    """Return the places of the changed items, and the items, uint8 [bytes]."""
    num_items = math.prod(entry.shape)
    if entry.form == "bitmap":
        end = -(-num_items // 8)
        return np.flatnonzero(np.unpackbits(part[:end], count=num_items)), part[end:]
    num_blocks = -(-num_items // _BLOCK) if entry.form == "places" else 0
    counts = part[: 4 * num_blocks].view("<u4")
    end = 4 * num_blocks + 2 * int(counts.sum())
    firsts = np.repeat(np.arange(num_blocks) * _BLOCK, counts)
    return firsts + part[4 * num_blocks : end].view("<u2"), part[end:]


def pack(places: Sequence[Any], flat: Any) -> bytes:
    """Return the pickle that SGLang takes as a "flattened_bucket".

    places: (name, torch's dtype, shape, first byte, end byte). flat: uint8 [bytes], or what is pickled as such. SGLang
    only reads attributes of the metadata, and refuses to unpickle most classes. Plain namespaces with the attribute
    names of SGLang's class work with all releases.
    """
    metadata = [
        SimpleNamespace(name=name, shape=list(shape), dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        for name, dtype, shape, start, end in places
    ]
    content = {"flattened_tensor": flat, "metadata": metadata}
    return pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)


def repack(bases: Bases, message: bytes) -> tuple[bytes, str]:
    """Return the "flattened_bucket" of a message, and the receipt; WeightSyncError as in ``Bases.expand``."""
    import torch

    entries, flat, receipt = bases.expand(message)
    ends = np.cumsum([entry.num_bytes for entry in entries]).tolist()
    places = [
        (entry.name, getattr(torch, entry.dtype), entry.shape, end - entry.num_bytes, end)
        for entry, end in zip(entries, ends, strict=True)
    ]
    return pack(places, torch.from_numpy(flat)), receipt
