"""Outputs that nobody reads any more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megarl.run.signals import drop_lost_outputs


def test_outputs_that_nobody_reads_lead_nowhere_and_others_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    read, write = os.pipe()
    with os.fdopen(write, "w") as lost, (tmp_path / "kept").open("w") as kept:
        monkeypatch.setattr(sys, "stdout", lost)
        monkeypatch.setattr(sys, "stderr", kept)
        assert not drop_lost_outputs()
        os.close(read)
        assert drop_lost_outputs()
        print("into nothing", flush=True)
        print("kept", file=sys.stderr, flush=True)
        monkeypatch.undo()
    assert (tmp_path / "kept").read_text() == "kept\n"
