"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forks import Job, run_jobs
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from saves import save
from train_world import World, take_step, training, weights_of

from megarl.errors import SaveError
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints import saver as saver_module
from megarl.megatron.checkpoints.folders import complete_checkpoints, find_change, read_manifest
from megarl.megatron.checkpoints.saver import Saver


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers begin when training has long gone on."""
    original: Callable[..., None] = saver_module._write_until_parent_ends

    def later(*arguments: Any) -> None:
        time.sleep(4.0)
        original(*arguments)

    monkeypatch.setattr(saver_module, "_write_until_parent_ends", later)


def writers() -> list[psutil.Process]:
    """The living children of this process that write: forks. Workers of rewards and of other tests are spawned."""
    forks = (child for child in multiprocessing.active_children() if isinstance(child, ForkProcess))
    return [psutil.Process(child.pid) for child in forks]


@pytest.mark.usefixtures("slow")
def test_what_is_saved_is_what_was_there_when_the_save_began(world: World, tmp_path: Path) -> None:
    with training(world.settings()) as step:
        take_step(step, world.rollouts())
        saver = Saver(tmp_path, keep=1)
        saver.begin(1, step.policy, {"note": "first"})
        then = {name: weight.clone() for name, weight in weights_of(step.policy).items()}
        assert saver.poll() is None
        assert complete_checkpoints(tmp_path) == []
        take_step(step, world.rollouts())
        assert any(not torch.equal(weight, then[name]) for name, weight in weights_of(step.policy).items())
        assert saver.poll(wait=True) == tmp_path / "step_0000001"
        now = {name: weight.clone() for name, weight in weights_of(step.policy).items()}
        saver.begin(2, step.policy, {})
        saver.begin(3, step.policy, {})  # after the one before
        assert saver.poll(wait=True) == tmp_path / "step_0000003"
        assert saver.poll() is None
        assert [number for number, _ in complete_checkpoints(tmp_path)] == [3]
        save(tmp_path / "waited", 3, step.policy, {}, keep=2)
        # The next step is the same from either.
        found = []
        for path in (tmp_path / "step_0000003", tmp_path / "waited" / "step_0000003"):
            checkpoint.load(path, step.policy)
            assert all(torch.equal(weight, now[name]) for name, weight in weights_of(step.policy).items())
            take_step(step, world.rollouts())
            found.append({name: weight.clone() for name, weight in weights_of(step.policy).items()})
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    assert not writers()


@pytest.mark.usefixtures("slow")
def test_a_writer_that_is_killed_is_an_error_and_leaves_no_checkpoint(world: World, tmp_path: Path) -> None:
    with training(world.settings()) as step:
        saver = Saver(tmp_path, keep=1)
        saver.begin(1, step.policy, {})
        for writer in writers():
            os.kill(writer.pid, signal.SIGKILL)
        with pytest.raises(SaveError, match="step_0000001 could not be written"):
            saver.poll(wait=True)
        assert complete_checkpoints(tmp_path) == []
        saver.begin(2, step.policy, {})
        saver.abandon()
        assert not writers()
        assert complete_checkpoints(tmp_path) == []
        saver.begin(3, step.policy, {})
        assert saver.poll(wait=True) == tmp_path / "step_0000003"
        assert [path.name for path in tmp_path.iterdir()] == ["step_0000003"]


@pytest.fixture
def slow_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a writer forks, which write, begin late."""
    original = FileSystemWriterAsync.write_preloaded_data

    def later(*arguments: Any, **named: Any) -> None:
        time.sleep(60.0)
        original(*arguments, **named)

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(later))


def below(writer: psutil.Process) -> list[psutil.Process]:
    until = time.monotonic() + 300.0
    while not writer.children():
        assert time.monotonic() < until
        time.sleep(0.05)
    return writer.children()


@contextmanager
def saving(world: World, folder: Path) -> Iterator[tuple[Saver, list[psutil.Process]]]:
    """A save that is under way, and the processes below its writer."""
    with training(world.settings()) as step:
        saver = Saver(folder, keep=1)
        saver.begin(1, step.policy, {})
        (writer,) = writers()
        yield saver, below(writer)


@pytest.mark.usefixtures("slow_below")
def test_a_process_below_a_writer_that_is_killed_is_an_error_and_no_wait(world: World, tmp_path: Path) -> None:
    with saving(world, tmp_path) as (saver, processes):
        processes[0].kill()
        with pytest.raises(SaveError, match="step_0000001 could not be written"):
            saver.poll(wait=True)
        assert complete_checkpoints(tmp_path) == []


@pytest.mark.usefixtures("slow_below")
def test_a_writer_takes_those_below_it_along(world: World, tmp_path: Path) -> None:
    with saving(world, tmp_path) as (saver, processes):
        saver.abandon()
        gone, alive = psutil.wait_procs(processes, timeout=120.0)
        assert gone
        assert not alive


KILLED_AT = {
    "mkdir step_0000002.partial": 1,
    "fsync step_0000002.partial/__0_": 1,  # in a process below the writer
    "fsync step_0000002.partial/.metadata": 1,
    "fsync step_0000002.partial/metadata.json": 1,
    "fsync step_0000002.partial/.manifest": 1,
    "replace step_0000002.partial/.manifest": 1,
    "rename step_0000002.partial": 1,
    "rename step_0000001": 2,
    "unlink step_0000001.partial/.metadata": 2,  # in the middle of the older one
    "never": 2,
}


@pytest.mark.multirank
def test_a_kill_at_any_phase_of_a_save_leaves_an_intact_checkpoint(world: World, tmp_path: Path) -> None:
    """Trainer, writer and the writer's own children die together, as on a node that loses power."""
    jobs = [
        Job(at, 1, "train_jobs:saves_and_dies", {"world": world, "folder": tmp_path / str(number), "at": at})
        for number, at in enumerate(KILLED_AT)
    ]
    ended = run_jobs(jobs, tmp_path / "jobs")
    for number, (at, step) in enumerate(KILLED_AT.items()):
        assert ended[at].exit_codes == (0 if at == "never" else -signal.SIGKILL,), ended[at].output
        found = complete_checkpoints(tmp_path / str(number))
        assert found[-1][0] == step, at
        assert all(
            find_change(path, [(n, d) for n, (_, d) in read_manifest(path).items()]) is None for _, path in found
        )
