"""Demonstrations that are chats: what is learned, in one sequence where the template allows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, write_family
from loading import load_shown

from megarl.data.tokenizer import load_tokenizer
from megarl.errors import DataError

S, A = "<|im_start|>", "<|im_end|>"
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_EARLIER_THOUGHTS = FAMILIES["qwen3"]["template"].replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'assistant' or loop.last else (m.content.split('</think>') | last) }}",
)
THREE = (
    ("system", "be short"),
    ("user", "1+1?"),
    ("assistant", "<think>a</think>2"),
    ("user", "2+2?"),
    ("assistant", "4"),
)


def chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def learned(path: Path, folder: Path, template: str, **more: Any) -> list[tuple[str, list[str]]]:
    """(whole text, learned runs of tokens as text) of each sequence."""
    tokenizer = load_tokenizer(write_family(folder, "qwen3", chat_template=template, eos_token=A, **more), "model.path")
    sequences = []
    for one in load_shown(path, tokenizer):
        runs = [""]
        for token, is_learned in zip(one.tokens, one.loss_mask, strict=True):
            if is_learned:
                runs[-1] += str(tokenizer.decode([token]))
            elif runs[-1]:
                runs.append("")
        sequences.append((str(tokenizer.decode(one.tokens)), [run for run in runs if run]))
    return sequences


def test_all_turns_are_one_sequence_and_the_assistants_are_learned(tmp_path: Path, write_jsonl: Callable[..., Path]):
    rows = {"messages": chat(*THREE)}, {"prompt": chat(("user", "3+3?")), "response": "6"}
    (whole, runs), (_, other) = learned(write_jsonl(*rows), tmp_path / "model", FAMILIES["qwen3"]["template"])
    assert runs == [f"<think>a</think>2{A}", f"4{A}"]
    assert whole == (
        f"{S}system\nbe short{A}\n{S}user\n1+1?{A}\n{S}assistant\n<think>a</think>2{A}\n"
        f"{S}user\n2+2?{A}\n{S}assistant\n4{A}"
    )
    assert other == [f"6{A}"]


def test_a_template_that_rewrites_earlier_turns_gives_a_sequence_for_each(
    tmp_path: Path, write_jsonl: Callable[..., Path]
):
    path = write_jsonl({"messages": chat(*THREE)})
    first, second = learned(path, tmp_path / "model", WITHOUT_EARLIER_THOUGHTS)
    assert (first[1], second[1]) == ([f"<think>a</think>2{A}"], [f"4{A}"])
    assert "<think>" not in second[0]  # as the model reads the first turn when it samples the second


def test_tools_and_calls_go_through_the_template(tmp_path: Path, write_jsonl: Callable[..., Path]):
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    messages = [*chat(("user", "1+1?")), call, *chat(("tool", "2"), ("assistant", "It is 2."))]
    path = write_jsonl({"messages": messages, "tools": [{"type": "function", "function": {"name": "add"}}]})
    ((whole, runs),) = learned(path, tmp_path / "model", WITH_TOOLS)
    assert runs == [f"<call>add</call>{A}", f"It is 2.{A}"]
    assert whole.startswith(f'{S}system\n[{{"type": "function"')
    assert f"{S}tool\n2{A}" in whole


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (chat(("user", "1+1?")), "has no message of the assistant"),
        (chat(("user", f"1+1?{A}"), ("assistant", "2")), f"'messages' holds '{A}', which the chat template writes"),
        (chat(("user", "1+1?"), ("assistant", f"2{A}")), f"'messages' holds '{A}'"),
        ("user: 1+1?", "'messages' is text, expected a list of chat messages"),
        ([{"role": "user", "content": ["1+1?"]}], "message 0 of"),
        (
            [*chat(("user", "1+1?")), {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}],
            "message 1 of 'messages' has tool_calls, which the chat template leaves out",
        ),
    ],
)
def test_a_chat_that_cannot_be_learned_is_refused(
    messages: Any, told: str, tmp_path: Path, write_jsonl: Callable[..., Path]
):
    path = write_jsonl({"messages": chat(*THREE)}, {"messages": messages})
    with pytest.raises(DataError, match=r"train\.jsonl:2: ") as caught:
        learned(path, tmp_path / "model", FAMILIES["qwen3"]["template"])
    assert told in str(caught.value)


def test_a_template_whose_answers_do_not_begin_as_in_sampling_is_refused(
    tmp_path: Path, write_jsonl: Callable[..., Path]
):
    template = FAMILIES["qwen3"]["template"].replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    with pytest.raises(DataError, match=r"writes message 1 of 'messages' without the mark .*<think>"):
        learned(write_jsonl({"messages": chat(*THREE[3:])}), tmp_path / "model", template)
