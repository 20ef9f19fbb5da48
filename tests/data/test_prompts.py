from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading import load, load_shown
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from megarl.data import tokenizer as tokenizer_module
from megarl.data.prompts import PromptOrder
from megarl.errors import ConfigError, DataError

Write = Callable[..., Path]
Make = Callable[..., PreTrainedTokenizerFast]


def test_jsonl_gives_tokens_text_answer_and_place(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl({"prompt": "21=", "answer": "12"}, "", {"prompt": "30=", "answer": 3})
    first, second = load(path, tokenizer)
    assert first.tokens.dtype == np.int32
    assert tokenizer.decode(first.tokens) == first.text == "21="
    assert (first.index, first.answer, first.source) == (0, "12", f"{path}:1")
    # The blank line is no record, yet it counts as a line; a whole number is a fine answer.
    assert (second.index, second.answer, second.source) == (1, "3", f"{path}:3")
    broken = write_jsonl({"prompt": "1=", "answer": "1"}, "broken", name="broken.jsonl")
    assert [prompt.text for prompt in load(broken, tokenizer, limit=1)] == ["1="]  # and reads no further


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "1=", "answer": ', "broken JSON"),
        ('{"prompt": "1=", "answer": ' + "9" * 5000 + "}", "broken JSON"),
        ("[1, 2]", "a list instead of a JSON object"),
        ('{"question": "1=", "answer": "1"}', "no field 'prompt'; the fields are: question, answer"),
        ('{"prompt": "1="}', "no field 'answer'"),
        ('{"prompt": 7, "answer": "1"}', "a whole number, expected text"),
        ('{"prompt": "1=", "answer": null}', "no answer ('answer' is null)"),
        ('{"prompt": "1=", "answer": "\\n"}', "no answer ('answer' is blank)"),
        ('{"prompt": "1=", "answer": 0.5}', "a number, expected text"),
        ('{"prompt": "123456789=", "answer": "1"}', "10 tokens, more than data.max_prompt_tokens = 8"),
        ('{"prompt": [{"role": "user", "content": "1="}], "answer": "1"}', "no chat template"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "expected role and content"),
        ('{"prompt": [{"role": "user", "content": " "}], "answer": "1"}', "no message with content"),
        ('{"prompt": [{"role": "forbidden", "content": "21="}], "answer": "1"}', "role is not allowed"),
    ],
)
def test_a_bad_line_is_named(line: str, told: str, write_jsonl: Write, make_tokenizer: Make) -> None:
    path = write_jsonl({"prompt": "21=", "answer": "12"}, line, {"prompt": "21=", "answer": "12"})
    with pytest.raises(DataError) as caught:
        load(path, make_tokenizer(chat="template" not in told), max_prompt_tokens=8)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_without_examples(write_jsonl: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="empty"):
        load(write_jsonl("", " "), tokenizer)
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "absent.jsonl", tokenizer)
    (tmp_path / "train.txt").write_text("prompt,answer\n")
    with pytest.raises(DataError, match=r"expected \.jsonl, \.json, \.parquet, \.csv, \.tsv"):
        load(tmp_path / "train.txt", tokenizer)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load(tmp_path / "train.parquet", tokenizer)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "1=", "answer": "1"}\n{"prompt": "\xff", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8 text \(byte 12"):
        load(tmp_path / "latin.jsonl", tokenizer)
    with pytest.raises(ConfigError, match="no chat template"):
        load(tmp_path / "latin.jsonl", tokenizer, chat_template=True)
    with pytest.raises(ConfigError, match="is a file"):
        load(write_jsonl({"prompt": "1=", "answer": "1"}), tokenizer, split="train")


def test_parquet_with_messages_and_a_nested_answer(tmp_path: Path, make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(chat=True)
    chats = [[{"role": "system", "content": "sort"}, {"role": "user", "content": f"{n}1="}] for n in range(3)]
    answers = [{"ground_truth": f"1{n}", "style": "rule"} for n in range(3)]
    path = tmp_path / "train.parquet"
    parquet.write_table(pa.table({"prompt": chats, "reward_model": answers}), path)
    found = load(path, tokenizer, answer_field="reward_model.ground_truth")
    assert [prompt.answer for prompt in found] == ["10", "11", "12"]
    assert found[2].text == "<s>sort<e><u>21=<e><a>"
    # Template marks are single tokens, and no end token is added behind the mark that opens the answer.
    assert found[2].tokens.tolist() == tokenizer.convert_tokens_to_ids(
        ["<s>", *"sort", "<e>", "<u>", *"21=", "<e>", "<a>"]
    )
    assert found[2].source == f"{path} row 2"
    with pytest.raises(DataError, match=r"row 0: there is no field 'reward_model\.answer'"):
        load(path, tokenizer, answer_field="reward_model.answer")


def test_a_tokenizer_that_ends_the_prompt_is_refused(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <e>", special_tokens=[("<e>", tokenizer.eos_token_id)]
    )
    with pytest.raises(DataError, match="appends its end token"):
        load(write_jsonl({"prompt": "21=", "answer": "12"}), tokenizer)


def test_a_dataset_folder_through_datasets(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sorting"
    folder.mkdir()
    for split, digit in (("train", 1), ("test", 2)):
        table = pa.table({"prompt": [f"{digit}{n}=" for n in range(2)], "answer": ["x", "y"]})
        parquet.write_table(table, folder / f"{split}.parquet")
    found = load(str(folder), tokenizer, split="test")
    assert [(prompt.text, prompt.answer) for prompt in found] == [("20=", "x"), ("21=", "y")]
    assert found[1].source == f"{folder} row 1"
    with pytest.raises(DataError, match="has the splits train, test"):
        load(str(folder), tokenizer)
    with pytest.raises(DataError, match="neither a file here nor a data set"):
        load(str(folder), tokenizer, split="validation")


def test_demonstrations_end_once_and_mask_the_prompt(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_jsonl({"prompt": "21=", "response": "12"}, {"prompt": "3=", "response": "3<e>"})
    first, second = load_shown(path, tokenizer)
    assert tokenizer.decode(first.tokens) == "21=12<e>"
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert first.tokens.dtype == np.int32
    assert first.loss_mask.dtype == np.bool_
    assert tokenizer.decode(second.tokens) == "3=3<e>"
    # The prompt part must be what RL will send, token for token.
    (prompt,) = load(write_jsonl({"prompt": "21=", "answer": "12"}, name="rl.jsonl"), tokenizer)
    assert first.tokens[~first.loss_mask].tolist() == prompt.tokens.tolist()


def test_bad_demonstrations(write_jsonl: Write, tokenizer: PreTrainedTokenizerFast, make_tokenizer: Make) -> None:
    with pytest.raises(DataError, match=r":1: 'response' is empty"):
        load_shown(write_jsonl({"prompt": "21=", "response": ""}), tokenizer)
    with pytest.raises(DataError, match=r":1: 'response' is null"):
        load_shown(write_jsonl({"prompt": "21=", "response": None}), tokenizer)
    path = write_jsonl({"prompt": "21=", "response": "12"})
    for limit, name, found in (
        ("max_prompt_tokens", "prompt has 3 tokens, more than data.max_prompt_tokens = 2", 3),
        ("max_response_tokens", "response with its end has 3 tokens, more than rollout.max_response_tokens = 2", 3),
        ("max_positions", "prompt with response has 6 tokens, more than the model's positions = 5", 6),
    ):
        assert len(load_shown(path, tokenizer, **{limit: found})) == 1
        with pytest.raises(DataError, match=f":1: (the )?{re.escape(name)}"):
            load_shown(path, tokenizer, **{limit: found - 1})
    with pytest.raises(ConfigError, match="no chat template"):
        load_shown(path, tokenizer, chat_template=True)
    with pytest.raises(ConfigError, match="no eos_token"):
        load_shown(path, make_tokenizer(eos_token=None))


@given(num_prompts=st.integers(1, 40), seed=st.integers(0, 2**64 - 1), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_order_is_a_function_of_the_position(num_prompts: int, seed: int, cuts: list[int]) -> None:
    order = PromptOrder(num_prompts, seed)
    whole = order.take(0, sum(cuts))
    position, parts = 0, []
    for count in cuts:
        parts.append(PromptOrder(num_prompts, seed).take(position, count))
        position += count
    assert np.concatenate([np.zeros(0, np.int64), *parts]).tolist() == whole.tolist()
    for start in range(0, len(whole), num_prompts):
        epoch = whole[start : start + num_prompts]
        assert len(set(epoch.tolist())) == len(epoch)
    assert sorted(order.epoch(3).tolist()) == list(range(num_prompts))


def test_order_differs_by_epoch_and_seed_and_never_changes() -> None:
    order = PromptOrder(100, seed=0)
    assert order.epoch(0).tolist() != order.epoch(1).tolist()
    assert not order.epoch(0).flags.writeable, "the next step takes from the same"
    assert order.epoch(0).tolist() != PromptOrder(100, seed=1).epoch(0).tolist()
    # (seed 0, epoch 1) is not (seed 1, epoch 0): the two are separate words of the key.
    assert order.epoch(1).tolist() != PromptOrder(100, seed=1).epoch(0).tolist()
    # Checkpoints hold only a position, so the order itself must be the same for ever.
    assert PromptOrder(8, seed=7).take(5, 8).tolist() == [7, 5, 0, 3, 1, 6, 2, 5]


RECORDS = [
    {"prompt": "21=", "answer": "12"},
    {"prompt": [{"role": "user", "content": "3 1="}], "answer": 13},
    {"prompt": "abc: ", "answer": "\u00fc \U0001f642"},
    {"prompt": [{"role": "system", "content": "sort"}, {"role": "user", "content": "9"}], "answer": "9"},
    {"prompt": "1", "answer": "x" * 50},
]


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
    monkeypatch.setattr(tokenizer_module, "_BATCH", batch)
    tokenizer = make_tokenizer(chat=True)
    path = write_jsonl(RECORDS[0], "", *RECORDS[1:])
    expected = one_by_one(path, tokenizer)
    found = load(path, tokenizer)
    assert plain(found) == expected
    assert found[0].tokens.dtype == np.int32
    assert plain(load(path, tokenizer, limit=3)) == expected[:3]
