"""Prompts that went through a chat template before, and tokens that the model has no row for, are found when read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import loading
import pytest
from families import FAMILIES, write_family
from transformers import PreTrainedTokenizerBase

from megarl.config import file as config_file
from megarl.data.prepare.command import Data
from megarl.data.prepare.prepare import prepare
from megarl.data.tokenizer import count_rows, load_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.trainer.sampling.evaluation import turn_ends

Write = Callable[..., Path]
load = partial(loading.load, chat_template=True)
QUESTION = "Each user has an assistant. What is 1+1?"
WITH_BEGIN = [name for name, settings in FAMILIES.items() if settings.get("prefix")]
INNOCENT = [
    QUESTION,
    "user\nof the assistant: think in <think> </think> tags, answer in <answer> tags",
    "users: which\n[INST is right, or INST]?\nUser 1\nassistant",
]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(write_family(tmp_path / "model", request.param), "model.path")


def render(tokenizer: PreTrainedTokenizerBase, *contents: str) -> str:
    roles = ("user", "assistant") * len(contents)
    chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def test_a_question_passes_in_every_form(family: PreTrainedTokenizerBase, write_jsonl: Write) -> None:
    for text in INNOCENT:
        for prompt in (text, [{"role": "system", "content": text}, {"role": "user", "content": text}]):
            (found,) = load(write_jsonl({"prompt": prompt, "answer": "2"}), family)
            assert text in found.text
            whole = family(found.text, add_special_tokens=False)["input_ids"]
            assert found.tokens.tolist() == whole
        (plain,) = load(write_jsonl({"prompt": text, "answer": "2"}), family, chat_template=False)
        assert plain.tokens.tolist() == family(text)["input_ids"]


def test_a_rendered_text_is_not_rendered_again(family: PreTrainedTokenizerBase, write_jsonl: Write) -> None:
    """Whole, without its begin token, as a part, as a message, and decoded without special tokens."""
    once = render(family, QUESTION)
    begin = str(family.bos_token or "")
    forms = [once, render(family, "1+1?", "2", QUESTION), once.removeprefix(begin), f"\n {once.removeprefix(begin)}\n"]
    decoded = family.decode(family(once, add_special_tokens=False)["input_ids"], skip_special_tokens=True)
    forms += [str(decoded)] if family.name_or_path and decoded.strip() != QUESTION else []
    assert all(QUESTION in form for form in forms)
    fine = {"prompt": QUESTION, "answer": "2"}
    for form in forms:
        for prompt, name in (
            (form, "the prompt ('prompt')"),
            ([{"role": "user", "content": form}], "message 0 of 'prompt'"),
        ):
            path = write_jsonl(fine, {"prompt": prompt, "answer": "2"})
            with pytest.raises(DataError) as caught:
                load(path, family)
            assert str(caught.value).startswith(f"{path}:2: {name} holds ")
            assert "the chat template writes itself" in str(caught.value)


@pytest.mark.parametrize("name", WITH_BEGIN)
def test_a_second_begin_token_is_found_with_the_template_off(name: str, write_jsonl: Write, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_family(tmp_path / "model", name), "model.path")
    begin = "".join(FAMILIES[name]["prefix"])
    once, fine = render(tokenizer, QUESTION), {"prompt": "1=", "answer": "1"}
    for text in (once, f"\n{once}", f"Question: {once}"):
        with pytest.raises(DataError, match=r"train\.jsonl:2: the prompt .* holds '.*', which is put before it"):
            load(write_jsonl(fine, {"prompt": text, "answer": "2"}), tokenizer, chat_template=False)
    (right,) = load(write_jsonl({"prompt": once.removeprefix(begin), "answer": "2"}), tokenizer, chat_template=False)
    assert right.tokens.tolist() == tokenizer(once, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("name", "openings"),
    [
        ("qwen3", ["<|im_start|>assistant\n", "<|im_start|>assistant", "<|im_start|>assistant\n\n<think>"]),
        ("llama3", ["<|start_header_id|>assistant<|end_header_id|>\n\n", "<|end_header_id|>", "<|begin|>"]),
        ("glm4_moe", ["<|assistant|>", "<|assistant|>\n"]),
        ("deepseek_v3", ["<｜Assistant｜><think>\n", "<think>", "<think>\n\n", "<｜begin｜>"]),
    ],
)
def test_a_response_does_not_begin_with_what_its_prompt_ends_with(
    name: str, openings: list[str], write_jsonl: Write, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(write_family(tmp_path / "model", name), "model.path")
    plain = render(tokenizer, QUESTION).removeprefix("".join(FAMILIES[name].get("prefix", [])))
    for prompt, chat in ((QUESTION, True), (plain, False)):
        good = [{"prompt": prompt, "response": text} for text in ("2", "<answer>2</answer>", "</think>assistant")]
        assert len(loading.load_shown(write_jsonl(*good), tokenizer, chat_template=chat)) == 3
        for opening in openings:
            path = write_jsonl(*good, {"prompt": prompt, "response": f"{opening}2"})
            with pytest.raises(DataError, match=r"train\.jsonl:4: the response \('response'\) begins with"):
                loading.load_shown(path, tokenizer, chat_template=chat)


class TestRows:
    @pytest.fixture
    def short(self, tmp_path: Path) -> PreTrainedTokenizerBase:
        """The tokenizer's last token, </think>, has no row in the model."""
        folder = write_family(tmp_path / "model", "qwen3")
        rows = json.loads((folder / "config.json").read_text())["vocab_size"]
        return load_tokenizer(write_family(folder, "qwen3", num_rows=rows - 1), "model.path")

    @pytest.mark.parametrize("chat", [True, False])
    def test_a_token_without_a_row_is_named_with_its_line(
        self, chat: bool, short: PreTrainedTokenizerBase, write_jsonl: Write, tmp_path: Path
    ) -> None:
        last = count_rows(short)
        fine, bad = ({"prompt": text, "answer": "1", "response": "1"} for text in ("1 <think>", "1 </think>"))
        told = rf"raw\.jsonl:2: the prompt \('prompt'\) holds '</think>', token {last}, but the model has {last} rows"
        path = write_jsonl(fine, bad, name="raw.jsonl")
        with pytest.raises(DataError, match=told):
            load(path, short, chat_template=chat)
        with pytest.raises(DataError, match=told):
            loading.load_shown(path, short, chat_template=chat)
        with pytest.raises(DataError, match=told):
            prepare(Data("prepare", str(path), tmp_path / "out", model=Path(short.name_or_path)))
        path = write_jsonl({**fine, "response": "<think> 1"}, {**fine, "response": "2</think>"})
        with pytest.raises(DataError, match=r"train\.jsonl:2: the response \('response'\) holds '</think>', token"):
            loading.load_shown(path, short, chat_template=chat)

    def test_an_end_token_without_a_row_is_refused(self, tmp_path: Path, write_jsonl: Write) -> None:
        folder = write_family(tmp_path / "model", "qwen3", eos_token="</think>")
        rows = json.loads((folder / "config.json").read_text())["vocab_size"]
        settings = {
            **{"model.path": str(folder), "run.steps": 1, "data.train": "p.jsonl", "optim.lr": 1e-6},
            **{"rollout.prompts_per_step": 1, "rollout.group_size": 2, "rollout.max_response_tokens": 8},
            **{"train.micro_batch_tokens": 4096, "rollout.engine": "local"},
        }
        config, tokenizer = config_file.parse({}, settings), load_tokenizer(folder, "model.path")
        assert turn_ends(config, tokenizer) == (rows - 1,)
        write_family(folder, "qwen3", eos_token="</think>", num_rows=rows - 1)
        with pytest.raises(ConfigError, match=rf"ends turns with token {rows - 1}, but the model has {rows - 1} rows"):
            turn_ends(config, tokenizer)
        with pytest.raises(ConfigError, match="eos_token is"):
            loading.load_shown(write_jsonl({"prompt": "1", "response": "1"}), tokenizer)


class TestArguments:
    @pytest.fixture
    def qwen(self, tmp_path: Path) -> PreTrainedTokenizerBase:
        return load_tokenizer(write_family(tmp_path / "model", "qwen3"), "model.path")

    def test_they_reach_the_template_everywhere(self, qwen: PreTrainedTokenizerBase, write_jsonl: Write) -> None:
        path = write_jsonl({"prompt": "1+1", "answer": "2", "response": "2"})
        found, arguments = {}, {"enable_thinking": False}
        for off in (False, True):
            options: dict[str, Any] = {"chat_template_args": arguments} if off else {}
            (prompt,) = load(path, qwen, **options)
            (shown,) = loading.load_shown(path, qwen, chat_template=True, **options)
            found[off] = prompt.text
            assert shown.tokens[: len(prompt.tokens)].tolist() == prompt.tokens.tolist()
        assert found[True] == f"{found[False]}<think>\n\n</think>\n\n"
        with pytest.raises(DataError, match=r"train\.jsonl:1: .* plain text"):
            load(path, qwen, chat_template=False, chat_template_args=arguments)
        qwen.chat_template = None
        with pytest.raises(ConfigError, match=r"data\.chat_template_args is set, but the tokenizer has no"):
            load(path, qwen, chat_template=False, chat_template_args=arguments)

    @pytest.mark.parametrize("name", ["thinking", "messages", "range"])
    def test_one_that_the_template_never_reads_is_refused(
        self, name: str, qwen: PreTrainedTokenizerBase, write_jsonl: Write
    ) -> None:
        path = write_jsonl({"prompt": "1+1", "answer": "2"})
        with pytest.raises(ConfigError, match=rf"found '{name}', .* expected some of enable_thinking; remove it"):
            load(path, qwen, chat_template_args={name: True})

    @pytest.mark.parametrize("template", [[{"name": "rag", "template": "a"}], "{% for m in messages %", "{{ 1 / 0 }}"])
    def test_a_template_that_cannot_be_used_is_an_error_of_one_line(
        self, template: Any, tmp_path: Path, write_jsonl: Write
    ) -> None:
        broken = load_tokenizer(write_family(tmp_path / "model", "qwen3", chat_template=template), "model.path")
        path = write_jsonl({"prompt": "1+1", "answer": "2"})
        with pytest.raises(DataError, match=r"train\.jsonl:1: the chat template refuses these messages"):
            load(path, broken)
        with pytest.raises(ConfigError, match=r"data\.chat_template_args: "):
            load(path, broken, chat_template_args={"a": 1})
