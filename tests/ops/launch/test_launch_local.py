"""``megarl launch`` on one machine: real ranks over gloo, stopped, killed and hung."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from audit_reader import check
from launch_world import CONFIG, STEPS, Launch, World, assert_whole, processes_of, rank_pid, until

from megarl.run.status import read_status

pytestmark = [pytest.mark.slow(minutes=5), pytest.mark.multirank]


def test_a_run_ends_with_0_and_leaves_logs_status_and_audit(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = read_status(reference)
    assert (status["state"], status["step"], status["checkpoint"]) == ("finished", STEPS, f"step_{STEPS:07d}")
    assert status["step_s"] > 0
    logs = sorted(reference.glob("logs/*/attempt1/node0/*/attempt_0/*/stdout.log"))
    assert [log.parent.name for log in logs] == ["0", "1"]
    assert f"step {STEPS}/{STEPS}" in logs[0].read_text()
    assert logs[1].read_text() == ""  # only the first rank speaks
    assert check(reference / "samples.jsonl", STEPS) == STEPS * 32
    said = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "status", str(reference)], capture_output=True, text=True, check=True
    ).stdout
    assert "finished" in said
    assert f"{STEPS} of {STEPS}" in said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_saves_itself_and_goes_on_as_if_nothing_had_happened(
    world: World, reference: Path, number: signal.Signals
) -> None:
    run = Launch(world, world.config(f"asked-{number.name}"))
    run.until_step(3)
    run.process.send_signal(number)
    assert run.code() == 75, run.log.read_text()[-3000:]
    status = read_status(run.folder)
    assert status["state"] == "stopped"
    assert 3 <= status["step"] < STEPS
    assert status["checkpoint"] == f"step_{status['step']:07d}"
    assert not processes_of(run.folder)
    again = Launch(world, run.config)
    assert again.code() == 0
    assert f"resumed from {run.folder}/checkpoints/{status['checkpoint']}" in run.log.read_text()
    assert_whole(run.folder, reference)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_saves_what_is_finished_and_the_run_goes_on(world: World, reference: Path, ranks: int) -> None:
    """torchrun passes the signal on to its ranks, and waits for them before it ends."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if ranks == 2 else []
    words = {"words": ["--parallel.ep", str(ranks)], "command": [*launcher, "-m", "megarl.cli", "train"]}
    run = Launch(world, world.config(f"keyboard{ranks}"), **words)
    run.until_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.code() == (1 if ranks == 2 else 75), run.log.read_text()[-3000:]
    status = read_status(run.folder)
    assert status["state"] == "stopped"
    assert 3 <= status["step"] < STEPS
    assert status["checkpoint"] == f"step_{status['step']:07d}"
    said = run.log.read_text()
    assert said.count("megarl: stopping; finished steps are saved first") == 1
    assert ("torchrun waits 30 s" in said) == (ranks == 2)
    assert f"saved {run.folder}/checkpoints/{status['checkpoint']}" in said
    assert f"step {status['step']} is saved in {run.folder}/checkpoints, start the run again" in said
    assert not processes_of(run.folder)
    assert Launch(world, run.config, **words).code() == 0
    assert f"resumed from {run.folder}/checkpoints/{status['checkpoint']}" in run.log.read_text()
    if ranks == 2:
        assert_whole(run.folder, reference)


def test_ranks_that_are_killed_cost_the_steps_since_the_last_checkpoint(world: World, reference: Path) -> None:
    run = Launch(world, world.config("killed-rank"))
    run.until_step(3)
    os.kill(rank_pid(run.folder, 1), signal.SIGKILL)
    run.until_step(5)
    for rank in (0, 1):  # as NCCL does, when a collective call takes too long
        os.kill(rank_pid(run.folder, rank), signal.SIGABRT)
    assert run.code() == 0, run.log.read_text()[-3000:]
    said = run.log.read_text()
    for words in ("rank 0 lost the others in phase", "rank 1: gone in"):
        assert words in said, said[-3000:]
    assert "starting it again" in said
    first, second = (line for line in said.splitlines() if "megarl: the trainer died (" in line)
    assert f"(rank 1 on {socket.gethostname()} was killed by SIGKILL; last seen: " in first
    assert " was killed by SIGABRT; last seen: " in second
    assert "local_rank" not in said  # torchrun's 45 lines
    assert (
        "failed (exitcode: -9) local_rank: 1" in next(run.folder.glob("logs/*/attempt1/node0/torchrun.log")).read_text()
    )
    alone = said[said.rindex("last seen: rank") :].splitlines()[0]  # the time that nobody was left to tell
    assert " after step 5" in alone or " after step 6" in alone
    assert_whole(run.folder, reference)
    undone = [line for line in (run.folder / "samples.jsonl").read_text().splitlines() if "resumed_after" in line]
    assert [json.loads(line)["resumed_after"] for line in undone] in ([0, 2, 4], [0, 2, 6])


def test_a_launcher_that_is_killed_leaves_nobody_behind_and_no_lock(world: World, reference: Path) -> None:
    text = CONFIG.replace("[checkpoint]\n", "[checkpoint]\nasynchronous = true\n")
    run = Launch(world, world.config("killed-launcher", text))
    run.until_step(3)
    run.process.kill()
    run.process.wait()
    until(lambda: not processes_of(run.folder.with_suffix(".toml")), "nobody is left")
    assert read_status(run.folder)["state"] in ("lost", "stopped", "failed")
    assert Launch(world, run.config).code() == 0
    assert_whole(run.folder, reference)
    assert not list((run.folder / "checkpoints").glob("*.partial"))


def test_a_second_launch_of_a_run_is_refused_and_does_it_no_harm(world: World) -> None:
    run = Launch(world, world.config("twice", steps=100))
    run.until_step(1)
    second = Launch(world, run.config)
    assert second.code() == 2
    assert f"is in use by process {run.process.pid} on" in run.log.read_text()
    # Nor can a trainer get past the launcher.
    words = [sys.executable, "-m", "megarl.cli", "train", str(run.config), "--parallel.ep", "1"]
    assert run.process.poll() is None
    trainer = subprocess.run(words, env=world.environment(), capture_output=True, text=True, check=False)
    assert trainer.returncode == 2
    assert "is in use by process" in trainer.stderr
    run.process.send_signal(signal.SIGTERM)
    assert run.code() == 75
    assert check(run.folder / "samples.jsonl", run.status()["step"]) == run.status()["step"] * 32


def test_a_rank_that_hangs_is_named_with_its_stacks_and_the_run_goes_on(world: World, reference: Path) -> None:
    config = world.config("hung")
    run = Launch(world, config, ["--log.hang_s", "6", "--run.collective_timeout_s", "20"])
    run.until_step(3)
    victim = rank_pid(run.folder, 1)
    os.kill(victim, signal.SIGSTOP)
    stacks = run.folder / "ranks" / "00000.stacks.txt"
    run.until(stacks.exists, "stacks")
    run.until(lambda: "rank 1: silent for" in run.log.read_text(), "the rank is named")
    assert run.code() == 0, run.log.read_text()[-3000:]
    assert "rank 0 on" in stacks.read_text()
    assert "loop.py" in stacks.read_text()
    assert "Timed out" in run.log.read_text() or "timed out" in run.log.read_text().lower()
    assert_whole(run.folder, reference)
