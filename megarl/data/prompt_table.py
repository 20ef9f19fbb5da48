"""Tokenized prompts as a few flat arrays, which the processes of a node share through a memory-mapped file.

The file, as ``megarl.files.tensor_file`` writes it, has the arrays of PromptTable. It lies in
``$XDG_CACHE_HOME/megarl/prompts`` (``~/.cache/megarl/prompts``), or where that cannot be written in a folder of this
user below the temporary one. Its name is a hash of all that its content depends on, so that it is never out of date,
and it holds the SHA-256 of this name with its arrays, which every process compares. Between runs it may be removed.
"""

import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl import __version__
from megarl.config.trust import make_private
from megarl.data.records import place_prefix
from megarl.errors import TraceError
from megarl.files.tensor_file import dump_tensors, load_tensors
from megarl.files.writing import sha256_of, write_atomically

SHARED_FROM_BYTES = 1 << 22
"""Smaller files are tokenized by every process: that takes less than a second."""
_ARRAYS = ("bounds", "numbers", "tokens", "letters")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem with its answer."""

    index: int
    """Position in the source, 0..P-1."""
    tokens: np.ndarray
    """int32 [length], not empty."""
    text: str
    """The text that was tokenized: the plain text, or the chat after its template."""
    answer: str
    """The reward function compares the response with it; not blank."""
    source: str
    """Where it was read from: "train.jsonl:17" or "train.parquet row 16"."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable(Sequence[Prompt]):
    """Prompts that are made when they are asked for: P of them take no more memory than their tokens and texts."""

    bounds: np.ndarray
    """int64 [3, P + 1]: where the tokens, the text and the answer of each prompt begin."""
    numbers: np.ndarray
    """int64 [P]: line or row in the source."""
    tokens: np.ndarray
    """int32 [T]."""
    letters: np.ndarray
    """uint8 [B]: all texts, then all answers, in UTF-8."""
    prefix: str
    """What comes before the number in the name of a place."""
    rows: np.ndarray | None = None
    """int64 [N]: the prompts that were taken; None for all."""

    @classmethod
    def of(cls, batches: Iterator[tuple[list[int], list[list[int]], list[str], list[str]]], prefix: str) -> Self:
        """Return the table of batches of (numbers, tokens, texts, answers)."""
        parts: list[list[np.ndarray]] = [[], [], [], []]
        sizes: list[list[np.ndarray]] = [[], [], []]
        for numbers, tokens, *words in batches:
            columns = [tokens, *([text.encode() for text in column] for column in words)]
            parts[0].append(np.array(numbers, np.int64))
            parts[1].append(np.fromiter(chain.from_iterable(tokens), np.int32))
            for part, column in zip(parts[2:], columns[1:], strict=True):
                part.append(np.frombuffer(b"".join(column), np.uint8))
            for size, column in zip(sizes, columns, strict=True):
                size.append(np.fromiter(map(len, column), np.int64))
        bounds = np.stack([np.concatenate([[0], np.cumsum(np.concatenate(size))]) for size in sizes])
        bounds[2] += bounds[1, -1]
        numbers, tokens = np.concatenate(parts[0]), np.concatenate(parts[1])
        return cls(bounds, numbers, tokens, np.concatenate([*parts[2], *parts[3]]), prefix)

    def __len__(self) -> int:
        return len(self.numbers if self.rows is None else self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        row = range(len(self))[index]
        row = row if self.rows is None else int(self.rows[row])
        (begin, end), *words = self.bounds[:, row : row + 2].tolist()
        text, answer = (self.letters[i:j].tobytes().decode() for i, j in words)
        tokens = self.tokens[begin:end].copy()
        return Prompt(row, tokens, text, answer, f"{self.prefix}{self.numbers[row]}")

    def take(self, rows: np.ndarray) -> Self:
        """Return the prompts of these rows, int64 [N], of this table."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


def share(
    source: Path, tokenizer: PreTrainedTokenizerBase, settings: Sequence[object], build: Callable[[], PromptTable]
) -> PromptTable:
    """Return the table of a file: from the memory-mapped file if there is one, else built, by one process of a node.

    settings: what the table depends on besides the file and the tokenizer. Without a place to write, each process
    builds its own, and a warning says so.
    """
    # Other classes have code of their own, which may change; some templates write today's date.
    is_known = getattr(tokenizer, "backend_tokenizer", None) is not None and type(tokenizer).__module__.startswith(
        "transformers."
    )
    if not is_known or "strftime" in str(tokenizer.chat_template) or source.stat().st_size < SHARED_FROM_BYTES:
        return build()
    digest = sha256_of(source)
    key = _key(digest, source.suffix, tokenizer, settings)
    prefix = place_prefix(source)
    try:
        path = _folder() / f"{key}.prompts"
        with suppress(TraceError):
            return _map(path, prefix)
        with _lock(path.with_suffix(".lock")):
            try:
                return _map(path, prefix)  # another process has built it meanwhile
            except TraceError as error:
                if path.exists():
                    warnings.warn(f"{error}; the prompts are tokenized again", stacklevel=2)
            table = build()
            if sha256_of(source) != digest:  # somebody has written it meanwhile
                return table
            arrays = {name: getattr(table, name) for name in _ARRAYS}
            write_atomically(path, dump_tensors(arrays, {"sha256": _hash_arrays(key, arrays)}))
        return _map(path, prefix)
    except (OSError, TraceError) as error:
        warnings.warn(f"{source}: every process keeps its own prompts in memory ({error})", stacklevel=2)
        return build()


def _key(digest: str, suffix: str, tokenizer: PreTrainedTokenizerBase, settings: Sequence[object]) -> str:
    """A hash of all that the table of a file depends on."""
    backend: Any = tokenizer.backend_tokenizer
    versions = [__version__, version("transformers"), version("tokenizers")]
    apart = [tokenizer.eos_token, tokenizer.special_tokens_map, tokenizer.split_special_tokens]  # not in to_str
    kind = [type(tokenizer).__name__, tokenizer.chat_template]
    known = [digest, suffix, backend.to_str(), *kind, *apart, *versions, *settings]
    return hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()


def _folder() -> Path:
    """The first folder that can be written; OSError if there is none."""
    cache = os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):  # no home
        folder = (Path(cache) if cache else Path.home() / ".cache") / "megarl" / "prompts"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    return make_private(Path(tempfile.gettempdir()) / f"megarl-{os.getuid()}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process of a node in; a lock ends with its process. Some network file systems have none."""
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _map(path: Path, prefix: str) -> PromptTable:
    """The table in a file; TraceError if there is none, or it is not as it was written."""
    arrays, about = load_tensors(path, mapped=True)
    if {*arrays} != {*_ARRAYS} or about.get("sha256") != _hash_arrays(path.stem, arrays):
        raise TraceError(f"{path} is not as it was written: its SHA-256 is another")
    return PromptTable(**arrays, prefix=prefix)


def _hash_arrays(key: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(key.encode())
    for name in _ARRAYS:
        digest.update(f"{arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
