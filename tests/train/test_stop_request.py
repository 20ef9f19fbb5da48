from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_world import World, trainer_of

from megarl.errors import SaveError, StopError
from megarl.megatron import checkpoint, distributed
from megarl.train.audit import check
from megarl.train.loop import train
from megarl.train.metrics import read_metrics, without_timing
from megarl.train.stopping import StopRequest


def numbers(folder: Path) -> list[dict[str, Any]]:
    return without_timing(read_metrics(folder / "metrics.jsonl"))


def test_a_signal_is_a_request_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(StopError, match="SIGUSR1"):
            stop.check()
        counted: list[int] = []
        with pytest.raises(StopError):
            stop.checking(counted.append)(3)
        assert counted == [3]
    assert signal.getsignal(signal.SIGUSR1) == before


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

    def asked_meanwhile(step: int, advance: Any) -> Any:
        if step >= 1:  # steps count from 0 when they are drawn: the second; evaluation of two done
            trainer.stop.ask("a test")
        return original(step, advance)

    setattr(trainer.sampler, "sample_step" if where == "rollout" else "evaluate", asked_meanwhile)
    with pytest.raises(StopError):
        trainer.run()
    trainer.log.close()
    done = 1 if where == "rollout" else 2
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path / "asked" / "checkpoints")] == [done]
    distributed.shutdown()
    train(settings("asked"))
    assert numbers(tmp_path / "asked") == numbers(tmp_path / "whole")
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

    waited = 0

    def poll(*, wait: bool = False) -> None:
        nonlocal waited
        waited += wait
        if wait and waited == 1:
            raise failure
        trainer.stop.ask("a test")

    trainer.saver.poll = poll  # type: ignore[method-assign, assignment]
    with pytest.raises(StopError if on_all_ranks else SaveError):  # others may wait where this rank does not go
        trainer.run()
    trainer.log.close()
    assert [step for step, _ in checkpoint.complete_checkpoints(tmp_path / "checkpoints")] == [1] * on_all_ranks
    distributed.shutdown()
