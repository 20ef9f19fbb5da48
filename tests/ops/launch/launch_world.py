"""A tiny model and task, runs on them by ``megarl launch``, and what is to be true of a run however it was broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preloaded
import psutil
from audit_reader import check
from run_configs import records_of

from megarl.data.tiny import write_sort_task, write_tiny_model

STEPS = 8
CONFIG = """\
[run]
name = "{name}"
dir = "{root}/{name}"
steps = {steps}
[model]
path = "{root}/model"
dtype = "fp32"
[parallel]
ep = 2
[data]
train = "{root}/task/train.jsonl"
heldout = "{root}/task/heldout.jsonl"
max_prompt_tokens = 16
[reward]
function = "lengths:reward"
[rollout]
prompts_per_step = 8
group_size = 4
max_response_tokens = 10
dtype = "fp32"
[train]
mini_batches = 2
micro_batch_tokens = 4096
[optim]
lr = 1e-3
[eval]
every = 4
max_prompts = 32
[checkpoint]
every = 2
[log]
sinks = []
[launch]
ranks_per_node = 2
"""
# A reward that an untrained model gets sometimes, and that takes its time, so that there is a middle of a step.
REWARD = """\
import time

def reward(prompt, response, answer, **rest):
    time.sleep(0.05)
    return float(len(response) % 2)


def slow_reward(**words):
    time.sleep(0.15)
    return reward(**words)
"""


@dataclass
class World:
    """Folder with model, task and configurations."""

    root: Path

    @staticmethod
    def made(root: Path) -> World:
        write_tiny_model(root / "model", hidden_size=64, num_experts=8, expert_width=32, seed=0)
        write_sort_task(root / "task", seed=0)
        (root / "lengths.py").write_text(REWARD)
        return World(root)

    def config(self, name: str, text: str = CONFIG, steps: int = STEPS) -> Path:
        path = self.root / f"{name}.toml"
        path.write_text(text.format(name=name, root=self.root, steps=steps))
        return path

    def environment(self, **more: str) -> dict[str, str]:
        paths = [str(self.root), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


@dataclass
class Run:
    """A run of this configuration; its log lies beside it."""

    world: World
    config: Path

    @property
    def log(self) -> Path:
        return self.config.with_suffix(".log")

    @property
    def folder(self) -> Path:
        return self.world.root / self.config.stem

    def status(self) -> dict[str, Any]:
        return read_json(self.folder / "status.json")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        until(holds, what, log=self.log)

    def until_step(self, step: int) -> None:
        """Until it has finished so many steps."""
        self.until(lambda: self.status().get("step", 0) >= step, f"step {step}")


@dataclass
class Launch(Run):
    """A ``megarl launch`` that runs, or another command that trains."""

    words: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    command: Sequence[str] = ("-m", "megarl.cli", "launch")
    fresh: bool = False
    """Whether its interpreters import everything themselves."""

    def __post_init__(self) -> None:
        with self.log.open("ab") as log:
            start = subprocess.Popen if self.fresh else preloaded.Popen
            self.process = start(
                [sys.executable, *self.command, str(self.config), *self.words],
                env=self.world.environment(**self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.world.root,
            )

    def until(self, holds: Callable[[], bool], what: str) -> None:
        def holds_or_ends() -> bool:
            if found := holds():
                return found
            assert self.process.poll() is None, f"{what}: ended before\n{self.log.read_text()[-3000:]}"
            return False

        super().until(holds_or_ends, what)

    def code(self, timeout_s: float = 1200.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise AssertionError(self.log.read_text()[-3000:]) from None


def until(holds: Callable[[], bool], what: str, timeout_s: float = 900.0, log: Path | None = None) -> None:
    """Wait; AssertionError with the end of the log."""
    until = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > until:
            said = log.read_text()[-6000:] if log and log.exists() else ""
            raise AssertionError(f"{what}: not so after {timeout_s:.0f} s\n{said}")
        time.sleep(0.1)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def rank_pid(folder: Path, rank: int) -> int:
    return int(read_json(folder / "ranks" / f"{rank:05d}.json")["pid"])


def processes_of(root: Path) -> list[psutil.Process]:
    """Living processes that have this folder on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(root) in word for word in words):
            found.append(process)
    return found


def assert_whole(folder: Path, reference: Path, steps: int = STEPS) -> None:
    """The run has the numbers of one that nothing happened to, and has trained on each sample once."""
    assert records_of(folder) == records_of(reference)
    assert check(folder / "samples.jsonl", steps) == check(reference / "samples.jsonl", steps) == steps * 32
