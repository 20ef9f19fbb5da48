"""``megarl data prepare``: writes the prompt files of ``[data]`` from JSONL, Parquet, dataset folders and hub names."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megarl.config.command import show
from megarl.config.tables.data import DataConfig
from megarl.data.prepare.command import Data
from megarl.data.prompts import PromptReader, Text, answer_text, check_messages
from megarl.data.records import Record, get_field, read_records, type_name, write_jsonl
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError, DataError, refusal
from megarl.files.outputs import require_own_files
from megarl.files.texts import read_table

_LEFT_OUT: dict[str, str] = read_table(__file__)["left_out"]
TRAIN, HELDOUT = "train.jsonl", "heldout.jsonl"
_COUNTED = ("read", "train", "heldout", "no prompt", "no answer", "duplicates", "other answers", "too long")


def prepare(data: Data) -> Counter[str]:
    """Write ``out/train.jsonl``, and ``out/heldout.jsonl`` if ``heldout`` is above 0; return counts of records.

    Left out and counted: ``no answer``,
    ``no prompt``, ``duplicates`` of an earlier prompt, ``other answers`` (duplicates with a different answer), and
    ``too long``. Also counted: ``read``, ``train`` and ``heldout``.

    A prompt is held out if the first 8 bytes of its SHA-256, as a fraction of 2**64, are below ``heldout``: in every
    version and order of the data set, with every template.

    DataError with file and line for a missing field or a wrong type, and if a file would be empty. ConfigError for
    contradicting options, and for existing files, unless ``overwrite`` is set and an earlier call wrote
    the files.
    """
    if data.template is not None and "{prompt}" not in data.template:
        raise ConfigError(f"--template: found {data.template!r}, expected {{prompt}} in it")
    targets = {True: data.out / HELDOUT, False: data.out / TRAIN}
    existing = [path for path in targets.values() if path.exists()]
    if existing and not data.overwrite:
        raise ConfigError(f"{' and '.join(map(str, existing))}: exists; pass --overwrite or choose another folder")
    if Path(data.source).exists() and (same := [path for path in existing if path.samefile(data.source)]):
        raise ConfigError(f"{same[0]} is the source itself, which would be replaced; choose another folder")
    require_own_files(*targets.values())
    reader = _make_reader(data)
    counts: Counter[str] = Counter()
    rows: dict[bool, list[Record]] = {True: [], False: []}
    answers: dict[bytes, str] = {}
    records = read_records(data.source, split=data.split, limit=data.limit)
    found = [row for place, record in records if (row := _read(data, reader, counts, place, record)) is not None]
    texts = [text for text, _, _ in found if text is not None]  # no texts without a tokenizer
    for (_, digest, row), ids in zip(found, reader.encode(texts, None) if reader else [[]] * len(found), strict=True):
        if len(ids) > data.max_prompt_tokens:
            counts["too long"] += 1
        elif digest in answers:
            counts["duplicates"] += 1
            counts["other answers"] += answers[digest] != row["answer"]
        else:
            answers[digest] = row["answer"]
            rows[int.from_bytes(digest[:8]) < data.heldout * 2**64].append(row)
    counts |= Counter(train=len(rows[False]), heldout=len(rows[True]))
    if not rows[False] or (data.heldout and not rows[True]):
        prompts = f"{counts['train']} prompts to train" + (f" and {counts['heldout']} held out" if data.heldout else "")
        facts = {"read": counts["read"], "left_out": describe_left_out(counts)}
        raise DataError(refusal("nothing_left", source=data.source, prompts=prompts, **facts))
    require_own_files(*targets.values())  # somebody may have written a file meanwhile
    for path in filter(Path.exists, targets.values()):
        path.unlink()
    # The held-out file first: no training file may stand beside an older held-out file with common prompts.
    for is_heldout in (True, False) if data.heldout else (False,):
        write_jsonl(targets[is_heldout], rows[is_heldout])
    return counts


def describe_left_out(counts: Counter[str]) -> str:
    """Return the counts of records that were left out, in words."""
    texts = [text.format(counts[key], counts["other answers"]) for key, text in _LEFT_OUT.items() if counts[key]]
    return ", ".join(texts) or "nothing left out"


def _make_reader(data: Data) -> PromptReader | None:
    """Return the trainer's reader of prompts; None without a model."""
    if data.model is None:
        return None
    tokenizer = load_tokenizer(data.model, "--model", data.trust)
    if data.system is not None and not tokenizer.chat_template:
        raise ConfigError(f"--system: the tokenizer of {data.model} has no chat template; put the text in --template")
    return PromptReader(tokenizer, DataConfig(train=str(data.out / TRAIN), prompt_field=data.prompt_field))


_Row = tuple[Text | None, bytes, Record]
"""Text to measure, digest, prompt and answer to write."""


def _read(data: Data, reader: PromptReader | None, counts: Counter[str], place: str, record: Record) -> _Row | None:
    """Return the row of a record; None, and counted, if left out."""
    counts["read"] += 1
    raw = get_field(record, data.prompt_field, place)
    answer = get_field(record, data.answer_field, place)
    if isinstance(answer, str) and data.answer_after is not None:
        _, mark, answer = answer.rpartition(data.answer_after)
        answer = answer.strip() if mark else ""
    for name, value in (("prompt", raw), ("answer", answer)):
        if value is None or (isinstance(value, str) and not value.strip()):
            counts[f"no {name}"] += 1
            return None
    answer = answer_text(answer, data.answer_field, place)
    prompt = _shape(raw, data, reader is not None and reader.has_chat, place)
    text = reader.text({data.prompt_field: prompt}, place) if reader else None
    # Of the prompt in the source, without whitespace around the text.
    content = raw.strip() if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, sort_keys=True)
    return text, hashlib.sha256(content.encode()).digest(), {"prompt": prompt, "answer": answer}


def _shape(prompt: Any, data: Data, has_chat: bool, place: str) -> str | list[dict[str, str]]:
    """Return the prompt to write: text, or chat messages."""
    field = data.prompt_field
    if isinstance(prompt, list):
        if data.template is not None:
            raise DataError(f"{place}: the prompt ({field!r}) is a list of chat messages: remove --template")
        check_messages(prompt, field, place)
        messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
        if messages[-1]["role"] == "assistant":
            raise DataError(f"{place}: the last message of {field!r} is the assistant's, expected a question to answer")
        if data.system is not None and messages[0]["role"] == "system":
            raise DataError(f"{place}: {field!r} begins with a system message: remove --system")
    elif isinstance(prompt, str):
        text = prompt if data.template is None else data.template.replace("{prompt}", prompt)
        if not has_chat and data.system is None:
            return text
        messages = [{"role": "user", "content": text}]
    else:
        raise DataError(refusal("prompt_type", place=place, field=field, kind=type_name(prompt)))
    return [*([{"role": "system", "content": data.system}] if data.system is not None else []), *messages]


def judge_answer(answer: str) -> str | None:
    """Return why math_strict gives no response a reward, or but those spelled alike; None for a readable answer."""
    from megarl.data.math.grade import read_key  # sympy

    try:
        is_spelling = read_key(answer).is_spelling
    except ValueError:
        return "cannot be read by the reward math_strict"
    return "must be spelled in the same way, because math_strict does not know what they say" if is_spelling else None


def count_unreadable(files: Iterable[Path]) -> Iterator[str]:
    """Yield how many answers of prepared files math_strict cannot read, or reads as text only, with the first one."""
    answers = [(place, record["answer"]) for file in files for place, record in read_records(file)]
    faulty: dict[str, list[str]] = {}
    for place, answer in answers:
        if (fault := judge_answer(answer)) is not None:
            faulty.setdefault(fault, []).append(f"{place} {answer!r:.80}")
    for fault, found in faulty.items():
        yield f"{len(found)} of {len(answers)} answers {fault}, first: {found[0]}"


def prepare_and_show(command: Data) -> None:
    """Call ``prepare``, and print a summary with the lines for the configuration."""
    counts = prepare(command)
    written = {key: command.out / name for name, key in ((TRAIN, "train"), (HELDOUT, "heldout")) if counts[key]}
    lines = [f"{command.source}: read {counts['read']}; {describe_left_out(counts)}"]
    lines += [f"{path}: {counts[key]} prompts" for key, path in written.items()]
    unreadable: list[str] = []
    try:
        unreadable = [*count_unreadable(written.values())]
    except ModuleNotFoundError as error:
        lines.append(refusal("answers_unread", package=error.name))
    lines += unreadable
    lines += ["[data]", *(f"{key} = {json.dumps(str(path))}" for key, path in written.items())]
    lines += [f"max_prompt_tokens = {command.max_prompt_tokens}"]
    all_counts = {**dict.fromkeys(_COUNTED, 0), **counts}
    show("\n".join(lines), {"counts": all_counts, "files": written, "unreadable": unreadable}, command.json)
