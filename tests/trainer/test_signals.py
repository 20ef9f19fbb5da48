"""What signals make of commands: a word and an exit code each, whatever the main thread waits for."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.commands import COMMANDS
from megarl.run import signals
from megarl.run.signals import ENDING, drop_lost_outputs, say_what_ends

LONG = {
    "train": ["run.toml"],
    "launch": ["run.toml"],
    "sft": ["run.toml"],
    "eval": ["run.toml"],
    "gap": ["run.toml"],
    "doctor": ["run.toml"],
    "convert": ["from", "to"],
    "quantize": ["from", "to"],
    "quickstart": [],
}
"""The commands that run for long, with the words that they need."""
BLOCKED = """
import signal, sys, threading
from megarl import cli

def block(self, overrides):
    print("ready", flush=True)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # in C, where no handler in Python is run; signals do not end it

for command in cli.COMMANDS.values():
    command.run = block
sys.exit(cli.main(sys.argv[1:]))
"""


def blocked(words: list[str], prefix: list[str] | None = None) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = subprocess.Popen([*(prefix or []), sys.executable, "-c", BLOCKED, *words], **pipes, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_the_commands_are_those_of_megarl():
    assert LONG.keys() <= COMMANDS.keys()


@pytest.mark.parametrize(("number", "command"), list(zip(ENDING, itertools.cycle(LONG), strict=False)))
def test_a_signal_ends_with_a_word_and_its_exit_code(number: signal.Signals, command: str):
    child = blocked([command, *LONG[command]])
    child.send_signal(number)
    _, said = child.communicate(timeout=3600)
    assert child.returncode == 128 + number
    (line,) = said.splitlines()
    assert line.startswith(f"megarl: error: megarl {command} was ended by {number.name}: ")
    kept = {"train": "newest checkpoint", "launch": "the ranks", "convert": "goes on", "quantize": "goes on"}
    assert kept.get(command, "nothing is saved") in line


def test_a_rank_that_torchrun_ends_leaves_the_word_to_others(monkeypatch: pytest.MonkeyPatch):
    """Another rank has said what failed."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    child = blocked(["train", "run.toml"])
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=3600)[1] == ""
    assert child.returncode == 128 + signal.SIGTERM


def test_hangups_under_nohup_stay_ignored():
    child = blocked(["train", "run.toml"], ["nohup"])
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGQUIT)  # the next one is said, so the first was not
    _, said = child.communicate(timeout=3600)
    assert child.returncode == 128 + signal.SIGQUIT
    assert "SIGHUP" not in said


def test_a_fork_does_not_end_its_parent():
    with say_what_ends("test", "nothing"):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGUSR2)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
        assert signal.getsignal(signal.SIGUSR2) is signals._do_nothing
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


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
