"""JSON of strangers: what is refused before it can do harm."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from megarl.errors import DataError
from megarl.files.foreign_json import MAX_DEPTH, parse_json


@pytest.mark.parametrize("value", [{"a": [1, -2.5, None, True, "ü", ""]}, [], 0, "x", 1 << 80, {"a": {}}])
def test_json_is_read_as_the_standard_library_does(value: Any) -> None:
    assert parse_json(json.dumps(value).encode(), "it", 1000) == value
    assert parse_json(json.dumps(value, ensure_ascii=False), "it", 1000) == value


def test_values_that_are_no_numbers_are_read_and_left_to_the_caller() -> None:
    found = parse_json(b"[NaN, Infinity, 1e999]", "it", 1000)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "a/b.json holds more than 201 levels of lists and objects"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "a/b.json holds more than 201 levels"),
        (b"", "a/b.json holds no JSON, EOF"),
        (b"<html>", "a/b.json holds no JSON, expected value"),
        (b'{"a": 1} x', "a/b.json holds no JSON, trailing"),
        (b'"\xff"', "a/b.json holds no JSON"),
        (b"9" * 5000, "a/b.json holds no JSON, number out of range"),
        (b"[1" + b" " * 200_000 + b"]", "a/b.json holds 200003 bytes of JSON, expected at most 200000"),
    ],
)
def test_anything_else_is_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}") as caught:
        parse_json(data, "a/b.json", 200_000)
    assert "\n" not in str(caught.value)


def test_the_deepest_value_that_is_read_can_be_written_again() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(text, "it", 1000)) == text
