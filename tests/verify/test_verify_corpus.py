"""The watch names every failure of the corpus, and docs/verify.md says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from corpus import FAILURES, RIGHT, Failure, play, verdict

from megarl.verify.causes import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "verify.md"


def test_a_stack_without_a_mistake_is_right() -> None:
    report, consumed = play(RIGHT)
    assert consumed
    assert report.is_right
    assert report.compared.sum() == report.right.sum() == report.recomputed.sum() == 3 * 64 * 4
    report.require()


@pytest.mark.parametrize("failure", FAILURES, ids=[failure.name for failure in FAILURES])
def test_the_watch_names_the_failure(failure: Failure) -> None:
    report, _ = play(failure)
    assert not report.is_right
    assert verdict(report) == failure.kind, str(report)
    assert failure.kind == "passes" or all(cause.text.startswith(failure.where) for cause in report.causes[:1])


def test_the_page_has_the_table_of_the_corpus() -> None:
    table = [tuple(map(str.strip, line.split("|")[1:4])) for line in PAGE.read_text().splitlines() if line[:2] == "| "]
    assert len(FAILURES) >= 30
    for failure in FAILURES:
        assert (failure.name, failure.reports, f"`{failure.kind}`") in table
    assert {failure.kind for failure in FAILURES} >= KINDS - {"empty", "more"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M)) == {*KINDS, "kind"}
