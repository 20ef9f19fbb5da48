from __future__ import annotations

import io

import pytest

from megarl.run.progress import StepProgress
from megarl.trainer.records import format_step

METRICS = {"reward/mean": 0.5234, "reward/pass_rate": 0.5, "rollout/k3": 1.2e-4, "time/step_s": 2.13, "unknown": 1.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_line_shows_what_is_there() -> None:
    assert format_step(7, 60, METRICS) == "step  7/60  reward 0.523  pass 50.0%  k3 1.2e-04  time 2.1 s"
    assert format_step(7, 9, {}) == "step 7/9"
    assert "reward nan" in format_step(1, 1, {"reward/mean": float("nan")})


def test_a_file_gets_lines_and_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    progress = StepProgress(stream=stream)
    progress.line("in [bold]between[/bold]")
    progress.line(format_step(7, 60, METRICS))
    # Neither wrapped at 20 columns nor coloured nor read as markup.
    assert stream.getvalue() == "in [bold]between[/bold]\n" + format_step(7, 60, METRICS) + "\n"


def test_other_ranks_are_silent() -> None:
    stream = Terminal()
    progress = StepProgress(enabled=False, stream=stream)
    progress.line(format_step(1, 2, METRICS))
    assert stream.getvalue() == ""
