from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.errors import ConfigError, PeerError, RolloutError, StopError
from megarl.run.lock import RunLock
from megarl.run.progress import StepProgress
from megarl.run.status import describe_ranks, rank_file, read_signs, read_status, show, stacks_file, stop_file
from megarl.run.vitals import Vitals
from megarl.trainer.records import format_step
from megarl.trainer.saving import record_ending


def vitals_of(folder: Path, rank: int = 0, ranks: int = 1, hang_s: float = 60.0) -> Vitals:
    return Vitals(folder, rank, ranks, steps=10, hang_s=hang_s, beat_s=0.05)


def until(holds: object, timeout_s: float = 300.0) -> None:
    assert callable(holds)
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_status_tells_step_phase_speed_and_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(tmp_path / "lock") as lock, Vitals(tmp_path, 0, 1, steps=10, hang_s=6000.0, beat_s=0.2) as vitals:
        vitals.lock = lock
        vitals.begin(2)
        vitals.status.tokens_per_s = 123.0
        vitals.finish_step(3)
        time.sleep(0.4)
        vitals.finish_step(4)
        with vitals.phase("rollout"):
            until(lambda: read_status(tmp_path)["phase"] == "rollout")
            found = read_status(tmp_path)
            assert (found["state"], found["step"], found["steps"]) == ("running", 4, 10)
            assert found["step_s"] >= 0.19  # two steps in at least 0.4 s
            assert found["eta_s"] == pytest.approx(6 * found["step_s"])
            assert show(tmp_path) == 0
            said = capsys.readouterr().out
            assert "step:       4 of 10" in said
            assert "phase:      rollout, for " in said
            assert "123 tokens/s" in said
            assert "ranks:      rank 0: rollout after step 4" in said
        vitals.end("finished")
    assert show(tmp_path) == 0
    assert "finished" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is no folder of a run that has begun"):
        read_status(tmp_path / "nowhere")


def test_a_run_that_went_without_a_word_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vitals = vitals_of(tmp_path)
    vitals.begin(3)
    assert show(tmp_path) == 1
    assert "its processes are gone" in capsys.readouterr().out
    assert show(tmp_path, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "lost"


def test_ranks_that_others_wait_for_come_first() -> None:
    here = {"host": socket.gethostname(), "beat_s": 2.0}
    signs = [
        {"rank": rank, "pid": os.getpid(), "step": 3, "phase": "train", "beat": 100.0, **here} for rank in (0, 2, 3, 6)
    ]
    signs.append({"rank": 1, "pid": 2**22 + 1, "step": 3, "phase": "rollout", "beat": 100.0, **here})
    signs.append({"rank": 4, "pid": 7, "step": 2, "phase": "sync", "beat": 40.0, "host": "other", "beat_s": 2.0})
    signs.append({"rank": 5, "pid": 7, "step": 3, "phase": "train", "beat": 99.0, "host": "other", "error": "X: y"})
    assert describe_ranks(signs, now=100.0) == (
        "rank 1: gone in rollout after step 3; rank 4: silent for 60 s in sync after step 2; "
        "rank 5: train after step 3 (X: y); ranks 0, 2-3, 6: train after step 3"
    )
    assert describe_ranks(signs, now=None) == (
        "rank 1: rollout after step 3; rank 4: sync after step 2; rank 5: train after step 3 (X: y); "
        "ranks 0, 2-3, 6: train after step 3"
    )
    assert read_signs(Path("/nowhere"), 1)[0]["phase"] == "no sign of life"


def test_signs_of_an_earlier_start_are_not_those_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_ATTEMPT", "7-0-1")
    with vitals_of(tmp_path), vitals_of(tmp_path).phase("train"):
        pass
    assert read_signs(tmp_path, 1, "7-0-1")[0]["phase"] != "no sign of life"
    assert describe_ranks(read_signs(tmp_path, 1, "7-0-2"), now=None) == "rank 0: no sign of life"


def test_a_rank_that_does_not_move_leaves_its_stacks_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with vitals_of(tmp_path, hang_s=0.3) as vitals, vitals.phase("train"):
        until(lambda: stacks_file(tmp_path, 0).exists() and "test_vitals.py" in stacks_file(tmp_path, 0).read_text())
        time.sleep(0.5)
        assert stacks_file(tmp_path, 0).read_text().count("is in phase train") == 1
        vitals.mark_progress()
        until(lambda: stacks_file(tmp_path, 0).read_text().count("is in phase train") == 2)
    assert "is in phase train after step 0 and has made no progress for 0 s; stacks are in" in capfd.readouterr().err


def test_a_request_to_stop_is_for_the_start_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_ATTEMPT", "7-0-2")
    asked: list[str] = []
    with vitals_of(tmp_path) as vitals:
        vitals.ask = asked.append
        stop_file(tmp_path).write_text("7-0-1")
        time.sleep(0.3)
        assert not asked
        stop_file(tmp_path).write_text("7-0-2")
        until(lambda: asked)


def test_a_rank_without_a_launcher_ends(tmp_path: Path) -> None:
    rank = "import sys, time; from pathlib import Path; from megarl.run.vitals import Vitals\n"
    rank += "with Vitals(Path(sys.argv[1]), 0, 1, steps=1, hang_s=60, beat_s=0.05):\n    time.sleep(600)"
    launcher = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); time.sleep(60)"
    under_torchrun = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
    words = [sys.executable, "-c", launcher, rank, str(tmp_path)]
    process = subprocess.Popen(words, env=under_torchrun, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()  # what reads the rank's errors may end with the launcher
    until(lambda: (tmp_path / "status.json").exists())  # written after the rank's own file
    pid = json.loads(rank_file(tmp_path, 0).read_text())["pid"]
    process.kill()
    process.wait()
    until(lambda: "launcher of the ranks is gone" in (read_status(tmp_path)["last_error"] or ""))
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


@pytest.mark.parametrize(
    ("error", "state", "kind"),
    [
        (StopError("asked"), "stopped", None),
        (RolloutError("no server"), "failed", "RolloutError"),
        (ZeroDivisionError("x"), "failed", "ZeroDivisionError"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt"),
    ],
)
def test_the_status_says_how_a_run_ended(tmp_path: Path, error: BaseException, state: str, kind: str | None) -> None:
    with pytest.raises(type(error)), vitals_of(tmp_path) as vitals, record_ending(vitals, tmp_path, 0, 1):
        raise error
    found = read_status(tmp_path)
    assert (found["state"], found["error_kind"]) == (state, kind)


def fail(vitals: Vitals, folder: Path, error: Exception) -> None:
    with vitals, record_ending(vitals, folder, 0, 2), vitals.phase("train"):
        raise error


def test_a_failed_collective_call_names_phase_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.trainer.saving._SIGNS_ARE_OLD_S", 0.1)
    gone = {"rank": 1, "host": socket.gethostname(), "pid": 2**22 + 1, "step": 4, "phase": "sync", "beat": 0.0}
    gone["beat_s"] = 2.0
    vitals = vitals_of(tmp_path, 0, 2)
    vitals.begin(4)
    rank_file(tmp_path, 1).write_text(json.dumps(gone))
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1\nmore")
    with pytest.raises(PeerError) as caught:
        fail(vitals, tmp_path, closed)
    assert "rank 0 lost the others in phase train after step 4: [gloo/" in str(caught.value)
    assert "rank 1: gone in sync after step 4" in str(caught.value)
    assert "Traceback" in (tmp_path / "ranks" / "00000.error.txt").read_text()
    assert read_status(tmp_path)["error_kind"] == "PeerError"
    with pytest.raises(RuntimeError, match="shape"):  # nothing to do with the others
        fail(vitals_of(tmp_path, 0, 2), tmp_path, RuntimeError("a shape is wrong"))


METRICS = {"reward/mean": 0.5234, "reward/pass_rate": 0.5, "rollout/k3": 1.2e-4, "time/step_s": 2.13, "unknown": 1.0}


def test_line_shows_what_is_there() -> None:
    assert format_step(7, 60, METRICS) == "step  7/60  reward 0.523  pass 50.0%  k3 1.2e-04  time 2.1 s"
    assert format_step(7, 9, {}) == "step 7/9"
    assert "reward nan" in format_step(1, 1, {"reward/mean": float("nan")})


def test_a_file_gets_lines_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    progress = StepProgress()
    progress.line("in [bold]between[/bold]")
    progress.line(format_step(7, 60, METRICS))
    StepProgress(enabled=False).line("another rank")
    # Neither wrapped at 20 columns nor coloured nor read as markup.
    assert capsys.readouterr().out == "in [bold]between[/bold]\n" + format_step(7, 60, METRICS) + "\n"
