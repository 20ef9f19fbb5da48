"""The tokenizer of a model's folder: read as its files say, checked, and called without detours.

``tokenizer.json`` is read as it is. Without one, transformers rebuilds the tokenizer from other files by the rules of a
class that it derives from the model's type, or the folder's own code makes it, where the user allows that.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.config.tables.model import ModelConfig
from megarl.errors import ConfigError, DataError, describe
from megarl.files.foreign_files import read_object
from megarl.files.writing import find_tokenizer_code, read_record

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are not a whole character."""
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json"),
)
"""What transformers reads of a folder without a limit of size or depth."""
_PROBE = (
    "The quick brown fox, don't stop: 0123456789 3.14\n\n\tdef f(a):\n        return a[0] != {'k': 1}  # yes\n"
    "Größe ÇA Привет мир Ελλάδα مرحبا עברית नमस्ते 你好,世界 日本語 한국어 🙂👍🏽 \\frac{1}{2} $x^2$ #### <tag>\n"
)
"""What a policy reads and writes: words, numbers, code, LaTeX, white space, several scripts."""


def load_tokenizer(folder: str | Path, key: str, trust: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; its tokens have the ids that the folder names, and text comes back as it was.

    Checked are the ids in ``added_tokens_decoder`` and in the ``added_tokens`` of tokenizer.json, that each special
    token is one token, and that a probe text is decoded to itself, as far as the vocabulary holds its characters and a
    normalizer leaves them. Token ids in config.json and generation_config.json are not compared: released models name
    other end tokens there.

    trust: whether code in the folder may make the tokenizer (``auto_map``), and then does.

    Raises ConfigError, naming the key or flag, if there is none that can be read, for a token with another id, for text
    that is lost, and for a tokenizer that only untrusted code can make.
    """
    folder = Path(folder)
    for name in _FILES:
        if os.path.lexists(folder / name):
            try:
                read_object(folder / name)
            except DataError as error:
                raise ConfigError(f"{key}: {error}; download it again") from error
    code = find_tokenizer_code(folder)
    advice = f"; its tokenizer is code of its own, {code}: read it, then pass --trust" if code and not trust else ""
    has_file = (folder / "tokenizer.json").is_file()
    reader = PreTrainedTokenizerFast if has_file and not (code and trust) else AutoTokenizer
    options: dict[str, Any] = {"local_files_only": True}
    if reader is AutoTokenizer:
        options["trust_remote_code"] = trust  # not None: transformers would ask at the keyboard
    try:
        tokenizer = reader.from_pretrained(folder, **options)
        wrong = [*_find_differences(tokenizer, folder)]
    except Exception as error:  # transformers, tokenizers and the folder's code raise many kinds
        raise ConfigError(
            f"{key}: {folder} holds no tokenizer that can be read ({describe(error)}); expected a Hugging Face folder "
            f"with tokenizer.json{advice}"
        ) from error
    if advice and not has_file:
        wrong.append("transformers guesses how it splits text")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        remedy = advice or "; mend the file that is wrong, or use a folder with another tokenizer.json"
        raise ConfigError(f"{key}: the tokenizer of {folder} is not what its files say: {wrong[0]}{more}{remedy}")
    return tokenizer


def load_model_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy; ConfigError as in :func:`load_tokenizer`."""
    return load_tokenizer(model.path, "model.path", model.trust_remote_code)


def count_rows(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The rows of the model's embedding: ``vocab_size`` of config.json beside the tokenizer; None without one."""
    config = read_record(Path(tokenizer.name_or_path) / "config.json") if tokenizer.name_or_path else {}
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if type(size) is int else None


def find_prefix(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special tokens that the tokenizer puts before plain text."""
    return frozenset(tokenize(tokenizer, [""], special=True)[0]) - {tokenizer.eos_token_id}  # type: ignore[arg-type]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool) -> list[list[int]]:
    """What the tokenizer's own call gives, in half its time where that only calls the backend.

    special: whether it adds its special tokens. Raises what tokenizers raise, for a character without a token.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer)._encode_plus is not PreTrainedTokenizerFast._encode_plus:
        return tokenizer(list(texts), add_special_tokens=special)["input_ids"]
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens  # a call with another setting leaves it there
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=special)]


def decode_all(
    tokenizer: PreTrainedTokenizerBase, sequences: Sequence[np.ndarray], special_tokens: bool = False
) -> list[str]:
    """Return the text of each of several responses, int32 [R], with or without special tokens."""
    ids, skip = [sequence.tolist() for sequence in sequences], not special_tokens
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and not tokenizer.clean_up_tokenization_spaces
    if is_plain and all(
        getattr(getattr(tokenizer, name), "__func__", None) is getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode")
    ):
        backend: Any = tokenizer.backend_tokenizer  # in a quarter of the time that the tokenizer's own call takes
        return backend.decode_batch(ids, skip_special_tokens=skip)
    return [str(tokenizer.decode(sequence, skip_special_tokens=skip)) for sequence in ids]


def _find_differences(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Iterator[str]:
    """Where a tokenizer is not what the folder says of it."""
    config, data, legacy = (
        read_record(folder / name) for name in ("tokenizer_config.json", "tokenizer.json", "added_tokens.json")
    )
    stated: dict[str, list[tuple[int, Mapping[str, Any]]]] = {
        "tokenizer_config.json": [(int(id), token) for id, token in (config.get("added_tokens_decoder") or {}).items()],
        "tokenizer.json": [(token["id"], token) for token in data.get("added_tokens") or ()],
        "added_tokens.json": [(id, {"content": content}) for content, id in legacy.items()],
    }
    special = dict.fromkeys(map(str, tokenizer.all_special_tokens))
    for file, entries in stated.items():
        stated_ids: dict[str, list[int]] = {}
        for number, token in entries:  # a few tokenizers have a text twice, which is encoded as one of the two
            stated_ids.setdefault(token["content"], []).append(number)
        special |= dict.fromkeys(token["content"] for _, token in entries if token.get("special"))
        for content, numbers in stated_ids.items():
            if (found := tokenizer.convert_tokens_to_ids(content)) not in numbers:
                yield f"{file} says that {content!r} is token {numbers[0]}, but it is {found}"
    for content in special:
        found = tokenizer.convert_tokens_to_ids(content)
        if found is None or (found == tokenizer.unk_token_id and content != tokenizer.unk_token):
            yield f"the special token {content!r} is none of its tokens"
        elif (ids := tokenize(tokenizer, [content], special=False)[0]) != [found]:
            yield f"the special token {content!r} is token {found}, but is encoded as {ids}"
    text, tokens = _encode_probe(tokenizer)
    decoded = _decode(tokenizer, tokens)
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    normal = text if normalizer is None else normalizer.normalize_str(text).replace("\u2581", " ")
    # Sentencepiece writes a blank before a text, and its decoder takes one away.
    if tokens and decoded.lstrip(" ") not in (text.lstrip(" "), normal.lstrip(" ")):
        pairs = zip(text.splitlines(), decoded.splitlines(), strict=False)
        before, after = next((pair for pair in pairs if pair[0] != pair[1]), (text, decoded))
        yield f"{before!r:.60} comes back as {after!r:.80}"
    words = " ".join(text.split())  # transformers splits runs of blanks in another way than sentencepiece
    pieces = None if data else _sentencepiece_ids(folder / "tokenizer.model", words)
    if pieces and pieces != (made := tokenize(tokenizer, [words], special=False)[0]):
        yield f"tokenizer.model makes {pieces[:4]}... of {words[:20]!r}..., but it makes {made[:4]}..."


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _encode_probe(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]]:
    """The probe text without the characters that the vocabulary does not hold, and its tokens."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = (tokenizer.unk_token, getattr(model, "unk_token", None))

    def encode(text: str) -> list[int]:
        try:
            tokens = tokenize(tokenizer, [text], special=False)[0]
        except Exception:  # tokenizers raises a bare Exception for a character without a token
            return []
        is_unknown = any(token in unknown for token in tokenizer.convert_ids_to_tokens(tokens))
        return [] if is_unknown or INCOMPLETE in _decode(tokenizer, tokens) else tokens

    held = {letter for letter in set(_PROBE) if encode(letter)}
    text = "".join(letter for letter in _PROBE if letter in held)
    return text, encode(text)


def _sentencepiece_ids(path: Path, text: str) -> list[int] | None:
    """What sentencepiece itself makes of a text; None without it, and for a file of another kind with this name."""
    with suppress(ImportError, OSError, RuntimeError):
        return import_module("sentencepiece").SentencePieceProcessor(model_file=str(path)).encode(text)
    return None
