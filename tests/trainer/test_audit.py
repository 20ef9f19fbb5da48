from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from audit_reader import check, read_used

from megarl.errors import DataError
from megarl.run.samples import record_resume, record_step


def test_steps_that_a_resumption_has_undone_do_not_count(tmp_path: Path) -> None:
    record_resume(tmp_path, 0)
    for step in (1, 2, 3):
        record_step(tmp_path, step, step - 1, [(step, 0), (step, 1)], {})
    record_resume(tmp_path, 1)
    record_step(tmp_path, 2, 1, [(2, 1), (2, 0)], {})
    assert read_used(tmp_path / "samples.jsonl") == {1: [(1, 0), (1, 1)], 2: [(2, 0), (2, 1)]}
    assert check((tmp_path / "samples.jsonl"), 2) == 4
    with pytest.raises(DataError, match=r"no record of steps \[3\]"):
        check((tmp_path / "samples.jsonl"), 3)


def test_what_trains_twice_is_found(tmp_path: Path) -> None:
    record_step(tmp_path, 1, 0, [(5, 0)], {})
    record_step(tmp_path, 2, 1, [(5, 0)], {})
    with pytest.raises(DataError, match="prompt 5, sample 0 has trained in steps 1 and 2"):
        check((tmp_path / "samples.jsonl"), 2)
    record_step(tmp_path, 2, 1, [(6, 0)], {})
    with pytest.raises(DataError, match="step 2 has trained twice without a resumption"):
        read_used(tmp_path / "samples.jsonl")


def test_a_line_that_a_kill_has_torn(tmp_path: Path) -> None:
    record_step(tmp_path, 1, 0, [(1, 0)], {})
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 2, "wei')
    assert read_used(tmp_path / "samples.jsonl") == {1: [(1, 0)]}
    record_resume(tmp_path, 1)
    record_step(tmp_path, 2, 1, [(2, 0)], {})
    assert check((tmp_path / "samples.jsonl"), 2) == 2
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "wei\n')
    record_step(tmp_path, 3, 2, [(3, 0)], {})
    with pytest.raises(DataError, match="broken record, and no resumption after it"):
        read_used(tmp_path / "samples.jsonl")


def test_a_step_is_one_line_by_prompt(tmp_path: Path) -> None:
    keys = np.array([[7, 1], [2, 3], [10, 0], [2, 1], [7, 0], [2, 2]])
    record_step(tmp_path, 1, 0, keys, {(2, 3): "k3 0.92", (10, 0): "late", (2, 2): "k3 1.5"})
    record_step(tmp_path, 2, 1, [(3, 5), (3, 4), (1, 6)], {})
    record_step(tmp_path, 3, 2, [], {})
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    dropped = {"2/2": "k3 1.5", "2/3": "k3 0.92", "10/0": "late"}
    assert lines == [
        {"step": 1, "weights": 0, "prompts": {"2": [1], "7": [0, 1]}, "dropped": dropped},
        {"step": 2, "weights": 1, "prompts": {"1": [6], "3": [4, 5]}},
        {"step": 3, "weights": 2, "prompts": {}},
    ]
    assert [*lines[0]["dropped"]] == [*dropped]
    assert read_used(tmp_path / "samples.jsonl") == {1: [(2, 1), (7, 0), (7, 1)], 2: [(1, 6), (3, 4), (3, 5)], 3: []}
    assert check((tmp_path / "samples.jsonl"), 3) == 6


def test_a_line_after_a_torn_one_stands_alone(tmp_path: Path) -> None:
    for torn in ("x", "{", '{"step": 9}'):
        with (tmp_path / "samples.jsonl").open("a") as file:
            file.write(torn)
        record_resume(tmp_path, 0)
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 6
    record_resume(tmp_path, 0)
    assert "" not in (tmp_path / "samples.jsonl").read_text().splitlines()
