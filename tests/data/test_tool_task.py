"""The task for a model with a calculator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.data.tiny import CHARACTERS
from megarl.data.tool_task import last_number, write_tool_task
from megarl.errors import DataError


def test_products_are_right_different_and_partly_guessed(tmp_path: Path) -> None:
    files = write_tool_task(tmp_path, num_train=50, num_heldout=20, num_demonstrations=200, guess_share=0.25)
    rows = [json.loads(line) for file in (files.train, files.heldout) for line in file.read_text().splitlines()]
    demonstrations = [json.loads(line) for line in files.demonstrations.read_text().splitlines()]
    for row in rows:
        a, b = row["prompt"].rstrip("=").split("*")
        assert row["answer"] == str(int(a) * int(b))
    assert len({row["prompt"] for row in rows + demonstrations}) == 270
    called = [row for row in demonstrations if row["response"].startswith("(")]
    assert len(called) == 150
    for row in demonstrations:
        expression = row["prompt"].rstrip("=")
        a, b = expression.split("*")
        answer = str(int(a) * int(b))
        right = last_number(prompt=row["prompt"], response=row["response"], answer=answer)
        assert right == (row in called)
        assert row not in called or row["response"] == f"({expression}):{answer},{answer}"
        assert set(row["prompt"] + row["response"]) <= set(CHARACTERS)


def test_it_is_a_function_of_the_seed_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    sizes = {"num_train": 5, "num_heldout": 5, "num_demonstrations": 5}
    first, again, other = (write_tool_task(tmp_path / str(i), seed=i // 2, **sizes) for i in (0, 1, 2))
    assert first.train.read_text() == again.train.read_text() != other.train.read_text()
    with pytest.raises(DataError, match="tool task"):
        write_tool_task(tmp_path, num_train=10**6)
