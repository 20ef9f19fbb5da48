from __future__ import annotations

import pytest

from megarl.text_table import text_table


def test_tables_in_forty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert text_table([["a", "bbb"], ["cc", "d"]], ["x", "y"]) == "x   y\n--  ---\na   bbb\ncc  d"
    # Numbers are aligned to the right, and come after words.
    assert text_table([["1", "20"], ["300", "4"]], ["n", "m"], words=0) == "  n   m\n---  --\n  1  20\n300   4"
    assert text_table([["a", "20"], ["bcd", "4"]], ["n", "m"], words=1) == "n     m\n---  --\na    20\nbcd   4"
    # The last column is wrapped at the terminal, but keeps room beside wide ones.
    wrapped = ["key  " + " ".join(["word"] * 7), "     " + " ".join(["word"] * 5)]
    assert text_table([["key", "word " * 12]]).splitlines() == wrapped
    assert max(map(len, text_table([["k" * 38, "word " * 9]]).splitlines())) <= 38 + 2 + 20
    assert text_table([["a"], [], ["b"]]) == "a\n\nb"
    assert text_table([]) == ""
    assert text_table([["\x1b[31m"]]) == "\\x1b[31m"  # what a terminal would obey
    with pytest.raises(ValueError, match="argument 2 is longer"):
        text_table([["a"], ["b", "c"]])
