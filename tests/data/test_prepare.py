"""`megarl data prepare`: what it writes is what `[data]` reads, and all that is left out is counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from loading import load
from transformers import PreTrainedTokenizerFast

from megarl.cli import main
from megarl.data.prepare import prepare as writing
from megarl.data.prepare.command import Data
from megarl.data.prepare.prepare import judge_answer
from megarl.data.rewards import math_strict
from megarl.errors import ConfigError, DataError

Write = Callable[..., Path]
Make = Callable[..., PreTrainedTokenizerFast]


Recipe = dict[str, Any]


def prepare(source: str, out: Path, recipe: Recipe, **options: Any) -> dict[str, int]:
    return writing.prepare(Data("prepare", source, out, **recipe, **options))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_left_out_is_counted(write_jsonl: Write, tmp_path: Path) -> None:
    source = write_jsonl(
        {"q": {"text": "1+1"}, "a": "#### so #### 2 "},
        {"q": {"text": " 1+1\n"}, "a": "#### 2"},
        {"q": {"text": "1+1"}, "a": "#### 3"},
        {"q": {"text": "2"}, "a": "none"},
        {"q": {"text": " "}, "a": "#### 1"},
        {"q": {"text": None}, "a": "#### 1"},
        {"q": {"text": "3"}, "a": None},
        {"q": {"text": "4"}, "a": 7},
    )
    recipe = Recipe(prompt_field="q.text", answer_field="a", answer_after="####", template="{prompt} = {x}?")
    counts = prepare(str(source), tmp_path / "out", recipe)
    assert counts == {"read": 8, "train": 2, "duplicates": 2, "other answers": 1, "no answer": 2, "no prompt": 2}
    assert rows(tmp_path / "out" / "train.jsonl") == [
        {"prompt": "1+1 = {x}?", "answer": "2"},
        {"prompt": "4 = {x}?", "answer": "7"},
    ]
    assert not (tmp_path / "out" / "heldout.jsonl").exists()


def test_answers_that_the_reward_cannot_read_are_counted(
    write_jsonl: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"1": True, "$$": False, "x = 3": True, "$ $": False, r"\int f": True}
    source = write_jsonl(*({"prompt": str(number), "answer": answer} for number, answer in enumerate(answers)))
    assert main(["data", "prepare", str(source), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    first = f"first: {tmp_path}/out/train.jsonl:2 '$$'\n"
    assert f"2 of 5 answers cannot be read by the reward math_strict, {first}" in out
    assert "1 of 5 answers must be spelled in the same way" in out
    for answer, is_read in answers.items():  # the reward itself says the same
        assert (judge_answer(answer) == "cannot be read by the reward math_strict") == (not is_read)
        with nullcontext() if is_read else pytest.raises(ValueError, match="nothing to compare"):
            math_strict(prompt="", response=r"\boxed{7}", answer=answer)


def test_a_prompt_is_held_out_by_its_hash(tmp_path: Path, write_jsonl: Write) -> None:
    prompts = [f"{number}+1" for number in range(200)]
    held: list[list[str]] = []
    for number, (order, recipe) in enumerate(((prompts, Recipe()), (prompts[::-1], Recipe(template="Q: {prompt}")))):
        source = write_jsonl(*({"prompt": prompt, "answer": "1"} for prompt in order))
        counts = prepare(str(source), tmp_path / str(number), recipe, heldout=0.25)
        assert counts["train"] + counts["heldout"] == 200
        found = [row["prompt"].removeprefix("Q: ") for row in rows(tmp_path / str(number) / "heldout.jsonl")]
        assert not set(found) & {
            row["prompt"].removeprefix("Q: ") for row in rows(tmp_path / str(number) / "train.jsonl")
        }
        held.append(sorted(found))
    first_bytes = {prompt: hashlib.sha256(prompt.encode()).digest()[:8] for prompt in prompts}
    expected = [prompt for prompt in prompts if int.from_bytes(first_bytes[prompt]) / 2**64 < 0.25]
    assert held == [sorted(expected)] * 2


def test_the_trainer_reads_what_the_models_chat_template_makes(
    make_tokenizer: Make, write_jsonl: Write, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(chat=True)
    tokenizer.save_pretrained(tmp_path / "model")
    source = write_jsonl({"prompt": "1+1", "answer": 2}, {"prompt": "1+1+1+1", "answer": 4})
    # <s>a<e><u>1+1<e><a> are 9 tokens: at the limit it stays, beyond it does not.
    recipe = Recipe(system="a", model=tmp_path / "model", max_prompt_tokens=9)
    assert prepare(str(source), tmp_path / "out", recipe) == {"read": 2, "train": 1, "too long": 1}
    for chat_template in (False, True):
        path = tmp_path / "out" / "train.jsonl"
        (prompt,) = load(path, tokenizer, chat_template=chat_template, max_prompt_tokens=9)
        assert (prompt.text, prompt.answer, len(prompt.tokens)) == ("<s>a<e><u>1+1<e><a>", "2", 9)


@pytest.mark.parametrize(
    ("record", "options", "told"),
    [
        ({"prompt": "1"}, {}, ":1: there is no field 'answer'; the fields are: prompt; name the right field"),
        ({"prompt": "1", "answer": 0.5}, {}, ":1: the answer ('answer') is a number"),
        ({"prompt": [{"role": "assistant", "content": "1"}], "answer": "1"}, {}, "is the assistant's"),
        ({"prompt": [{"role": "system", "content": "1"}], "answer": "1"}, {"system": "x"}, "remove --system"),
        ({"prompt": [{"role": "user", "content": "1"}], "answer": "1"}, {"template": "{prompt}"}, "remove --template"),
        ({"prompt": "\ud800", "answer": "1"}, {}, "half a character"),
        ({"prompt": "1", "answer": ""}, {}, "0 prompts to train are left of 1 (1 without an answer), expected"),
        ({"prompt": "1", "answer": "2"}, {"answer_after": "#"}, "look at the fields, at --answer-after and --heldout"),
    ],
)
def test_a_bad_record_is_named_and_nothing_is_written(
    record: dict[str, Any], options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError) as caught:
        prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", Recipe(**options))
    assert told in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_files_are_replaced_only_if_asked_and_both(write_jsonl: Write, tmp_path: Path) -> None:
    source = str(write_jsonl(*({"prompt": str(number), "answer": "1"} for number in range(20))))
    prepare(source, tmp_path / "out", Recipe(), heldout=0.5)
    with pytest.raises(ConfigError, match=r"heldout.jsonl and .*train.jsonl: exists"):
        prepare(source, tmp_path / "out", Recipe())
    prepare(source, tmp_path / "out", Recipe(), overwrite=True)
    with pytest.raises(ConfigError, match="found a file, expected a folder"):
        prepare(source, Path(source), Recipe())
    made = tmp_path / "out" / "train.jsonl"
    before = made.read_bytes()
    with pytest.raises(ConfigError, match="is the source itself"):
        prepare(str(made), tmp_path / "out", Recipe(), limit=1, overwrite=True)
    assert made.read_bytes() == before
    # An old held-out file would share prompts with the new training file.
    assert [path.name for path in (tmp_path / "out").glob("*.jsonl")] == ["train.jsonl"]


def test_mistakes_are_one_line(
    write_jsonl: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_jsonl({"prompt": "1", "answer": "1"})
    for words, told in (
        (["--heldout", "1"], "--heldout: found '1'"),
        (["--heldout", "0.001"], "1 prompts to train and 0 held out"),
        (["--template", "x"], "--template: found 'x'"),
        (["--answer-after", ""], "--answer-after: found ''"),
        (["--max-prompt-tokens", "0"], "--max-prompt-tokens: found '0'"),
    ):
        assert main(["data", "prepare", str(source), "out", *words]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
