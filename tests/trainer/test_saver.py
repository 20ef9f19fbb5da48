"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
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
from megarl.files.writing import sha256_of
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints import saver as saver_module
from megarl.megatron.checkpoints.folders import complete_checkpoints, read_manifest
from megarl.megatron.checkpoints.saver import Saver


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writers begin when this file is there."""
    original: Callable[..., None] = saver_module._write_until_parent_ends
    file = tmp_path_factory.mktemp("gate") / "open"

    def later(*arguments: Any) -> None:
        while not file.exists():
            time.sleep(0.05)
        original(*arguments)

    monkeypatch.setattr(saver_module, "_write_until_parent_ends", later)
    return file


def writers() -> list[psutil.Process]:
    """The living children of this process that write: forks. Workers of rewards and of other tests are spawned."""
    forks = (child for child in multiprocessing.active_children() if isinstance(child, ForkProcess))
    return [psutil.Process(child.pid) for child in forks]


def test_what_is_saved_is_what_was_there_when_the_save_began(world: World, tmp_path: Path, gate: Path) -> None:
    with training(world.settings()) as step:
        take_step(step, world.rollouts())
        saver = Saver(tmp_path, keep=1)
        saver.begin(1, step.policy, {"note": "first"})
        then = weights_of(step.policy)
        assert saver.poll() is None
        assert complete_checkpoints(tmp_path) == []
        take_step(step, world.rollouts())
        assert any(not torch.equal(weight, then[name]) for name, weight in weights_of(step.policy).items())
        gate.touch()
        assert saver.poll(wait=True) == tmp_path / "step_0000001"
        now = weights_of(step.policy)
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
            found.append(weights_of(step.policy))
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    assert not writers()


def test_a_writer_that_is_killed_is_an_error_and_leaves_no_checkpoint(world: World, tmp_path: Path, gate: Path) -> None:
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
        gate.touch()
        saver.begin(3, step.policy, {})
        assert saver.poll(wait=True) == tmp_path / "step_0000003"
        assert [path.name for path in tmp_path.iterdir()] == ["step_0000003"]


def below() -> list[psutil.Process]:
    """The processes that the writer has forked."""
    (writer,) = writers()
    until = time.monotonic() + 300.0
    while not writer.children():
        assert time.monotonic() < until
        time.sleep(0.05)
    return writer.children()


def test_a_process_below_a_writer_that_is_killed_is_an_error_and_one_that_lives_goes_with_the_writer(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(lambda *_, **__: time.sleep(600.0)))
    with training(world.settings()) as step:
        saver = Saver(tmp_path, keep=1)
        saver.begin(1, step.policy, {})
        below()[0].kill()
        with pytest.raises(SaveError, match="step_0000001 could not be written"):
            saver.poll(wait=True)
        assert complete_checkpoints(tmp_path) == []
        saver.begin(2, step.policy, {})
        processes = below()
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
        for _, path in found:
            assert all(sha256_of(path / name) == digest for name, (_, digest) in read_manifest(path).items())
