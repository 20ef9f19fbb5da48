"""responses.jsonl.gz: the model's responses, a few per step or all; zcat reads the file too.

A step is a few gzip members of JSON lines, appended in a single write; each line is a response (``FIELDS``). A kill can
only cut the last member: readers stop before it. The next start removes the cut member, and undone steps.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.errors import DataError

NAME = "responses.jsonl.gz"
FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,),  # global step, from 1
    "group": (int,),  # place of the prompt in the run's order, as in samples.jsonl
    "sample": (int,),  # which response to the prompt
    "rank": (int,),  # that drew it
    "prompt": (str,),  # as the model sees it, special tokens included
    "response": (str,),  # everything after the prompt
    "parts": (list,),  # with tools: [["model" | "environment", text], ...], else empty
    "reward": (float, int, type(None)),  # null without a reward
    "rewards": (dict,),  # by name, for several rewards
    "error": (str, type(None)),  # of the reward or the environment
    "length": (int,),  # tokens that the model generated
    "tool_calls": (int,),  # answers of the environment
    # mean k3 per generated token, each at most 1; null if the engines were not compared
    "gap": (float, int, type(None)),
    "finish": (str,),  # stop, length or abort
    "trained": (bool,),
    "dropped": (str, type(None)),  # why a tripwire dropped it
}
"""What a response has, with the types of JSON."""
_BLOCK = 1 << 16
_LARGEST_MEMBER = 1 << 30


def pack(responses: Sequence[Mapping[str, Any]]) -> bytes:
    """Return responses as a gzip member; no bytes for none."""
    lines = "".join(json.dumps(_finite(dict(response))) + "\n" for response in responses)
    return gzip.compress(lines.encode(), compresslevel=6, mtime=0) if lines else b""


class SampleFile:
    """Appends the responses of a run, on one rank only."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def append(self, members: bytes) -> None:
        """Append the members of a step in one write. OSError if the disk refuses them."""
        with self.path.open("ab") as file:
            file.write(members)

    def truncate_after(self, step: int) -> None:
        """Drop later steps, and remains of a kill or a damage, when a run resumes."""
        if not self.path.is_file():
            return
        end = 0
        try:
            for next_byte, content in _members(self.path):
                if _parse(self.path, content.splitlines()[-1])["step"] > step:
                    break
                end = next_byte
        except DataError:
            pass  # nobody can read what follows; it counts as lost
        with self.path.open("r+b") as file:
            file.truncate(end)


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
                try:
                    content += unpack.decompress(block)
                except zlib.error as error:
                    raise DataError(f"{path}: byte {begin}: damaged ({error}); the steps before can be read") from error
                if len(content) > _LARGEST_MEMBER:
                    raise DataError(f"{path}: byte {begin}: a step of more than {_LARGEST_MEMBER} bytes")
            unread = unpack.unused_data
            begin = file.tell() - len(unread)
            yield begin, bytes(content)


def _parse(path: Path, line: bytes) -> dict[str, Any]:
    try:
        response = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: found {line[:60]!r}, expected JSON ({error})") from error
    for name, types in FIELDS.items():
        value = response.get(name) if isinstance(response, dict) else None
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise DataError(f"{path}: a response has {name} = {value!r:.60}, expected {types[0].__name__}")
    are_pairs = all(
        isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in response["parts"]
    )
    if not are_pairs or not all(isinstance(value, int | float) for value in response["rewards"].values()):
        raise DataError(f"{path}: expected the parts of a response as pairs of texts, and its rewards as numbers")
    return response


def _finite(response: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not know, by null."""
    for name in ("reward", "gap"):
        if response[name] is not None and not math.isfinite(response[name]):
            response[name] = None
    return response
