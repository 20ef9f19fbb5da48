"""Prompts are tokenized in batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megarl.data import prompts
from megarl.data.prompts import load_demonstrations, load_prompts
from megarl.errors import DataError

Write = Callable[..., Path]
Make = Callable[..., PreTrainedTokenizerFast]
RECORDS = [
    {"prompt": "21=", "answer": "12"},
    {"prompt": [{"role": "user", "content": "3 1="}], "answer": 13},
    {"prompt": "abc: ", "answer": "\u00fc \U0001f642"},
    {"prompt": [{"role": "system", "content": "sort"}, {"role": "user", "content": "9"}], "answer": "9"},
    {"prompt": "1", "answer": "x" * 50},
]


def load(path: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Any:
    names = {"prompt_field": "prompt", "answer_field": "answer", "chat_template": False, "max_prompt_tokens": 50}
    return load_prompts(path, tokenizer=tokenizer, **(names | options))


def one_by_one(path: Path, tokenizer: PreTrainedTokenizerFast) -> list[tuple[Any, ...]]:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line:
            record = json.loads(line)
            text, chat = record["prompt"], isinstance(record["prompt"], list)
            if chat:
                text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
            found.append((len(found), ids, text, str(record["answer"]), f"{path}:{number}"))
    return found


def plain(found: Any) -> list[tuple[Any, ...]]:
    return [(each.index, each.tokens.tolist(), each.text, each.answer, each.source) for each in found]


@pytest.mark.parametrize("batch", [1, 2, 3, 1024])
def test_batches_give_what_one_by_one_gives(
    batch: int, write_jsonl: Write, make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_BATCH", batch)
    tokenizer = make_tokenizer(chat=True)
    path = write_jsonl(RECORDS[0], "", *RECORDS[1:])
    expected = one_by_one(path, tokenizer)
    found = load(path, tokenizer)
    assert plain(found) == expected
    assert found[0].tokens.dtype == np.int32
    assert plain(load(path, tokenizer, limit=3)) == expected[:3]


def test_a_subclass_of_its_own_is_asked_itself(write_jsonl: Write, make_tokenizer: Make) -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *given: Any, **options: Any) -> Any:
            doubled = [each * 2 for each in text] if isinstance(text, list) else text * 2
            return super()._encode_plus(doubled, *given, **options)

    own = Own(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="<e>")
    path = write_jsonl(*({"prompt": each, "answer": "1"} for each in ("21", "3")))
    assert [own.decode(each.tokens) for each in load(path, own)] == ["2121", "33"]


def test_errors_come_in_the_order_of_the_file(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    fine, long = {"prompt": "1", "answer": "1", "response": "1"}, {"prompt": "1" * 60, "answer": "1", "response": "1"}
    for late in ("broken", {"prompt": "", "answer": "1"}, {"answer": "1"}, long):
        with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt has 60 tokens"):
            load(write_jsonl(fine, long, late), tokenizer)
        with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt has 60 tokens"):
            load_demonstrations(write_jsonl(fine, long, late), tokenizer, max_prompt_tokens=50)


def test_special_tokens_in_a_text_are_split_as_the_tokenizer_says(write_jsonl: Write, make_tokenizer: Make) -> None:
    path, tokenizer = write_jsonl({"prompt": "1<s>", "answer": "1"}), make_tokenizer()
    whole = tokenizer("1<s>")["input_ids"]
    tokenizer("1", split_special_tokens=True)  # stays in its backend
    assert load(path, tokenizer)[0].tokens.tolist() == whole
    tokenizer.split_special_tokens = True
    assert load(path, tokenizer)[0].tokens.tolist() == tokenizer("1<s>")["input_ids"] != whole
