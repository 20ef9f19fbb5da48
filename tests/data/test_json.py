"""A JSON file: one list of objects, alone or in an object around it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.records import read_records
from megarl.errors import DataError

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "1+2", "answer": 3}]


@pytest.mark.parametrize("content", [ROWS, {"version": 1, "data": ROWS}, {"rows": ROWS}])
def test_a_list_of_objects_is_read(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text("\ufeff" + json.dumps(content))
    assert [*read_records(path)] == [(f"{path} row {row}", record) for row, record in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\n".join(map(json.dumps, ROWS)), "name the file .jsonl"),
        (json.dumps({"prompt": ["a"], "answer": ["b"]}), "2 lists, expected one of objects"),
        ("3", "0 lists, expected one of objects"),
        ("[1]", "row 0: a whole number instead of a JSON object"),
        ("[]", "expected at least one example"),
        ("[{", "broken JSON"),
    ],
)
def test_anything_else_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(DataError, match=told):
        [*read_records(tmp_path / "train.json")]
