from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from audit_reader import check, read_used

from megarl.errors import DataError
from megarl.run.audit import Audit


def test_steps_that_a_resumption_has_undone_do_not_count(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.record_resume(0)
    for step in (1, 2, 3):
        audit.record_step(step, step - 1, [(step, 0), (step, 1)], {})
    audit.record_resume(1)
    audit.record_step(2, 1, [(2, 1), (2, 0)], {})
    assert read_used(audit.path) == {1: [(1, 0), (1, 1)], 2: [(2, 0), (2, 1)]}
    assert check(audit.path, 2) == 4
    with pytest.raises(DataError, match=r"no record of steps \[3\]"):
        check(audit.path, 3)


def test_what_trains_twice_is_found(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.record_step(1, 0, [(5, 0)], {})
    audit.record_step(2, 1, [(5, 0)], {})
    with pytest.raises(DataError, match="prompt 5, sample 0 has trained in steps 1 and 2"):
        check(audit.path, 2)
    audit.record_step(2, 1, [(6, 0)], {})
    with pytest.raises(DataError, match="step 2 has trained twice without a resumption"):
        read_used(audit.path)


def test_a_line_that_a_kill_has_torn(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.record_step(1, 0, [(1, 0)], {})
    with audit.path.open("a") as file:
        file.write('{"step": 2, "wei')
    assert read_used(audit.path) == {1: [(1, 0)]}
    audit.record_resume(1)
    audit.record_step(2, 1, [(2, 0)], {})
    assert check(audit.path, 2) == 2
    with audit.path.open("a") as file:
        file.write('{"step": 3, "wei\n')
    audit.record_step(3, 2, [(3, 0)], {})
    with pytest.raises(DataError, match="broken record, and no resumption after it"):
        read_used(audit.path)


def test_a_step_is_one_line_by_prompt(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    keys = np.array([[7, 1], [2, 3], [10, 0], [2, 1], [7, 0], [2, 2]])
    audit.record_step(1, 0, keys, {(2, 3): "k3 0.92", (10, 0): "late", (2, 2): "k3 1.5"})
    audit.record_step(2, 1, [(3, 5), (3, 4), (1, 6)], {})
    audit.record_step(3, 2, [], {})
    lines = [json.loads(line) for line in audit.path.read_text().splitlines()]
    dropped = {"2/2": "k3 1.5", "2/3": "k3 0.92", "10/0": "late"}
    assert lines == [
        {"step": 1, "weights": 0, "prompts": {"2": [1], "7": [0, 1]}, "dropped": dropped},
        {"step": 2, "weights": 1, "prompts": {"1": [6], "3": [4, 5]}},
        {"step": 3, "weights": 2, "prompts": {}},
    ]
    assert [*lines[0]["dropped"]] == [*dropped]
    assert read_used(audit.path) == {1: [(2, 1), (7, 0), (7, 1)], 2: [(1, 6), (3, 4), (3, 5)], 3: []}
    assert check(audit.path, 3) == 6


def test_a_line_after_a_torn_one_stands_alone(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    for torn in ("x", "{", '{"step": 9}'):
        with audit.path.open("a") as file:
            file.write(torn)
        audit.record_resume(0)
    assert len(audit.path.read_text().splitlines()) == 6
    audit.record_resume(0)
    assert "" not in audit.path.read_text().splitlines()
