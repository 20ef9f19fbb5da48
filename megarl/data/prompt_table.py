"""Tokenized prompts as flat arrays, which the processes of a node share through a memory-mapped file.

The file holds the arrays of PromptTable in the format of ``megarl.files.tensor_file``. It lies in
``$XDG_CACHE_HOME/megarl/prompts`` (``~/.cache/megarl/prompts``), or in the user's folder below the temporary folder if
the cache is not writable. The name is a hash of everything that the content depends on, so that a file is never out of
date. Every process compares a SHA-256 of name and arrays. The file may be removed between runs.
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
"""Every process tokenizes a smaller file: that takes less than a second."""
_ARRAYS = ("bounds", "numbers", "tokens", "letters")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem with its answer."""

    index: int
    """Position in the source, 0..P-1."""
    tokens: np.ndarray
    """int32 [length], not empty."""
    text: str
    """The tokenized text: the plain text, or the chat after the template."""
    answer: str
    """Text for the reward function; not blank."""
    source: str
    """Place in the source: "train.jsonl:17" or "train.parquet row 16"."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable(Sequence[Prompt]):
    """P prompts, made on access: memory holds tokens and texts alone."""

    bounds: np.ndarray
    """int64 [3, P + 1]: begin of the tokens, of the text and of the answer of each prompt."""
    numbers: np.ndarray
    """int64 [P]: line or row in the source."""
    tokens: np.ndarray
    """int32 [T]."""
    letters: np.ndarray
    """uint8 [B]: all texts, then all answers, in UTF-8."""
    prefix: str
    """Text before the number in the name of a place."""
    rows: np.ndarray | None = None
    """int64 [N]: the selected prompts; None for all."""

    @classmethod
    def of(cls, batches: Iterator[tuple[list[int], list[list[int]], list[str], list[str]]], prefix: str) -> Self:
        """Return the table of batches of (numbers, tokens, texts, answers)."""
        arrays: list[list[np.ndarray]] = [[], [], [], []]
        sizes: list[list[np.ndarray]] = [[], [], []]
        for numbers, tokens, *texts in batches:
            columns = [tokens, *([text.encode() for text in column] for column in texts)]
            arrays[0].append(np.array(numbers, np.int64))
            arrays[1].append(np.fromiter(chain.from_iterable(tokens), np.int32))
            for array, column in zip(arrays[2:], columns[1:], strict=True):
                array.append(np.frombuffer(b"".join(column), np.uint8))
            for size, column in zip(sizes, columns, strict=True):
                size.append(np.fromiter(map(len, column), np.int64))
        bounds = np.stack([np.concatenate([[0], np.cumsum(np.concatenate(size))]) for size in sizes])
        bounds[2] += bounds[1, -1]
        numbers, tokens = np.concatenate(arrays[0]), np.concatenate(arrays[1])
        return cls(bounds, numbers, tokens, np.concatenate([*arrays[2], *arrays[3]]), prefix)

    def __len__(self) -> int:
        return len(self.numbers if self.rows is None else self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        row = range(len(self))[index]
        row = row if self.rows is None else int(self.rows[row])
        (begin, end), *spans = self.bounds[:, row : row + 2].tolist()
        text, answer = (self.letters[first:last].tobytes().decode() for first, last in spans)
        return Prompt(row, self.tokens[begin:end].copy(), text, answer, f"{self.prefix}{self.numbers[row]}")

    def take(self, rows: np.ndarray) -> Self:
        """Return the prompts of these rows, int64 [N], of this table."""
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


def share(
    source: Path, tokenizer: PreTrainedTokenizerBase, settings: Sequence[object], build: Callable[[], PromptTable]
) -> PromptTable:
    """Return the table of a file, memory-mapped; a process of the node calls ``build`` if there is no mapped file.

    settings: everything that the table depends on besides file and tokenizer.

    If no folder is writable, each process calls ``build``, and a warning is given.
    """
    # The code of other classes may change; some templates write today's date.
    is_standard = getattr(tokenizer, "backend_tokenizer", None) is not None and type(tokenizer).__module__.startswith(
        "transformers."
    )
    if not is_standard or "strftime" in str(tokenizer.chat_template) or source.stat().st_size < SHARED_FROM_BYTES:
        return build()
    digest, prefix = sha256_of(source), place_prefix(source)
    key = _key(digest, source.suffix, tokenizer, settings)
    try:
        path = _folder() / f"{key}.prompts"
        with suppress(TraceError):
            return _map(path, prefix)
        with _lock(path.with_suffix(".lock")):
            try:
                return _map(path, prefix)  # another process has built the table meanwhile
            except TraceError as error:
                if path.exists():
                    warnings.warn(f"{error}; the prompts are tokenized again", stacklevel=2)
            table = build()
            if sha256_of(source) != digest:  # the source was changed meanwhile
                return table
            arrays = {name: getattr(table, name) for name in _ARRAYS}
            write_atomically(path, dump_tensors(arrays, {"sha256": _hash_arrays(key, arrays)}))
        return _map(path, prefix)
    except (OSError, TraceError) as error:
        warnings.warn(f"{source}: every process keeps its own prompts in memory ({error})", stacklevel=2)
        return build()


def _key(digest: str, suffix: str, tokenizer: PreTrainedTokenizerBase, settings: Sequence[object]) -> str:
    """Return a hash of everything that the table of a file depends on."""
    backend: Any = tokenizer.backend_tokenizer
    versions = [__version__, version("transformers"), version("tokenizers")]
    not_in_backend = [tokenizer.eos_token, tokenizer.special_tokens_map, tokenizer.split_special_tokens]
    kind = [type(tokenizer).__name__, tokenizer.chat_template]
    values = [digest, suffix, backend.to_str(), *kind, *not_in_backend, *versions, *settings]
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def _folder() -> Path:
    """Return the first writable folder, made private. OSError without a writable folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):  # no home
        folder = make_private((Path(cache) if cache else Path.home() / ".cache") / "megarl" / "prompts")
        if os.access(folder, os.W_OK):
            return folder
    return make_private(Path(tempfile.gettempdir()) / f"megarl-{os.getuid()}")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Admit a single process of a node; a lock ends with its process. Some network file systems have no locks."""
    with path.open("w") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _map(path: Path, prefix: str) -> PromptTable:
    """Return the table in a file. TraceError for a missing or changed file."""
    arrays, metadata = load_tensors(path, mapped=True)
    if {*arrays} != {*_ARRAYS} or metadata.get("sha256") != _hash_arrays(path.stem, arrays):
        raise TraceError(f"{path} is not as it was written: its SHA-256 is another")
    return PromptTable(**arrays, prefix=prefix)


def _hash_arrays(key: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(key.encode())
    for name in _ARRAYS:
        digest.update(f"{arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()
