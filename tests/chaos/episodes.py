"""Episodes of chaos: each is one run, struck at random moments, started again until it ends, and checked.

An episode follows from its seed, but for the timing of processes. ``EPISODES`` names the kinds; each is a function that
returns what happened, one ``Happened`` per attack. A ``ChaosError`` says what does not hold.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from chaos_world import STEPS, ChaosError, Run, World
from invariants import (
    numbers,
    require,
    require_clean,
    require_explained,
    require_undisturbed,
    require_whole,
)

STOPPED, BAD_INPUT = 75, 2
MOST_STARTS = 25


@dataclass(frozen=True)
class Happened:
    """An attack and what came of it."""

    attack: str
    outcome: str
    recovery_s: float | None = None
    """From the attack until the run had finished one more step than before."""


class Arena:
    """A world, the numbers of its undisturbed run, and a folder per episode."""

    def __init__(self, root: Path) -> None:
        self.world = World.made(root)
        self._references: dict[bool, list[dict[str, Any]]] = {}

    def reference(self, launched: bool = False) -> list[dict[str, Any]]:
        """The records of a run that nothing happened to; it is checked as any other."""
        if launched not in self._references:
            run = self.run("reference" + "_launched" * launched, launched)
            run.start()
            require(run.until_end() == 0, "the undisturbed run failed", run)
            require_clean(run)
            require_whole(run)
            self._references[launched] = numbers(run.folder)
        return self._references[launched]

    def run(self, name: str, launched: bool = False, **tables: dict[str, Any]) -> Run:
        if launched:
            tables = {"launch": {"ranks_per_node": 2}, "parallel": {"ep": 2}, **tables}
        return Run(self.world, self.world.settings(self.world.root / name, **tables), launched)


def finish(arena: Arena, run: Run) -> str:
    """Start the run until it has come to its end; check everything; say what it has lost."""
    while (code := run.until_end()) != 0:
        require_explained(run)
        require(code in (STOPPED, BAD_INPUT, 1) or code < 0, f"ended with code {code}", run)
        require(run.starts < MOST_STARTS, "does not come to its end", run)
        run.start()
    require_explained(run)
    require_clean(run)
    require_whole(run)
    return require_undisturbed(run, arena.reference(run.launched))


def _await_progress(run: Run, step: int) -> str:
    """Start the run again if it ends, until it has finished more steps than ``step``; how it came back."""
    back = "went on"
    while not run.until(lambda: run.step > step or run.step == STEPS, f"a step after {step}"):
        code = run.code
        if code == 0:
            break
        require_explained(run)
        require(run.starts < MOST_STARTS, "does not come to its end", run)
        run.await_gone()
        back = "saved itself and went on when started again" if code == STOPPED else "went on when started again"
        run.start()
    if back == "went on" and "starting it again" in run.said():
        back = "the launcher started it again"
    return back


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.name()} {' '.join(process.cmdline())}"
    return ""


def _named(*parts: str) -> Callable[[Run], list[psutil.Process]]:
    """Processes of the run whose name or command line has one of these parts."""
    return lambda run: [process for process in run.tree()[1:] if any(part in _words(process) for part in parts)]


def _main(run: Run) -> list[psutil.Process]:
    return run.tree()[:1]


def _ranks(run: Run) -> list[psutil.Process]:
    """The trainers: the run itself, or the children of torchrun's agent."""
    agents = _agent(run)
    return agents[0].children() if agents else [] if run.launched else _main(run)


def _agent(run: Run) -> list[psutil.Process]:
    """torchrun, which is the only child of the launcher."""
    return [process for process in _main(run) for process in process.children()] if run.launched else []


def _savers(run: Run) -> list[psutil.Process]:
    """Processes that a rank has forked: they have its command line."""
    with suppress(psutil.Error):
        return [child for rank in _ranks(run) for child in rank.children() if child.cmdline() == rank.cmdline()]
    return []


PROCESSES: dict[str, Callable[[Run], list[psutil.Process]]] = {
    "launcher": lambda run: _main(run) if run.launched else [],
    "torchrun agent": _agent,
    "rank": _ranks,
    "background saver": _savers,
    "reward worker": _named("spawn_main"),
    "sandbox": _named("bwrap"),
}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}


def signal_one(run: Run, kind: str, name: str, rng: random.Random) -> str | None:
    """Send a signal to one process of a kind; after SIGSTOP it goes on some time later."""
    with suppress(psutil.Error):
        if not (found := PROCESSES[kind](run)):
            return None
        process = rng.choice(found)
        run.struck.append(f"{name} to {kind} {process.pid} after step {run.step}")
        process.send_signal(SIGNALS[name])
        if name == "SIGSTOP":
            time.sleep(rng.uniform(0.2, 3.0))
            with suppress(psutil.Error):
                process.resume()
        return f"{name} to {kind}"
    return None


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def _zeroes(path: Path, rng: random.Random) -> None:
    """As a file system does that has recorded the size and lost the data."""
    path.write_bytes(bytes(path.stat().st_size))


def _garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.randrange(1, 2000)))


def _longer(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "one bit flipped": _flip,
    "truncated": _truncate,
    "emptied": _empty,
    "zeroes": _zeroes,
    "garbage": _garbage,
    "longer": _longer,
    "removed": _remove,
}


def exchange(path: Path, other: Path) -> bool:
    """Put another checkpoint's file of the same name in its place; False if it is the same."""
    source = other / path.name
    if not source.is_file() or source.read_bytes() == path.read_bytes():
        return False
    shutil.copyfile(source, path)
    return True


def kills(arena: Arena, rng: random.Random, name: str, launched: bool = False, strikes: int = 3) -> list[Happened]:
    """Signals to processes of every kind."""
    arena.reference(launched)
    run = arena.run(name, launched, checkpoint={"every": rng.choice([1, 2]), "asynchronous": rng.random() < 0.7})
    run.start()
    found: list[tuple[str, str, float]] = []
    for _ in range(strikes):
        wanted = run.step + rng.choice([0, 1, 1, 2])
        if not run.until(lambda wanted=wanted: run.step >= wanted or run.step >= STEPS - 1, f"step {wanted}"):
            break
        time.sleep(rng.uniform(0.0, 0.6))
        struck = _strike(run, rng)
        if struck is None:
            break
        step, began = run.step, time.monotonic()
        back = _await_progress(run, step)
        found.append((struck, back, time.monotonic() - began))
    lost = finish(arena, run)
    run.remove()
    return [Happened(struck, f"{back}; {lost}", seconds) for struck, back, seconds in found]


def _strike(run: Run, rng: random.Random) -> str | None:
    """One signal to a process of a kind that lives now, savers and sandboxes first: they live for moments."""
    first, name = run.step, rng.choice(list(SIGNALS))
    kinds = [kind for kind in PROCESSES if kind not in ("background saver", "sandbox")]
    wanted = rng.choice([*PROCESSES, "background saver", "sandbox"])
    while run.code is None:
        if struck := signal_one(run, wanted, name, rng):
            return struck
        if wanted in kinds or run.step > first or run.step >= STEPS - 1:
            wanted = rng.choice(kinds)
        time.sleep(0.005)
    return None


def _checkpoints(run: Run) -> list[Path]:
    return sorted(run.folder.glob("checkpoints/step_???????"))


def damage(arena: Arena, rng: random.Random, name: str, rounds: int = 2) -> list[Happened]:
    """A power cut, and a file of a checkpoint that is not what was written."""
    arena.reference()
    run = arena.run(name, checkpoint={"every": 1, "keep": 3, "asynchronous": rng.random() < 0.5})
    happened = []
    done = 0
    for _ in range(rounds):
        run.start()
        enough = min(done + 2, STEPS)
        run.until(lambda enough=enough: len(_checkpoints(run)) >= 2 and run.step >= enough, f"step {enough}")
        run.kill_all()
        done = run.step
        happened.append(_damage_one(run, rng))
    run.start()
    lost = finish(arena, run)
    run.remove()
    return [Happened(each.attack, f"{each.outcome}; {lost}", each.recovery_s) for each in happened]


def _damage_one(run: Run, rng: random.Random) -> Happened:
    """Damage a file of the newest checkpoint, start the run, and see that it goes on from an older one and says so."""
    *older, newest = _checkpoints(run)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    path, how = rng.choice(files), rng.choice([*DAMAGES, "of another step"])
    if how == "of another step" and not exchange(path, older[-1]):
        how = "removed"
    if how in DAMAGES:
        DAMAGES[how](path, rng)
    began = time.monotonic()
    run.start()
    resumed = f"resumed from {older[-1]}"
    run.until(lambda: "resumed from" in run.said() or run.code is not None, "the resumption")
    kind = "shard" if path.suffix == ".distcp" else path.name
    require(resumed in run.said(), f"{path} ({how}) was damaged and loaded, or nothing was", run)
    require(newest.name in run.said(), f"{newest} was damaged, and nothing was said", run)
    seconds = time.monotonic() - began
    run.kill_all()
    return Happened(f"{kind} of a checkpoint: {how}", "named, went on from the one before", seconds)


def launched_kills(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """Signals to launcher, torchrun and two ranks."""
    return kills(arena, rng, name, launched=True, strikes=2)


Episode = Callable[[Arena, random.Random, str], list[Happened]]
EPISODES: dict[str, Episode] = {
    "kills": kills,
    "damage": damage,
    "launched_kills": launched_kills,
}


def play(arena: Arena, kind: str, seed: int) -> list[Happened]:
    """One episode; a ChaosError names its kind and seed, so that it can be repeated."""
    name = f"{kind}_{seed}"
    try:
        return EPISODES[kind](arena, random.Random(f"{kind} {seed}"), name)
    except (ChaosError, OSError) as error:
        raise ChaosError(f"episode {kind} --seed {seed}: {error}") from error


def table(happened: Iterable[Happened]) -> str:
    """attack | what happened | how often | seconds until the next step: median and longest."""
    rows: dict[tuple[str, str], list[float | None]] = {}
    for each in happened:
        rows.setdefault((each.attack, each.outcome), []).append(each.recovery_s)
    lines = ["| attack | times | what happened | recovery, s: median (longest) |", "|---|---|---|---|"]
    for (attack, outcome), seconds in sorted(rows.items()):
        known = sorted(value for value in seconds if value is not None)
        took = f"{known[len(known) // 2]:.1f} ({known[-1]:.1f})" if known else ""
        lines.append(f"| {attack} | {len(seconds)} | {outcome} | {took} |")
    return "\n".join(lines)
