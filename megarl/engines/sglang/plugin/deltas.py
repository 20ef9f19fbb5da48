"""A bucket of a weight update on the wire: the bytes that have changed since the last update.

message   uint32 length of the header | header | the changes of the tensors, back to back
header    JSON, for each tensor: name, dtype, shape, bytes of an item, old checksum, checksum, form, bytes that are sent

A tensor takes the form with the fewest bytes, for n items of s bytes, of which c have changed:

    same     none have changed       0
    places   in blocks of 65,536:    4 ceil(n / 65536) + (2 + s) c, counts and places, uint32 and uint16, and items
    bitmap   a bit for each item     ceil(n / 8) + s c
    whole    all items               n s

Checksums are CRC-32 of a whole tensor. They name the base in place of a version: a resumed run repeats version numbers.
Numbers are little-endian. The module needs numpy only, and torch for ``pack``.
"""

import json
import math
import pickle
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from megarl.errors import WeightSyncError, refusal

FORMAT = "megarl_delta_1"
"""``load_format`` of a message. A server with the plugin answers an empty message with this word."""
_BLOCK = 1 << 16
Bytes = np.ndarray
"""uint8 [bytes]."""


class _Entry(NamedTuple):
    """A tensor in the header."""

    name: str
    dtype: str
    shape: list[int]
    item_bytes: int
    old_checksum: int | None
    checksum: int
    form: str
    num_sent: int

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
    data = (np.ascontiguousarray(array).data for _, arrays in encoded for array in arrays)
    return b"".join((len(header).to_bytes(4, "little"), header, *data)), f"{FORMAT} {zlib.crc32(header)}"


def _encode(flat: Bytes, base: Bytes | None, place: Any) -> tuple[_Entry, list[np.ndarray]]:
    name, dtype, shape, begin, end = place
    new, checksum, size = flat[begin:end], None, dtype.itemsize
    form, arrays = "whole", [new]
    if base is not None:
        old, items = base[begin:end], new.view(f"<u{size}")
        differ = items != old.view(items.dtype)
        count, num_blocks = int(np.count_nonzero(differ)), -(-len(items) // _BLOCK)
        sizes = {"bitmap": -(-len(items) // 8) + size * count, "places": 4 * num_blocks + (2 + size) * count}
        sizes |= {"whole": len(new)} | ({} if count else {"same": 0})
        form = min(sizes, key=sizes.__getitem__)
        if form == "bitmap":
            arrays = [np.packbits(differ), items[differ]]
        elif form == "places":
            positions = np.flatnonzero(differ)
            counts = np.bincount(positions // _BLOCK, minlength=num_blocks)
            arrays = [counts.astype("<u4"), (positions % _BLOCK).astype("<u2"), items[positions]]
        checksum, arrays = (None if form == "whole" else zlib.crc32(old.data)), ([] if form == "same" else arrays)
    fields = name, str(dtype).removeprefix("torch."), list(shape), size, checksum, zlib.crc32(new.data), form
    return _Entry(*fields, sum(array.nbytes for array in arrays)), arrays


class Bases:
    """The bytes that a server got last."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Bytes, int]] = {}
        """Bytes and checksum, by name."""
        self._lock = threading.Lock()

    def expand(self, message: bytes) -> tuple[list[tuple[Any, ...]], Bytes, str]:
        """Return the places of a message's tensors, as in ``Bucket.places`` but for dtypes, which are names; their
        bytes, uint8 [bytes]; and the receipt.

        WeightSyncError, with all bases unchanged, if a tensor has another base, or a result another checksum.
        """
        header = message[4 : 4 + int.from_bytes(message[:4], "little")]
        entries = [_Entry(*fields) for fields in json.loads(header)]
        ends = list(accumulate(math.prod(entry.shape) * entry.item_bytes for entry in entries))
        starts = accumulate((entry.num_sent for entry in entries), initial=4 + len(header))
        flat = np.empty(ends[-1], np.uint8)
        places = [(*entry[:3], begin, end) for entry, begin, end in zip(entries, [0, *ends], ends, strict=False)]
        pieces = [flat[begin:end] for *_, begin, end in places]
        with self._lock, ThreadPoolExecutor() as threads:
            list(threads.map(partial(self._fill, message), entries, pieces, starts))
            for entry, piece in zip(entries, pieces, strict=True):
                self._held[entry.name] = piece, entry.checksum
        return places, flat, f"{FORMAT} {zlib.crc32(header)}"

    def _fill(self, message: bytes, entry: _Entry, piece: Bytes, start: int) -> None:
        data = np.frombuffer(message, np.uint8, entry.num_sent, start)
        if entry.form == "whole":
            piece[:] = data
        else:
            old, checksum = self._held.get(entry.name, (None, None))
            if old is None or checksum != entry.old_checksum:
                raise WeightSyncError(refusal("delta_of_others", entry=entry, checksum=checksum))
            piece[:] = old
            positions, values = _read_positions(entry, data)
            piece.view(entry.unit)[positions] = values.view(entry.unit)
        if (checksum := zlib.crc32(piece.data)) != entry.checksum:
            raise WeightSyncError(f"{entry.name} has checksum {checksum}, expected {entry.checksum}: send everything")


def _read_positions(entry: _Entry, data: Bytes) -> tuple[np.ndarray, Bytes]:
    """Return the positions of the changed items, int [items], and the items, uint8 [bytes]."""
    num_items = math.prod(entry.shape)
    if entry.form == "bitmap":
        end = -(-num_items // 8)
        return np.flatnonzero(np.unpackbits(data[:end], count=num_items)), data[end:]
    num_blocks = -(-num_items // _BLOCK) if entry.form == "places" else 0
    counts = data[: 4 * num_blocks].view("<u4")
    end = 4 * num_blocks + 2 * int(counts.sum())
    return np.repeat(np.arange(num_blocks) * _BLOCK, counts) + data[4 * num_blocks : end].view("<u2"), data[end:]


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
    return pickle.dumps({"flattened_tensor": flat, "metadata": metadata}, protocol=pickle.HIGHEST_PROTOCOL)


def repack(bases: Bases, message: bytes) -> tuple[bytes, str]:
    """Return the "flattened_bucket" of a message, and the receipt; WeightSyncError as in ``Bases.expand``."""
    import torch

    places, flat, receipt = bases.expand(message)
    typed = [(name, getattr(torch, dtype), *rest) for name, dtype, *rest in places]
    return pack(typed, torch.from_numpy(flat)), receipt
