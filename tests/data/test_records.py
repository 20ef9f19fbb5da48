"""Files of records in every form that a prompt file may have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.data.prepare.command import Data
from megarl.data.prepare.prepare import prepare
from megarl.data.records import read_records
from megarl.errors import DataError

ROWS = [{"prompt": 'a, "b"\nline 2', "answer": "1"}, {"prompt": "é\t", "answer": "2"}]
LISTED = json.dumps(ROWS, indent=1)
TABLE = 'prompt,answer\r\n"a, ""b""\nline 2",1\r\n"é\t",2\r\n'


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.json", LISTED.encode(), [" row 0", " row 1"]),
        ("mark.json", b"\xef\xbb\xbf\n " + LISTED.encode(), [" row 0", " row 1"]),
        ("lines.json", "\n".join(map(json.dumps, ROWS)).encode(), [":1", ":2"]),
        ("a.csv", TABLE.encode(), [" row 0", " row 1"]),
        ("mark.csv", b"\xef\xbb\xbf" + TABLE.encode(), [" row 0", " row 1"]),
        ("no_last_end.csv", TABLE.strip().encode(), [" row 0", " row 1"]),
        ("a.tsv", 'prompt\tanswer\n"a, ""b""\nline 2"\t1\n"é\t"\t2\n'.encode(), [" row 0", " row 1"]),
    ],
)
def test_every_form_gives_the_same_records(name: str, content: bytes, places: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert [*read_records(path)] == [(f"{path}{place}", row) for place, row in zip(places, ROWS, strict=True)]
    assert [row for _, row in read_records(path, limit=1)] == ROWS[:1]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b"[]", "expected at least one example"),
        ("a.json", b"[1]", r"a\.json row 0: a whole number instead of a JSON object"),
        ("a.json", LISTED.encode()[:-4], r"a\.json holds no JSON, .*; or write an object per line: jq -c '\.\[\]'"),
        ("a.json", b'{"data":\n[{}]}', r"a\.json:1: broken JSON .* one JSON object per line, or a list of them"),
        ("a.csv", b"", "expected at least one example"),
        ("a.csv", b"prompt,answer\n", "expected at least one example"),
        ("a.csv", b"prompt,prompt\na,1\n", r"a\.csv:1: found the names \['prompt', 'prompt'\], expected another name"),
        ("a.csv", b"prompt,answer\na,1\nb,2,3\n", r"a\.csv row 1: 1 fields more than the 2 names"),
        ("a.csv", b'prompt,answer\na,1\n"b,2\n', r"a\.csv: after line 2: no table in UTF-8 \(unexpected end of data\)"),
        (
            "a.csv",
            b"prompt,answer\n" + b"a" * 200_000,
            r"a\.csv: after line 1: .*field larger than field limit.*; convert it, or write JSONL",
        ),
        ("a.csv", TABLE.encode("utf-16"), r"a\.csv: after line 0: no table in UTF-8"),
        ("a.csv", b"prompt,answer\n" + b"a,1\n" * 9_000 + b"\xe9,2\n", r"after line \d{4}: no table in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_place(
    name: str, content: bytes, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        list(read_records(tmp_path / name))


def test_a_list_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.data.records.MOST_JSON_BYTES", 8)
    (tmp_path / "a.json").write_text(LISTED)
    with pytest.raises(DataError, match=r"has \d+ bytes, expected at most 8; or write an object per line: jq"):
        list(read_records(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "prompt,answer\na,1\nb\nc,\n,4\na,2\n"),
        ("a.json", json.dumps([{"prompt": p, "answer": a} for p, a in ["a1", ("b", None), "c ", " 4", "a2"]])),
    ],
)
def test_rows_that_end_early_are_counted_as_without_answers(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    counts = prepare(Data("prepare", str(tmp_path / name), tmp_path / "out"))
    assert counts == {"read": 5, "train": 1, "no answer": 2, "no prompt": 1, "duplicates": 1, "other answers": 1}
