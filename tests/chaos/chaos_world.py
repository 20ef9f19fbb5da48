"""A tiny model and task for runs under attack, such a run, and how it is started again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import chaos_parts
import preloaded
import psutil
import tomli_w

from megarl.data.tiny import write_sort_task, write_tiny_model

STEPS, SAMPLES = 6, 16
MARK = "CHAOS_RUN"
"""Environment variable that every process of a run inherits."""
PATIENCE_S = 180.0
"""Longest time without progress, on a machine that does other things too."""


class ChaosError(AssertionError):
    """Something that must hold after an attack does not."""


@dataclass
class World:
    """A folder with a model, its task, and the code that the configurations name."""

    root: Path
    sizes: ClassVar[dict[str, Any]] = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_experts": 8,
        "expert_width": 32,
        "initializer_range": 0.3,
    }

    @property
    def model(self) -> Path:
        return self.root / "model"

    @staticmethod
    def made(root: Path, model: Path | None = None) -> World:
        """Write all of it; ``model`` is a model of another test to use instead of a new one."""
        root.mkdir(parents=True, exist_ok=True)
        if model is None:
            write_tiny_model(root / "model", **World.sizes, seed=0)
        else:
            (root / "model").symlink_to(model)
        write_sort_task(root / "task", num_train=64, num_heldout=8, num_demonstrations=8, digits=4, seed=0)
        return World(root)

    def settings(self, folder: Path, **tables: dict[str, Any]) -> Path:
        """Write the configuration of a run in ``folder``, beside it; ``tables`` add to those here."""
        task = self.root / "task"
        settings: dict[str, dict[str, Any]] = {
            "run": {"steps": STEPS, "dir": str(folder), "collective_timeout_s": 120.0},
            "model": {"path": str(self.model), "dtype": "fp32"},
            "data": {"train": str(task / "train.jsonl"), "max_prompt_tokens": 8},
            "reward": {"function": "chaos_parts:reward", "workers": 2},
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 8, "dtype": "fp32"},
            "environment": {"function": "chaos_parts:make"},
            "train": {"mini_batches": 2, "micro_batch_tokens": 256},
            "optim": {"lr": 1e-3},
            "checkpoint": {"every": 1},
            "log": {"sinks": [], "hang_s": 60.0},
        }
        for name, table in tables.items():
            settings.setdefault(name, {}).update(table)
            settings[name] = {key: value for key, value in settings[name].items() if value is not None}
        path = folder.with_suffix(".toml")
        path.write_text(tomli_w.dumps(settings))
        return path


@dataclass
class Run:
    """A run that is started as often as it takes, by ``megarl train`` or ``megarl launch``."""

    world: World
    config: Path
    launched: bool = False
    partial: bool = False
    """Whether responses outlast a step."""
    words: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    seen: dict[int, float] = field(default_factory=dict)
    """Start times of all processes of the run that were ever looked at, by process id."""
    sessions: set[int] = field(default_factory=set)
    struck: list[str] = field(default_factory=list)
    """What was done to it so far."""

    @property
    def folder(self) -> Path:
        return self.config.with_suffix("")

    @property
    def scratch(self) -> Path:
        """TMPDIR of the run, and what the harness writes about it."""
        return self.config.with_suffix(".scratch")

    @property
    def log(self) -> Path:
        return self.scratch / f"start{self.starts}.log"

    def said(self, start: int | None = None) -> str:
        """What the run printed since its last start, or since start number ``start``."""
        logs = [self.scratch / f"start{number}.log" for number in range(start or self.starts, self.starts + 1)]
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def last_words(self) -> str:
        """What was done to it, what it printed, and where it hangs."""
        stacks = "".join(path.read_text() for path in self.folder.glob("ranks/*.stacks.txt"))
        return "\n".join([f"--- struck: {self.struck}; start {self.starts}", self.said()[-3000:], stacks[-3000:]])

    def start(self) -> None:
        self.starts += 1
        (self.scratch / "tmp").mkdir(parents=True, exist_ok=True)
        paths = [str(Path(chaos_parts.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        more = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(self.scratch / "tmp"), MARK: str(self.folder)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **more, **self.environment}
        command = ["launch" if self.launched else "train", str(self.config), *self.words]
        with self.log.open("ab") as log:
            # A fork saves the imports; the processes of torchrun are to be those of a user.
            self._process = (subprocess.Popen if self.launched else preloaded.Popen)(
                [sys.executable, "-m", "megarl.cli", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions.add(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def step(self) -> int:
        """Finished steps, as status.json says."""
        with suppress(OSError, ValueError, TypeError):
            return int(json.loads((self.folder / "status.json").read_text())["step"])
        return 0

    def tree(self) -> list[psutil.Process]:
        """The living processes of the run, its main one first."""
        with suppress(psutil.Error):
            main = psutil.Process(self.pid)
            found = [main, *main.children(recursive=True)]
            for process in found:
                with suppress(psutil.Error):
                    self.seen[process.pid] = process.create_time()
            return found
        return []

    def living(self) -> list[psutil.Process]:
        """All processes of the run: they carry its mark, are in its sessions, or were seen in its tree."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if process.status() != psutil.STATUS_ZOMBIE and self._is_own(process):
                    found.append(process)
        return found

    def _is_own(self, process: psutil.Process) -> bool:
        if self.seen.get(process.pid) == process.create_time() or os.getsid(process.pid) in self.sessions:
            return True
        return process.environ().get(MARK) == str(self.folder)

    def left(self) -> list[str]:
        """Processes that live although the run has ended."""
        return [f"{process.pid} {process.name()}" for process in self.living()]

    def until(self, holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> bool:
        """Wait until it holds (True) or the run ends (False); ChaosError if neither comes."""
        until = time.monotonic() + patience_s
        while not holds():
            if self.code is not None:
                return holds()
            if time.monotonic() > until:
                raise ChaosError(f"{what}: not after {patience_s:.0f} s; the run hangs\n{self.last_words()}")
            time.sleep(0.01)
        return True

    def until_end(self) -> int:
        step = -1
        while self.code is None and step < self.step:  # patience is for a step, not for the run
            step = self.step
            self.until(lambda step=step: self.step > step, f"a step after {step}, or the end")
        self.until(lambda: self.code is not None, "the end of the run")
        code = self.code
        assert code is not None
        return code

    def kill_all(self) -> None:
        """As a power cut does: all processes at once."""
        for process in [*self.tree(), *self.living()]:
            with suppress(psutil.Error):
                process.kill()
        self.until_end()

    def remove(self) -> None:
        for path in (self.folder, self.scratch):
            shutil.rmtree(path, ignore_errors=True)
        self.config.unlink(missing_ok=True)
