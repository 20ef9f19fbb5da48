from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import DataError
from megarl.run.audit import Audit, check, read_used


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
