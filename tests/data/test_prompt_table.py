"""Prompts are tokenized in batches, by one process of a node, and read from a memory-mapped file by all."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from megarl.data import prompt_table, prompts
from megarl.data.prompts import Prompt, load_demonstrations, load_prompts
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


@pytest.fixture
def shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Also a small file is shared, in the folder that is returned."""
    monkeypatch.setattr(prompt_table, "SHARED_FROM_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megarl" / "prompts"


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
    batch: int, write_jsonl: Write, make_tokenizer: Make, shares: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_BATCH", batch)
    tokenizer = make_tokenizer(chat=True)
    path = write_jsonl(RECORDS[0], "", *RECORDS[1:])
    expected = one_by_one(path, tokenizer)
    for _ in range(2):  # the second time from the file
        found = load(path, tokenizer)
        assert plain(found) == plain(list(found)) == expected
        assert found[0].tokens.dtype == np.int32
    assert len(list(shares.glob("*.prompts"))) == 1
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


def test_prompts_are_a_sequence_that_can_be_taken_from(write_jsonl: Write, make_tokenizer: Make) -> None:
    found = load(write_jsonl(*RECORDS), make_tokenizer(chat=True))
    assert (len(found), found[-1].answer, found[np.int64(1)].answer) == (5, "x" * 50, "13")
    taken = found.take(np.array([3, 0, 3]))
    assert [each.index for each in taken] == [3, 0, 3]
    assert (len(taken), taken[-1].answer) == (3, "9")
    assert [each.index for each in found[1:-1:2]] == [1, 3]
    assert [each.index for each in taken[:2]] == [3, 0]
    assert [each.index for each in taken[1:].take(np.array([1, 0]))] == [3, 0]
    for sequence, index in ((found, 5), (found, -6), (taken, 3)):
        with pytest.raises(IndexError):
            sequence[index]
    found[0].tokens[0] = 99
    assert found[0].tokens[0] != 99, "a prompt is nobody else's"


def test_special_tokens_in_a_text_are_split_as_the_tokenizer_says(write_jsonl: Write, make_tokenizer: Make) -> None:
    path, tokenizer = write_jsonl({"prompt": "1<s>", "answer": "1"}), make_tokenizer()
    whole = tokenizer("1<s>")["input_ids"]
    tokenizer("1", split_special_tokens=True)  # stays in its backend
    assert load(path, tokenizer)[0].tokens.tolist() == whole
    tokenizer.split_special_tokens = True
    assert load(path, tokenizer)[0].tokens.tolist() == tokenizer("1<s>")["input_ids"] != whole


class TestSharing:
    def test_the_file_is_read_again_until_something_differs(
        self, write_jsonl: Write, make_tokenizer: Make, shares: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, tokenizer = write_jsonl(*RECORDS), make_tokenizer(chat=True)
        expected = plain(load(path, tokenizer))
        monkeypatch.setattr(prompts, "tokenize", lambda *_, **__: pytest.fail("tokenized again"))
        mapped = load(path, make_tokenizer(chat=True))
        assert plain(mapped) == expected
        assert isinstance(mapped.tokens, np.memmap)
        copied = path.with_name("copy.jsonl")
        copied.write_bytes(path.read_bytes())
        assert [each.source for each in load(copied, tokenizer)] == [f"{copied}:{n}" for n in range(1, 6)]
        other, more = make_tokenizer(chat=True), make_tokenizer(chat=True)
        other.chat_template = f"{other.chat_template} "
        more.add_tokens(["ab"])
        for options in ({"max_prompt_tokens": 49}, {"answer_field": "prompt"}, {"chat_template": True}):
            with pytest.raises((pytest.fail.Exception, DataError)):
                load(path, tokenizer, **options)
        for another in (other, more):
            with pytest.raises(pytest.fail.Exception):
                load(path, another)
        path.write_text(path.read_text().replace("21=", "22="))
        with pytest.raises(pytest.fail.Exception):
            load(path, tokenizer)

    def test_what_the_backend_does_not_tell_is_told_apart(
        self, write_jsonl: Write, make_tokenizer: Make, shares: Path
    ) -> None:
        path, tokenizer = write_jsonl({"prompt": "1<s>", "answer": "1"}), make_tokenizer()
        whole = load(path, tokenizer)[0].tokens.tolist()
        tokenizer.split_special_tokens = True
        assert load(path, tokenizer)[0].tokens.tolist() != whole

        class Own(PreTrainedTokenizerFast):
            pass

        load(path, Own(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<e>"))
        assert len(list(shares.glob("*.prompts"))) == 2, "the code of another class may change"

    def test_a_file_that_is_written_meanwhile_is_not_kept(
        self, write_jsonl: Write, tokenizer: PreTrainedTokenizerFast, shares: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, after = ({"prompt": each, "answer": "1"} for each in ("1", "2"))
        path, read = write_jsonl(before), prompts.read_records

        def write_first(*given: Any, **options: Any) -> Any:
            write_jsonl(after)
            return read(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(prompts, "read_records", write_first)
            assert load(path, tokenizer)[0].text == "2"
        write_jsonl(before)
        assert load(path, tokenizer)[0].text == "1"

    def test_a_file_that_has_changed_is_written_again(
        self, write_jsonl: Write, make_tokenizer: Make, shares: Path
    ) -> None:
        path, tokenizer = write_jsonl(*RECORDS), make_tokenizer(chat=True)
        expected = plain(load(path, tokenizer))
        (cache,) = shares.glob("*.prompts")
        whole = cache.read_bytes()
        begin = 8 + int.from_bytes(whole[:8], "little")
        flipped = bytearray(whole)
        flipped[begin::40] = bytes(byte ^ 1 for byte in flipped[begin::40])
        load(write_jsonl(RECORDS[0]), tokenizer)
        (other,) = (file for file in shares.glob("*.prompts") if file != cache)
        for content in (
            *(whole[:length] for length in (0, 10, 63, 64, 200, -1)),
            b"\xff" * len(whole),
            bytes(len(whole)),
            whole[:begin] + bytes(len(whole) - begin),
            bytes(flipped),
            whole[:-1] + bytes([whole[-1] ^ 1]),
            other.read_bytes(),  # whole, but of another data set
        ):
            write_jsonl(*RECORDS)
            cache.write_bytes(content)
            with pytest.warns(UserWarning, match="the prompts are tokenized again"):
                assert plain(load(path, tokenizer)) == expected
            assert cache.read_bytes() == whole

    def test_without_a_place_to_write_every_process_has_its_own(
        self, write_jsonl: Write, make_tokenizer: Make, shares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, tokenizer = write_jsonl(*RECORDS), make_tokenizer(chat=True)
        occupied = tmp_path / "a file"
        occupied.touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        found = load(path, tokenizer)
        assert isinstance(found.tokens, np.memmap), "the temporary folder can be written"
        assert list(tmp_path.glob(f"megarl-{os.getuid()}/*.prompts"))
        monkeypatch.setattr("tempfile.tempdir", str(occupied))
        with pytest.warns(UserWarning, match="every process keeps its own prompts"):
            assert plain(load(path, tokenizer)) == plain(found)

    def test_a_small_file_and_a_template_with_a_date_are_not_kept(
        self, write_jsonl: Write, make_tokenizer: Make, shares: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, dated = write_jsonl(*RECORDS), make_tokenizer(chat=True)
        dated.chat_template = "{{ strftime_now('%d') }}" + str(dated.chat_template)
        load(path, dated)
        monkeypatch.setattr(prompt_table, "SHARED_FROM_BYTES", path.stat().st_size + 1)
        load(path, make_tokenizer(chat=True))
        assert not shares.exists()

    def test_processes_that_start_together_tokenize_once(
        self, write_jsonl: Write, make_tokenizer: Make, shares: Path, tmp_path: Path
    ) -> None:
        path, tokenizer = write_jsonl(*RECORDS * 50), make_tokenizer(chat=True)
        context = multiprocessing.get_context("fork")
        start, log = context.Barrier(4), tmp_path / "log"
        ranks = [context.Process(target=_load_as_rank, args=(path, tokenizer, start, log)) for _ in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(300)
            assert rank.exitcode == 0
        assert sorted(log.read_text().split()) == ["250"] * 4 + ["tokenized"]


def _load_as_rank(path: Path, tokenizer: PreTrainedTokenizerFast, start: Any, log: Path) -> None:
    tokenize = prompts.tokenize
    first = []

    def tell(*given: Any, **options: Any) -> Any:
        if not first:
            first.append(1)
            with log.open("a") as file:
                file.write("tokenized\n")
        return tokenize(*given, **options)

    prompts.tokenize = tell
    start.wait()
    found = load(path, tokenizer)
    assert isinstance(found[249], Prompt)
    with log.open("a") as file:
        file.write(f"{len(found)}\n")
