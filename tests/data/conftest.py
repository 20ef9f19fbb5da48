"""A tokenizer that is small, real and needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789=+ .:"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('role is not allowed') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def _make(eos_token: str | None = "<e>", chat: bool = False) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<p>", "<e>", "<u>", "<s>", "<a>", *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<p>",
        eos_token=eos_token,
        additional_special_tokens=["<u>", "<s>", "<a>"],
    )
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Options: eos_token (None: has none), chat (True: has a chat template)."""
    return _make


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return _make()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: object, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
