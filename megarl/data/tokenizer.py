"""The tokenizer of a model's folder: read, and checked against the files.

``tokenizer.json`` is read unchanged. Without that file, transformers rebuilds the tokenizer from other files by the
rules of a class for the model's type, or the folder's code makes the tokenizer, if the user trusts the code.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.tables.model import ModelConfig
from megarl.errors import ConfigError, DataError, describe, refusal, reworded
from megarl.files.foreign_json import read_object
from megarl.files.texts import read_table
from megarl.files.writing import find_tokenizer_code, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1024
INCOMPLETE = "\ufffd"
"""A decoder's text for bytes of an incomplete character."""
_TABLES = read_table(__file__)
_FILES: list[str] = _TABLES["files"]
"""Files that transformers reads without a limit of size or depth."""
_PROBE: str = _TABLES["probe"]
"""Typical text of a policy: words, numbers, code, LaTeX, white space, several scripts."""


def load_tokenizer(folder: str | Path, key: str, trust: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, after these checks:

    - the tokens in ``added_tokens_decoder`` and in the ``added_tokens`` of tokenizer.json have the stated ids
    - each special token is a single token
    - a probe text is decoded to itself, as far as the vocabulary and a normalizer allow

    Token ids in config.json and generation_config.json are not compared: released models state other end tokens there.

    trust: let code in the folder make the tokenizer (``auto_map``).

    ConfigError, naming the key or flag, if no tokenizer can be read, if a check fails, and for a tokenizer that only
    untrusted code can make.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder)
    for name in _FILES:
        if os.path.lexists(folder / name):
            with reworded(DataError, ConfigError, f"{key}: ", "; download it again"):
                read_object(folder / name)
    code = find_tokenizer_code(folder)
    advice = f"; its tokenizer is code of its own, {code}: read it, then pass --trust" if code and not trust else ""
    has_file = (folder / "tokenizer.json").is_file()
    reader = PreTrainedTokenizerFast if has_file and not (code and trust) else AutoTokenizer
    options: dict[str, Any] = {"local_files_only": True}
    if reader is AutoTokenizer:
        options["trust_remote_code"] = trust  # not None: transformers would ask at the keyboard
    try:
        tokenizer = reader.from_pretrained(folder, **options)
        faults = [*_find_differences(tokenizer, folder)]
    except Exception as error:  # transformers, tokenizers and the folder's code raise many kinds
        facts = {"key": key, "folder": folder, "error": describe(error), "advice": advice}
        raise ConfigError(refusal("no_tokenizer", **facts)) from error
    if advice and not has_file:
        faults.append("transformers guesses how it splits text")
    if faults:
        fault = faults[0] + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "")
        remedy = advice or "; mend the file that is wrong, or use a folder with another tokenizer.json"
        raise ConfigError(f"{key}: the tokenizer of {folder} is not what its files say: {fault}{remedy}")
    return tokenizer


def load_model_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the policy; ConfigError as in :func:`load_tokenizer`."""
    return load_tokenizer(model.path, "model.path", model.trust_remote_code)


def count_rows(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the rows of the model's embedding: ``vocab_size`` in the tokenizer's folder; None without a config.json.

    Models of any family count, unlike in ``megarl.models.shapes.read_shape``.
    """
    config = read_record(Path(tokenizer.name_or_path) / "config.json") if tokenizer.name_or_path else {}
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if type(size) is int else None


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool) -> list[list[int]]:
    """Return the token ids of each text; special: add special tokens. In batches: an encoding takes much memory.

    A bare Exception of tokenizers for a character without a token.
    """
    batches = (list(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH))
    encoded = (tokenizer(batch, add_special_tokens=special, verbose=False)["input_ids"] for batch in batches)
    return [*chain.from_iterable(encoded)]


def _find_differences(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Iterator[str]:
    """Yield the differences between a tokenizer and the files of its folder."""
    names = ("tokenizer_config.json", "tokenizer.json", "added_tokens.json")
    config, data, legacy = (read_record(folder / name) for name in names)
    decoder: Mapping[str, Any] = config.get("added_tokens_decoder") or {}
    of_config = [(int(id), token) for id, token in decoder.items()]
    of_data = [(token["id"], token) for token in data.get("added_tokens") or ()]
    stated = dict(zip(names, (of_config, of_data, [(id, {"content": t}) for t, id in legacy.items()]), strict=True))
    special = dict.fromkeys(map(str, tokenizer.all_special_tokens))
    for file, entries in stated.items():
        stated_ids: dict[str, list[int]] = {}
        for number, token in entries:  # a few tokenizers list a text twice, and encode either entry
            stated_ids.setdefault(token["content"], []).append(number)
        special |= dict.fromkeys(token["content"] for _, token in entries if token.get("special"))
        for content, numbers in stated_ids.items():
            if (token_id := tokenizer.convert_tokens_to_ids(content)) not in numbers:
                yield f"{file} says that {content!r} is token {numbers[0]}, but it is {token_id}"
    for content in special:
        token_id = tokenizer.convert_tokens_to_ids(content)
        if token_id is None or (token_id == tokenizer.unk_token_id and content != tokenizer.unk_token):
            yield f"the special token {content!r} is none of its tokens"
        elif (ids := tokenize(tokenizer, [content], special=False)[0]) != [token_id]:
            yield f"the special token {content!r} is token {token_id}, but is encoded as {ids}"
    text, tokens = _encode_probe(tokenizer)
    decoded = _decode(tokenizer, tokens)
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    normal = text if normalizer is None else normalizer.normalize_str(text).replace("\u2581", " ")
    # Sentencepiece writes a blank before a text, and the decoder removes a blank.
    if tokens and decoded.lstrip(" ") not in (text.lstrip(" "), normal.lstrip(" ")):
        pairs = zip(text.splitlines(), decoded.splitlines(), strict=False)
        line, decoded_line = next((pair for pair in pairs if pair[0] != pair[1]), (text, decoded))
        yield f"{line!r:.60} comes back as {decoded_line!r:.80}"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _encode_probe(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """Return the probe text without characters outside of the vocabulary, and the tokens of the text."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = (tokenizer.unk_token, getattr(model, "unk_token", None))

    def encode(text: str) -> list[int]:
        try:
            tokens = tokenize(tokenizer, [text], special=False)[0]
        except Exception:  # tokenizers raises a bare Exception for a character without a token
            return []
        is_unknown = any(token in unknown for token in tokenizer.convert_ids_to_tokens(tokens))
        return [] if is_unknown or INCOMPLETE in _decode(tokenizer, tokens) else tokens

    letters = {letter for letter in set(_PROBE) if encode(letter)}
    text = "".join(letter for letter in _PROBE if letter in letters)
    return text, encode(text)


_INVALID_RUN = 64
"""Tokens to look back through in a run of invalid bytes."""


def step_tokens(
    tokenizer: PreTrainedTokenizerBase, response_tokens: np.ndarray, ends: Sequence[int], special_tokens: bool = False
) -> np.ndarray:
    """Return the index of each step's last token, int64 [S]: the first k for which tokens 0..k decode to the step.

    A step that ends with the text ends with the last token, which may be the end token. A token may end several steps.

    response_tokens: integer [T]. ends: [S], characters of ``tokenizer.decode(response_tokens,
    skip_special_tokens=not special_tokens)`` up to the end of each step, checked by ``read_verdict``.

    Decodes about log2(T) prefixes per step. Sampling keeps no character offsets, and decoding token by token breaks
    characters whose bytes are spread over several tokens.
    """
    tokens = np.asarray(response_tokens).tolist()

    @functools.cache
    def text_up_to(index: int) -> str:
        return str(tokenizer.decode(tokens[: index + 1], skip_special_tokens=not special_tokens))

    text = text_up_to(len(tokens) - 1)
    last = len(tokens) - 1
    indices = [last if end == len(text) else _first_that_covers(text[:end], text_up_to, len(tokens)) for end in ends]
    return np.array(indices, dtype=np.int64)


def _first_that_covers(step: str, text_up_to: Callable[[int], str], num_tokens: int) -> int:
    index = bisect_left(range(num_tokens), True, key=lambda k: text_up_to(k).startswith(step))
    # A decoder with a byte fallback writes a run of bytes as incomplete until the last character is complete. A longer
    # prefix may therefore not cover the step although a shorter prefix does: look back through the run. A run of
    # invalid bytes may also begin with valid characters, which show until the invalid byte comes.
    look_back = _INVALID_RUN if INCOMPLETE in step else 0
    for earlier in range(index - 1, -1, -1):
        text = text_up_to(earlier)
        if text.startswith(step):
            index = earlier
        elif not text.endswith(INCOMPLETE) and index - earlier > look_back:
            break
    return index
