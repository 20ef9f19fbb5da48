"""The files of a run's samples: which of them trained, and texts.

samples.jsonl has the samples of each step, written before the step counts as done. Nothing is removed.

    {"step": 7, "weights": 6, "prompts": {"96": [0, 1, 2, 3], ...}}   step 7 trained on these samples
    {..., "dropped": {"96/3": "k3 0.92, ..."}}                        a tripwire dropped sample 3: it did not train
    {"resumed_after": 5, "time": "2026-01-31 12:00:00"}               steps after 5 were undone, their weights are gone

A prompt is named by the place in the run's order. No two draws share a place: (prompt, sample) names a single response.

responses.jsonl.gz has the model's responses, a few per step or all; zcat reads the file too. A step is a few gzip
members of JSON lines, appended in a single write; each line is a response (fields.toml). A kill can only cut the last
member: readers stop before it. The next start removes the cut member, and undone steps.
"""

import gzip
import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import DataError, reworded
from megarl.run.fields import require_fields

NAME = "responses.jsonl.gz"
_BLOCK = 1 << 16
_LARGEST_MEMBER = 1 << 30
_READABLE = "); the steps before can be read"


def pack(responses: Sequence[Mapping[str, Any]]) -> bytes:
    """Return responses as a gzip member; no bytes for none."""
    # JSON knows no NaN and no infinity: null.
    plain = [{k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in r.items()} for r in responses]
    lines = "".join(json.dumps(response) + "\n" for response in plain)
    return gzip.compress(lines.encode(), compresslevel=6, mtime=0) if lines else b""


def append(folder: Path, members: bytes) -> None:
    """Append the members of a step in one write, on one rank only. OSError if the disk refuses them."""
    with (folder / NAME).open("ab") as file:
        file.write(members)


def truncate_after(folder: Path, step: int) -> None:
    """Drop later steps, and remains of a kill or a damage, when a run resumes."""
    path, end = folder / NAME, 0
    if not path.is_file():
        return
    with suppress(DataError):  # nobody can read what follows a damage; it counts as lost
        for next_byte, content in _members(path):
            if _parse(path, content.splitlines()[-1])["step"] > step:
                break
            end = next_byte
    os.truncate(path, end)


def read_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the responses of a run in the order of their steps; nothing without stored responses.

    A half-written end is passed over. DataError if the file is damaged elsewhere.
    """
    path = folder / NAME
    if path.is_file():
        for _, content in _members(path):
            for line in content.splitlines():
                yield _parse(path, line)


def _members(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (end, content) of each complete gzip member."""
    with path.open("rb") as file:
        unread, begin = b"", 0
        while True:
            unpack, content = zlib.decompressobj(wbits=31), bytearray()
            while not unpack.eof:
                block = unread or file.read(_BLOCK)
                unread = b""
                if not block:
                    return  # the end of the file, or a member that a kill has cut off
                with reworded(zlib.error, DataError, f"{path}: byte {begin}: damaged (", _READABLE):
                    content += unpack.decompress(block)
                if len(content) > _LARGEST_MEMBER:
                    raise DataError(f"{path}: byte {begin}: a step of more than {_LARGEST_MEMBER} bytes")
            unread = unpack.unused_data
            begin = file.tell() - len(unread)
            yield begin, bytes(content)


def _parse(path: Path, line: bytes) -> dict[str, Any]:
    with reworded((ValueError, RecursionError), DataError, f"{path}: found {line[:60]!r}, no response of a run: "):
        response = json.loads(line)
        if isinstance(response, dict):
            response.setdefault("expected", None)
        require_fields(response, "response")
    are_pairs = all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in response["parts"])
    if not are_pairs or not all(isinstance(value, int | float) for value in response["rewards"].values()):
        raise DataError(f"{path}: expected the parts of a response as pairs of texts, and its rewards as numbers")
    return response


Key = tuple[int, int]
"""(place of the prompt, sample)."""


def record_step(
    folder: Path, step: int, weights: int, keys: np.ndarray | Sequence[Key], dropped: Mapping[Key, str]
) -> None:
    """Record the samples of step ``step`` (from 1), int64 [n, 2], on one rank only; on the disk when this returns.

    weights: the steps that the sampling weights had seen. dropped: why a tripwire dropped some of the samples.
    """
    prompts: dict[str, list[int]] = {}
    for prompt, sample in sorted(map(tuple, np.asarray(keys, np.int64).reshape(-1, 2).tolist())):
        if (prompt, sample) not in dropped:
            prompts.setdefault(str(prompt), []).append(sample)
    reasons = {f"{prompt}/{sample}": reason for (prompt, sample), reason in sorted(dropped.items())}
    _append(folder, {"step": step, "weights": weights, "prompts": prompts, **({"dropped": reasons} if reasons else {})})


def record_resume(folder: Path, done: int) -> None:
    """Record that the run continues from a checkpoint after step ``done``."""
    _append(folder, {"resumed_after": done, "time": time.strftime("%Y-%m-%d %H:%M:%S")})


def _append(folder: Path, line: dict[str, object]) -> None:
    with (folder / "samples.jsonl").open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")  # a kill has cut the line before
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
