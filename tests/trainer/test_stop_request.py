"""Requests to stop a run, by signals and in the middle of a step, and outputs that nobody reads any more."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from audit_reader import check
from run_configs import records_of
from train_world import World, trainer_of

from megarl.errors import SaveError, StopError
from megarl.megatron import distributed
from megarl.megatron.checkpoints.folders import complete_checkpoints
from megarl.run.signals import drop_lost_outputs
from megarl.run.stop_request import StopRequest
from megarl.trainer.loop import train


def test_a_signal_is_a_request_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StopError, match="SIGUSR1"):
            stop.check()
    assert signal.getsignal(signal.SIGUSR1) == before


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_ends_at_once_unless_it_is_the_first_one_passed_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("megarl.run.stop_request.time.monotonic", lambda: now)
    with StopRequest() as stop:
        interrupt()
        now += 0.5
        interrupt()  # the terminal's and the launcher's
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGINT"
        assert capfd.readouterr().err.count("a second Ctrl-C ends at once") == 1
        now += 1.0
        with pytest.raises(KeyboardInterrupt):
            interrupt()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_finishes_the_step_and_saves_it_with_default_settings_but_a_second_one_saves_nothing(
    world: World, tmp_path: Path, times: int, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = world.settings(run__dir=str(tmp_path), run__steps=3)
    distributed.initialize(settings)
    trainer = trainer_of(settings)
    update = trainer.train_step.update

    def pressed(*arguments: Any) -> Any:
        for time in range(times if trainer.stop.reason is None else 0):
            trainer.stop._interrupted_at = -10.0 if time else None  # long ago
            interrupt()
        return update(*arguments)

    trainer.train_step.update = pressed  # type: ignore[method-assign]
    saved = re.escape(f"step 1 is saved in {tmp_path}/checkpoints")
    ends = pytest.raises(StopError, match=saved) if times == 1 else pytest.raises(KeyboardInterrupt)
    with trainer.stop, ends:
        trainer.run()
    trainer.log.close()
    assert [step for step, _ in complete_checkpoints(tmp_path / "checkpoints")] == [1] * (times == 1)
    assert (f"saved {tmp_path}/checkpoints/step_0000001" in capsys.readouterr().out) == (times == 1)
    distributed.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["rollout", "evaluate"])
def test_a_stop_in_the_middle_of_sampling_keeps_what_is_done_and_draws_the_rest_again(
    world: World, tmp_path: Path, where: str
) -> None:
    def settings(name: str) -> Any:
        return world.settings(run__dir=str(tmp_path / name), run__steps=3, eval__every=2, checkpoint__every=3)

    train(settings("whole"))
    distributed.initialize(settings("asked"))
    trainer = trainer_of(settings("asked"))
    original: Callable[..., Any] = getattr(trainer.sampler, "sample_step" if where == "rollout" else "evaluate")

    calls = itertools.count()

    def asked_meanwhile(*arguments: Any) -> Any:
        if next(calls):  # the second step; the evaluation after two steps, for one comes before the first
            trainer.stop.ask("a test")
        return original(*arguments)

    setattr(trainer.sampler, "sample_step" if where == "rollout" else "evaluate", asked_meanwhile)
    with pytest.raises(StopError):
        trainer.run()
    trainer.log.close()
    done = 1 if where == "rollout" else 2
    assert [step for step, _ in complete_checkpoints(tmp_path / "asked" / "checkpoints")] == [done]
    distributed.shutdown()
    train(settings("asked"))
    assert records_of(tmp_path / "asked") == records_of(tmp_path / "whole")
    size = check(tmp_path / "whole" / "samples.jsonl", 3)
    assert check(tmp_path / "asked" / "samples.jsonl", 3) == size > 0


@pytest.mark.parametrize("on_all_ranks", [True, False])
def test_a_stop_saves_although_an_earlier_save_beside_training_has_failed(
    world: World, tmp_path: Path, on_all_ranks: bool
) -> None:
    settings = world.settings(run__dir=str(tmp_path), run__steps=2, eval__every=0, checkpoint__every=2)
    distributed.initialize(settings)
    trainer = trainer_of(settings)
    failure = SaveError("step_0000001 could not be written")
    failure.on_all_ranks = on_all_ranks

    waited, own = 0, trainer.checkpoints.saver.poll

    def poll(*, wait: bool = False) -> Path | None:
        nonlocal waited
        waited += wait
        if wait and waited == 1:
            raise failure
        trainer.stop.ask("a test")
        return own(wait=wait)

    trainer.checkpoints.saver.poll = poll  # type: ignore[method-assign]
    with pytest.raises(StopError if on_all_ranks else SaveError):  # others may wait where this rank does not go
        trainer.run()
    trainer.log.close()
    assert [step for step, _ in complete_checkpoints(tmp_path / "checkpoints")] == [1] * on_all_ranks
    distributed.shutdown()


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
