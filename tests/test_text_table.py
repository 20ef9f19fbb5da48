from __future__ import annotations

import pytest

from megarl.text_table import text_table


@pytest.fixture(autouse=True)
def forty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


def test_columns_are_as_wide_as_their_widest_cell():
    assert text_table([["a", "bbb"], ["cc", "d"]], ["x", "y"]) == "x   y\n--  ---\na   bbb\ncc  d"


def test_numbers_are_aligned_to_the_right():
    assert text_table([["1", "20"], ["300", "4"]], ["n", "m"], words=0) == "  n   m\n---  --\n  1  20\n300   4"


def test_numbers_come_after_words():
    assert text_table([["a", "20"], ["bcd", "4"]], ["n", "m"], words=1) == "n     m\n---  --\na    20\nbcd   4"


def test_the_last_column_is_wrapped_at_the_terminal():
    assert text_table([["key", "word " * 12]]).splitlines() == [
        "key  " + " ".join(["word"] * 7),
        "     " + " ".join(["word"] * 5),
    ]


def test_the_last_column_keeps_room_beside_wide_ones():
    assert max(map(len, text_table([["k" * 38, "word " * 9]]).splitlines())) <= 38 + 2 + 20


def test_an_empty_row_is_an_empty_line_and_nothing_is_nothing():
    assert text_table([["a"], [], ["b"]]) == "a\n\nb"
    assert text_table([]) == ""


def test_what_a_terminal_would_obey_is_escaped():
    assert text_table([["\x1b[31m"]]) == "\\x1b[31m"


def test_rows_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        text_table([["a"], ["b", "c"]])
