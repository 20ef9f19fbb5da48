"""Write the prompt files that ``[data]`` reads, from JSONL, JSON, Parquet, dataset folders and hub names."""

import hashlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from megarl.config.file import as_toml, split_overrides
from megarl.data.chat import check_messages
from megarl.data.prepare.command import Data, Recipe
from megarl.data.prompts import PromptReader, Text, answer_text, in_batches
from megarl.data.records import Record, get_field, read_records, type_name, write_jsonl
from megarl.data.rewards import can_read_answer, is_spelling
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError, DataError, printable
from megarl.files.outputs import require_own_files

TRAIN, HELDOUT = "train.jsonl", "heldout.jsonl"


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
    for options that contradict each other, and for files that exist, unless ``overwrite`` is set and an earlier call
    wrote them.
    """
    _check(recipe)
    if not 0 <= heldout < 1:
        raise ConfigError(f"--heldout: found {heldout:g}, expected a share from 0 to below 1")
    targets = {True: out / HELDOUT, False: out / TRAIN}
    there = [path for path in targets.values() if path.exists()]
    if there and not overwrite:
        raise ConfigError(f"{' and '.join(map(str, there))}: exists; pass --overwrite or choose another folder")
    if Path(source).exists() and (same := [path for path in there if path.samefile(source)]):
        raise ConfigError(f"{same[0]} is the source itself, which would be replaced; choose another folder")
    require_own_files(*targets.values())
    reader, chat = _make_reader(recipe)
    counts: Counter[str] = Counter()
    rows: dict[bool, list[Record]] = {True: [], False: []}
    seen: dict[bytes, str] = {}
    read = partial(_read, recipe, reader, chat, counts)
    for batch in in_batches(read_records(source, split=split, limit=limit), read):
        texts = [text for text, _, _ in batch if text is not None]  # none without a tokenizer
        tokens = reader.encode(texts, None) if reader else [[]] * len(batch)
        for (_, digest, row), ids in zip(batch, tokens, strict=True):
            if len(ids) > recipe.max_prompt_tokens:
                counts["too long"] += 1
            elif digest in seen:
                counts["duplicates"] += 1
                counts["other answers"] += seen[digest] != row["answer"]
            else:
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


def _check(recipe: Recipe) -> None:
    if recipe.template is not None and "{prompt}" not in recipe.template:
        raise ConfigError(f"--template: found {recipe.template!r}, expected {{prompt}} in it")
    if recipe.answer_after == "":
        raise ConfigError("--answer-after: found no text, expected what comes before the answer, such as ####")
    if recipe.max_prompt_tokens < 1:
        raise ConfigError(f"--max-prompt-tokens: found {recipe.max_prompt_tokens}, expected at least 1")


def _write(targets: dict[bool, Path], rows: dict[bool, list[Record]], heldout: bool) -> None:
    """The held-out file first, so that no training file stands beside an older one that it overlaps with."""
    require_own_files(*targets.values())  # somebody may have written one meanwhile
    for earlier in (path for path in targets.values() if path.exists()):
        earlier.unlink()
    for is_heldout in (True, False) if heldout else (False,):
        write_jsonl(targets[is_heldout], rows[is_heldout])


def _make_reader(recipe: Recipe) -> tuple[PromptReader | None, bool]:
    """What reads prompts as the trainer will, None without a model; and whether the model has a chat template."""
    if recipe.model is None:
        if _read_arguments(recipe):
            raise ConfigError("--chat-template-args: there is no chat template without --model; add it")
        return None, False
    if not recipe.model.is_dir():
        raise ConfigError(f"--model: there is no folder {recipe.model}, expected a Hugging Face folder")
    tokenizer = load_tokenizer(recipe.model, "--model", recipe.trust)
    if recipe.system is not None and not tokenizer.chat_template:
        raise ConfigError(f"--system: the tokenizer of {recipe.model} has no chat template; put the text in --template")
    reader = PromptReader(tokenizer, recipe.prompt_field, arguments=_read_arguments(recipe))
    return reader, bool(tokenizer.chat_template)


def _read_arguments(recipe: Recipe) -> dict[str, Any]:
    """The variables of the chat template."""
    _, found = split_overrides([f"--data.chat_template_args={recipe.chat_template_args}"])
    (arguments,) = found.values()
    if not isinstance(arguments, dict):
        raise ConfigError(f"--chat-template-args: found {arguments!r}, expected a table such as {{a = true}}")
    return arguments


def _read(
    recipe: Recipe, reader: PromptReader | None, chat: bool, counts: Counter[str], place: str, record: Record
) -> tuple[Text | None, bytes, Record] | None:
    """(text to measure, digest, prompt and answer to write) of a record; None, and counted, if it is left out."""
    counts["read"] += 1
    asked = get_field(record, recipe.prompt_field, place)
    answer = get_field(record, recipe.answer_field, place)
    if isinstance(answer, str) and recipe.answer_after is not None:
        _, found, answer = answer.rpartition(recipe.answer_after)
        answer = answer.strip() if found else ""
    for name, value in (("prompt", asked), ("answer", answer)):
        if value is None or (isinstance(value, str) and not value.strip()):
            counts[f"no {name}"] += 1
            return None
    answer = answer_text(answer, recipe.answer_field, place)
    prompt = _shape(asked, recipe, chat, place)
    text = reader.text({recipe.prompt_field: prompt}, place) if reader else None
    return text, _digest(asked), {"prompt": prompt, "answer": answer}


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


def _digest(prompt: Any) -> bytes:
    """SHA-256 of a prompt as the source has it, without whitespace around it."""
    text = prompt.strip() if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def count_unreadable(files: Iterable[Path], reward: str) -> Iterator[str]:
    """Yield how many answers of prepared files a reward cannot read, or not but as text, each with the first one."""
    answers = [(place, record["answer"]) for file in files for place, record in read_records(file)]
    faults = {f"cannot be read by the reward {reward}": cache(lambda answer: not can_read_answer(answer, reward))}
    if reward == "math_strict":
        faults["must be spelled in the same way, because math_strict does not know what they say"] = cache(is_spelling)
    for what, has_fault in faults.items():
        found = [(place, answer) for place, answer in answers if has_fault(answer)]
        first = "".join(f", first: {place} {answer!r:.80}" for place, answer in found[:1])
        yield f"{len(found)} of {len(answers)} answers {what}{first}"


def prepare_and_show(asked: Data) -> None:
    """``prepare``, and a summary with the lines for the configuration."""
    options = {name: getattr(asked, name) for name in ("split", "limit", "heldout", "overwrite")}
    counts = prepare(asked.source, asked.out, asked, **options)
    print(printable(f"{asked.source}: read {counts['read']}; {describe_left_out(counts)}"))
    written = {key: asked.out / name for name, key in ((TRAIN, "train"), (HELDOUT, "heldout")) if counts[key]}
    for key, path in written.items():
        print(printable(f"{path}: {counts[key]} prompts"))
    if asked.reward != "exact_match":
        is_here = asked.reward != "math_verify" or importlib.util.find_spec("math_verify") is not None
        told = (
            count_unreadable(written.values(), asked.reward)
            if is_here
            else ["answers were not tried: pip install math-verify"]
        )
        print(*map(printable, told), sep="\n")
    lines = [f"{key} = {json.dumps(str(path), ensure_ascii=False)}" for key, path in written.items()]
    if arguments := _read_arguments(asked):
        lines.append(f"chat_template_args = {as_toml(arguments)}")
    print("[data]", *lines, f"max_prompt_tokens = {asked.max_prompt_tokens}", sep="\n")
