"""Write the prompt files that ``[data]`` reads, from JSONL, Parquet, dataset folders and hub names."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.data.prompts import answer_text, check_messages, encode_prompts, prompt_text
from megarl.data.records import Record, get_field, read_records, type_name, write_jsonl
from megarl.errors import ConfigError, DataError, describe, printable

TRAIN, HELDOUT = "train.jsonl", "heldout.jsonl"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How records become prompts."""

    prompt_field: str = "prompt"
    """May be dotted; plain text, or a list of chat messages."""
    answer_field: str = "answer"
    answer_after: str | None = None
    """The answer is what follows the last such text, as "####" in GSM8K."""
    system: str | None = None
    """A system message before each prompt, which then is a list of chat messages."""
    template: str | None = None
    """Text around a plain-text prompt, with ``{prompt}`` in its place."""
    max_prompt_tokens: int = 2048
    """Longer prompts are left out; counted with the tokenizer of ``model`` alone."""
    model: Path | None = None
    """A folder with a tokenizer. If it has a chat template, prompts are written as chat messages."""

    def __post_init__(self) -> None:
        if self.template is not None and "{prompt}" not in self.template:
            raise ConfigError(f"--template: found {self.template!r}, expected {{prompt}} in it")
        if self.answer_after == "":
            raise ConfigError("--answer-after: found no text, expected what comes before the answer, such as ####")
        if self.max_prompt_tokens < 1:
            raise ConfigError(f"--max-prompt-tokens: found {self.max_prompt_tokens}, expected at least 1")


def prepare(
    source: str,
    out: Path,
    recipe: Recipe,
    *,
    split: str | None = None,
    limit: int | None = None,
    heldout: float = 0.0,
    overwrite: bool = False,
) -> Counter[str]:
    """Write ``out/train.jsonl``, and ``out/heldout.jsonl`` if ``heldout`` is above 0; return what was counted.

    source, split, limit: as in :func:`megarl.data.records.read_records`. Left out and counted: ``no answer``,
    ``no prompt``, ``duplicates`` of an earlier prompt, ``other answers`` (those of them whose answer differs), and
    ``too long``. ``read``, ``train`` and ``heldout`` count the rest.

    A prompt is held out if the first 8 bytes of its SHA-256, as a fraction of 2**64, are below ``heldout``. So it is
    held out in every version and order of the data set, whatever the template is.

    Raises DataError with file and line (a missing field, a wrong type), and if nothing is left for a file. ConfigError
    for options that contradict each other and for files that exist, unless ``overwrite`` is set.
    """
    if not 0 <= heldout < 1:
        raise ConfigError(f"--heldout: found {heldout:g}, expected a share from 0 to below 1")
    targets = {True: out / HELDOUT, False: out / TRAIN}
    if not overwrite and (there := [str(path) for path in targets.values() if path.exists()]):
        raise ConfigError(f"{' and '.join(there)}: exists; pass --overwrite or choose another folder")
    if Path(source).exists() and (same := [path for path in targets.values() if _is_file(path, source)]):
        raise ConfigError(f"{same[0]} is the source itself, which would be replaced; choose another folder")
    tokenizer = _load_tokenizer(recipe)
    counts: Counter[str] = Counter()
    rows: dict[bool, list[Record]] = {True: [], False: []}
    seen: dict[bytes, str] = {}
    for place, record in read_records(source, split=split, limit=limit):
        counts["read"] += 1
        row = _make_row(record, recipe, tokenizer, place, counts)
        if row is None:
            continue
        digest = _digest(get_field(record, recipe.prompt_field, place), row["answer"], place)
        if digest in seen:
            counts["duplicates"] += 1
            counts["other answers"] += seen[digest] != row["answer"]
            continue
        seen[digest] = row["answer"]
        rows[int.from_bytes(digest[:8]) < heldout * 2**64].append(row)
    counts |= Counter(train=len(rows[False]), heldout=len(rows[True]))
    if not rows[False] or (heldout and not rows[True]):
        found = f"{counts['train']} prompts to train" + (f" and {counts['heldout']} held out" if heldout else "")
        left = counts["train"] + counts["heldout"]
        raise DataError(
            f"{source}: {found} are left of {counts['read']} ({describe_left_out(counts)}), expected at least one"
            + (" of each; change --heldout" if heldout and left > 1 else "")
        )
    _write(targets, rows, heldout > 0)
    return counts


def describe_left_out(counts: Counter[str]) -> str:
    """What was left out, in words."""
    names = {
        "no prompt": "without a prompt",
        "no answer": "without an answer",
        "duplicates": f"duplicates ({counts['other answers']} with another answer)",
        "too long": "too long",
    }
    return ", ".join(f"{counts[key]} {words}" for key, words in names.items() if counts[key]) or "nothing left out"


def _is_file(path: Path, source: str) -> bool:
    return path.exists() and path.samefile(source)


def _write(targets: dict[bool, Path], rows: dict[bool, list[Record]], heldout: bool) -> None:
    """The held-out file first, so that no training file stands beside an older one that it overlaps with."""
    try:
        targets[False].parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{error.filename}: found a file, expected a folder or nothing") from error
    targets[False].unlink(missing_ok=True)
    targets[True].unlink(missing_ok=True)
    for is_heldout in (True, False) if heldout else (False,):
        write_jsonl(targets[is_heldout], rows[is_heldout])


def _load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase | None:
    if recipe.model is None:
        return None
    if not recipe.model.is_dir():
        raise ConfigError(f"--model: there is no folder {recipe.model}, expected a Hugging Face folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(recipe.model, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise ConfigError(
            f"--model: {recipe.model} holds no tokenizer that can be read ({describe(error)}); expected a Hugging Face "
            "folder with tokenizer.json"
        ) from error
    if recipe.system is not None and not tokenizer.chat_template:
        raise ConfigError(f"--system: the tokenizer of {recipe.model} has no chat template; put the text in --template")
    return tokenizer


def _make_row(
    record: Record, recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None, place: str, counts: Counter[str]
) -> Record | None:
    """The prompt and answer to write; None, and counted, if the record is left out."""
    prompt = get_field(record, recipe.prompt_field, place)
    answer = get_field(record, recipe.answer_field, place)
    if isinstance(answer, str) and recipe.answer_after is not None:
        _, found, answer = answer.rpartition(recipe.answer_after)
        answer = answer.strip() if found else ""
    if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
        counts["no prompt"] += 1
        return None
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        counts["no answer"] += 1
        return None
    answer = answer_text(answer, recipe.answer_field, place)
    prompt = _shape(prompt, recipe, bool(tokenizer and tokenizer.chat_template), place)
    if tokenizer is not None:
        text = prompt_text(tokenizer, {recipe.prompt_field: prompt}, recipe.prompt_field, False, place)
        if len(encode_prompts(tokenizer, [text], recipe.prompt_field, None)[0]) > recipe.max_prompt_tokens:
            counts["too long"] += 1
            return None
    return {"prompt": prompt, "answer": answer}


def _shape(prompt: Any, recipe: Recipe, chat: bool, place: str) -> str | list[dict[str, str]]:
    """The prompt as it is written: text, or chat messages."""
    field = recipe.prompt_field
    if isinstance(prompt, list):
        if recipe.template is not None:
            raise DataError(f"{place}: the prompt ({field!r}) is a list of chat messages: remove --template")
        check_messages(prompt, field, place)
        messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{place}: the last message of {field!r} is the assistant's, expected a question to answer")
        if recipe.system is not None and messages[0]["role"] == "system":
            raise DataError(f"{place}: {field!r} begins with a system message: remove --system")
    elif isinstance(prompt, str):
        # Other braces stay as they are, because LaTeX uses them.
        text = prompt if recipe.template is None else recipe.template.replace("{prompt}", prompt)
        if not chat and recipe.system is None:
            return text
        messages = [{"role": "user", "content": text}]
    else:
        raise DataError(
            f"{place}: the prompt ({field!r}) is {type_name(prompt)}, expected text or a list of chat messages"
        )
    return [*([{"role": "system", "content": recipe.system}] if recipe.system is not None else []), *messages]


def _digest(prompt: Any, answer: str, place: str) -> bytes:
    """SHA-256 of a prompt as the source has it, without whitespace around it."""
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, sort_keys=True)
    try:
        answer.encode()
        return hashlib.sha256(text.encode()).digest()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: half a character (a lone surrogate), which UTF-8 cannot hold") from error


def prepare_and_show(source: str, out: Path, recipe: Recipe, **options: Any) -> None:
    """``prepare``, and a summary with the lines for the configuration."""
    counts = prepare(source, out, recipe, **options)
    print(printable(f"{source}: read {counts['read']}; {describe_left_out(counts)}"))
    for name, key in ((TRAIN, "train"), (HELDOUT, "heldout")):
        if counts[key]:
            print(printable(f"{out / name}: {counts[key]} prompts"))
    print("\n".join(_config_lines(out, recipe, counts)))


def _config_lines(out: Path, recipe: Recipe, counts: Counter[str]) -> Iterator[str]:
    yield "[data]"
    yield f"train = {json.dumps(str(out / TRAIN), ensure_ascii=False)}"
    if counts["heldout"]:
        yield f"heldout = {json.dumps(str(out / HELDOUT), ensure_ascii=False)}"
    yield f"max_prompt_tokens = {recipe.max_prompt_tokens}"
