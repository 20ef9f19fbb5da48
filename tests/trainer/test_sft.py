"""The cold start: it imitates in the form, and within the limits, in which RL samples afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from train_world import World
from transformers import AutoTokenizer

import megarl.trainer.sft as train_sft
from megarl.config import Config
from megarl.data.prompts import Demonstration, load_prompts
from megarl.errors import ConfigError, DataError
from megarl.trainer.sft import sft


def settings(world: World, tmp_path: Path, **overrides: Any) -> Config:
    plan = {
        "data": str(world.folder / "task" / "demonstrations.jsonl"),
        "out": str(tmp_path / "taught"),
        "steps": 1,
        "batch_size": 8,
        "lr": 1e-3,
    }
    return world.settings(sft=plan, run__dir=str(tmp_path / "run"), **overrides)


@pytest.fixture
def chat_model(world: World, tmp_path: Path) -> Path:
    """The world's model with a chat template."""
    path = tmp_path / "chat"
    shutil.copytree(world.model, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m.content }}){% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    tokenizer.save_pretrained(path)
    return path


def test_the_chat_template_is_the_one_of_rl(
    world: World, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[Demonstration] = []
    step = train_sft._step

    def listening(config: Config, policy: Any, demonstrations: list[Demonstration]) -> dict[str, float]:
        taught.extend(demonstrations)
        return step(config, policy, demonstrations)

    monkeypatch.setattr(train_sft, "_step", listening)
    config = settings(world, tmp_path, model__path=str(chat_model), data__chat_template=True)
    sft(config)
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    assert len(taught) == 8
    rows = [json.loads(line) for line in (world.folder / "task" / "demonstrations.jsonl").read_text().splitlines()]
    known = {f"({row['prompt']}):{row['response']}<eos>" for row in rows}
    assert {tokenizer.decode(one.tokens) for one in taught} <= known
    (prompt, *_) = load_prompts(config.data, tokenizer)
    assert {len(one.tokens[~one.loss_mask]) for one in taught} == {len(prompt.tokens)}
    assert (tmp_path / "taught" / "config.json").is_file()


def test_chats_are_taught_turn_by_turn(
    world: World, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real step on transcripts: the loss is the mean over the tokens of the assistant alone."""
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '(' + m.content + ')' if m.role == 'user' else ':' + m.content + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    tokenizer.save_pretrained(chat_model)
    roles, texts = ("user", "assistant") * 2, ("31=", "13", "21=", "12")
    row = {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    seen: list[tuple[list[Demonstration], dict[str, float]]] = []
    step = train_sft._step
    monkeypatch.setattr(train_sft, "_step", lambda *given: seen.append((given[2], step(*given))) or seen[-1][1])
    config = settings(world, tmp_path, model__path=str(chat_model))
    assert config.sft is not None
    sft(config.model_copy(update={"sft": config.sft.model_copy(update={"data": str(tmp_path / "chats.jsonl")})}))
    ((taught, metrics),) = seen
    assert {tokenizer.decode(one.tokens) for one in taught} == {"(31=):13<eos>(21=):12<eos>"}
    assert {tokenizer.decode(one.tokens[one.loss_mask]) for one in taught} == {"13<eos>12<eos>"}
    assert metrics["loss"] > 0


def test_a_chat_template_that_is_not_there_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        sft(settings(world, tmp_path, data__chat_template=True))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"data__max_prompt_tokens": 3}, r"the prompt has 4 tokens, more than data\.max_prompt_tokens = 3"),
        (
            {"rollout__max_response_tokens": 3},
            r"the response with its end has 4 tokens, more than rollout\.max_response_tokens = 3",
        ),
    ],
)
def test_a_demonstration_longer_than_rl_could_sample_is_an_error(
    world: World, tmp_path: Path, overrides: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError, match=rf"demonstrations\.jsonl:1: {told}"):
        sft(settings(world, tmp_path, **overrides))
    assert not (tmp_path / "taught").exists()


def test_a_demonstration_longer_than_the_model_is_an_error(world: World, chat_model: Path, tmp_path: Path) -> None:
    described = json.loads((chat_model / "config.json").read_text())
    (chat_model / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 7}))
    with pytest.raises(DataError, match=r"jsonl:1: prompt with response has 8 tokens, more than the model's positions"):
        sft(settings(world, tmp_path, model__path=str(chat_model)))
