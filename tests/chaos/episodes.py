"""Episodes of chaos: each is one run, struck at random moments, started again until it ends, and checked.

An episode follows from its seed, but for the timing of processes. ``EPISODES`` names the kinds; each is a function that
returns what happened, one ``Happened`` per attack. A ``ChaosError`` says what does not hold.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attacks
import chaos_parts
from chaos_world import STEPS, ChaosError, Run, World
from invariants import (
    numbers,
    require,
    require_clean,
    require_explained,
    require_undisturbed,
    require_whole,
    steps_of,
)

if TYPE_CHECKING:
    from megarl.engines.sglang.server import Server

STOPPED, BAD_INPUT = 75, 2
MOST_STARTS = 25
FEW_LIES = 5
"""Responses are short here; so few of them may stay within the limits of the tripwires."""


@dataclass(frozen=True)
class Happened:
    """An attack and what came of it."""

    attack: str
    outcome: str
    recovery_s: float | None = None
    """From the attack until the run had finished one more step than before."""
    times: int = 1


class Arena:
    """A world, the numbers of its undisturbed run, and a folder per episode."""

    server: Server
    """Set for the episodes that need one."""

    def __init__(self, root: Path, model: Path | None = None) -> None:
        self.world = World.made(root, model)
        self._references: dict[tuple[bool, bool], list[dict[str, Any]]] = {}

    def reference(self, launched: bool = False, partial: bool = False) -> list[dict[str, Any]]:
        """The records of a run that nothing happened to; it is checked as any other."""
        if (launched, partial) not in self._references:
            run = self.run("reference" + "_launched" * launched + "_partial" * partial, launched, partial)
            run.start()
            require(run.until_end() == 0, "the undisturbed run failed", run)
            require_clean(run)
            require_whole(run)
            self._references[launched, partial] = numbers(run.folder)
        return self._references[launched, partial]

    def run(self, name: str, launched: bool = False, partial: bool = False, **tables: dict[str, Any]) -> Run:
        if launched:
            tables = {"launch": {"ranks_per_node": 2}, "parallel": {"ep": 2}, **tables}
        if partial:
            tables = {"rollout": {"max_staleness": 2}, "environment": {"function": None}, **tables}
        return Run(self.world, self.world.settings(self.world.root / name, **tables), launched, partial)


def finish(arena: Arena, run: Run) -> str:
    """Start the run until it has come to its end; check everything; say what it has lost."""
    finish_whole(run)
    return require_undisturbed(run, arena.reference(run.launched, run.partial))


def finish_whole(run: Run) -> None:
    """The same without a look at the numbers, which depend on timing with servers."""
    while (code := run.until_end()) != 0:
        require_explained(run)
        require(code in (STOPPED, BAD_INPUT, 1) or code < 0, f"ended with code {code}", run)
        require(run.starts < MOST_STARTS, "does not come to its end", run)
        run.start()
    require_explained(run)
    require_clean(run)
    require_whole(run)


def _await_progress(run: Run, step: int) -> str:
    """Start the run again if it ends, until it has finished more steps than ``step``; how it came back."""
    back = "went on"
    while not run.until(lambda: run.step > step or run.step == STEPS, f"a step after {step}"):
        code = run.code
        if code == 0:
            break
        require_explained(run)
        require(run.starts < MOST_STARTS, "does not come to its end", run)
        require(_soon_gone(run), "processes of the ended run are left", run)
        back = "saved itself and went on when started again" if code == STOPPED else "went on when started again"
        run.start()
    if back == "went on" and "starting it again" in run.said():
        back = "the launcher started it again"
    return back


def _soon_gone(run: Run, patience_s: float = 60.0) -> bool:
    """Whether the processes of a run that has ended end too."""
    until = time.monotonic() + patience_s
    while run.left():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def kills(
    arena: Arena, rng: random.Random, name: str, launched: bool = False, partial: bool = False, strikes: int = 3
) -> list[Happened]:
    """Signals to processes of every kind."""
    arena.reference(launched, partial)
    saving = {"every": rng.choice([1, 2]), "asynchronous": rng.random() < 0.7}
    run = arena.run(name, launched, partial, checkpoint=saving)
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
    name = rng.choice(list(attacks.SIGNALS))
    kinds = [kind for kind in attacks.PROCESSES if kind not in ("background saver", "sandbox")]
    wanted = rng.choice([*attacks.PROCESSES, "background saver", "sandbox"])
    while run.code is None:
        if struck := attacks.signal_one(run, wanted, name, rng):
            return struck
        if wanted in kinds or run.step >= STEPS - 1:
            wanted = rng.choice(kinds)
        time.sleep(0.005)
    return None


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


def _checkpoints(run: Run) -> list[Path]:
    return sorted(run.folder.glob("checkpoints/step_???????"))


def _damage_one(run: Run, rng: random.Random) -> Happened:
    """Damage a file of the newest checkpoint, start the run, and see that it goes on from an older one and says so."""
    *older, newest = _checkpoints(run)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    path, how = rng.choice(files), rng.choice([*attacks.DAMAGES, "of another step"])
    if how == "of another step" and not attacks.exchange(path, older[-1]):
        how = "removed"
    if how in attacks.DAMAGES:
        attacks.DAMAGES[how](path, rng)
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


def no_checkpoint_left(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """Every checkpoint is damaged: the run must stop, and name the cause and the way out."""
    run = arena.run(name)
    run.start()
    run.until(lambda: len(_checkpoints(run)) >= 2, "two checkpoints")
    run.kill_all()
    for checkpoint in _checkpoints(run):
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
        attacks.DAMAGES[rng.choice(["one bit flipped", "truncated", "removed"])](rng.choice(files), rng)
    run.start()
    code = run.until_end()
    require_explained(run)
    require(code > 0, f"ended with code {code}, expected an error", run)
    for checkpoint in _checkpoints(run):
        require(str(checkpoint) in run.said(), f"the sentence does not name {checkpoint}", run)
    run.remove()
    return [Happened("a file of every checkpoint damaged", "stopped with a sentence")]


RUN_FILES = ("status.json", "config.toml", "ranks/00000.json", "lock", "run_id", "metrics.jsonl", "samples.jsonl")


def run_files(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """A power cut, and another file of the run folder that is not what was written."""
    arena.reference()
    run = arena.run(name)
    happened = []
    run.start()
    for _ in range(3):
        wanted = min(run.step + 1, STEPS - 1)
        run.until(lambda wanted=wanted: run.step >= wanted and bool(_checkpoints(run)), f"step {wanted}")
        run.kill_all()
        path = run.folder / rng.choice([file for file in RUN_FILES if (run.folder / file).is_file()])
        backup = path.read_bytes()
        if path.suffix == ".jsonl":  # what a power cut may leave: half of a line that no checkpoint needs
            how = "half a line appended"
            path.write_bytes(backup + backup.splitlines()[-1][: rng.randrange(1, 40)])
        else:
            how = rng.choice(["truncated", "emptied", "zeroes", "garbage"])
            if not backup:
                how = "garbage"
            attacks.DAMAGES[how](path, rng)
        run.start()
        code = None
        if not run.until(lambda: "resumed from" in run.said(), "the resumption"):
            code = run.code
        if code is None:
            outcome = "went on"
        else:
            require_explained(run)
            require(path.name in run.said(), f"{path} ({how}) ended the run, and the sentence does not name it", run)
            path.write_bytes(backup)
            run.start()
            outcome = "stopped with a sentence, went on with the file put back"
        happened.append((f"{path.name}: {how}", outcome))
    lost = finish(arena, run)
    run.remove()
    return [Happened(attack, f"{outcome}; {lost}") for attack, outcome in happened]


def full_disk(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """A disk that is full for a while, or for good until the run is started again."""
    arena.reference()
    run = arena.run(name)
    with attacks.small_disk(run.folder, "32m") as mounted:
        happened = _fill(arena, run, rng) if mounted else []
    run.remove()
    return happened


def _fill(arena: Arena, run: Run, rng: random.Random) -> list[Happened]:
    happened = []
    run.start()
    for _ in range(2):
        wanted = min(run.step + 1, STEPS - 1)
        if not run.until(lambda wanted=wanted: run.step >= wanted, f"step {wanted}"):
            break
        spare, for_good = rng.choice([0, 0, 1000, 20_000, 300_000]), rng.random() < 0.5
        began, step = time.monotonic(), run.step
        with attacks.full(run.folder, spare):
            seconds = 60.0 if for_good else rng.uniform(0.3, 3.0)
            while run.code is None and time.monotonic() < began + seconds:
                time.sleep(0.02)
            ended = run.code
        attack = f"disk full but for {spare} bytes, {'until the run ends' if for_good else 'for a while'}"
        if ended not in (None, 0):
            require_explained(run)
            # torch's writer hides the cause behind a wrong position; the free space is said then.
            is_named = any(words in run.said() for words in ("No space left", "a full disk", " GiB are free in "))
            require(is_named, "a full disk ended the run, and the sentence does not say so", run)
            outcome = "stopped with a sentence, went on when started again"
            run.start()
        else:
            outcome = "went on"
        back = _await_progress(run, step)
        happened.append((attack, outcome if back == "went on" else back, time.monotonic() - began))
    lost = finish(arena, run)
    return [Happened(attack, f"{outcome}; {lost}", seconds) for attack, outcome, seconds in happened]


def lies(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """An engine that returns well-formed rollouts which are wrong."""
    run = arena.run(name, rollout={"engine": "chaos_parts:liar"})
    lie = rng.choice([*chaos_parts.LIES, *chaos_parts.WEIGHT_LIES])
    share = 1.0 if lie in chaos_parts.WEIGHT_LIES else rng.choice([0.1, 0.3, 1.0])
    first = rng.randrange(0, 3)
    told = {"lie": lie, "share": share, "steps": list(range(first, first + rng.choice([1, 2, 4]))), "seed": name}
    ledger = run.scratch / "ledger.jsonl"
    run.scratch.mkdir()
    (run.scratch / "lies.json").write_text(json.dumps(told | {"ledger": str(ledger)}))
    run.environment = {chaos_parts.LIES_VARIABLE: str(run.scratch / "lies.json")}
    run.start()
    code = run.until_end()
    require_explained(run)
    told_lies = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    if not told_lies:  # few responses at a small share
        require(code == 0, f"ended with code {code} although the engine told no lie", run)
        return []
    steps = {version + 1 for version, *_ in told_lies}
    dropped = {record["step"]: record.get("tripwires/dropped", 0.0) for record in steps_of(run)}
    named = any(words in run.said() for words in ("responses dropped", "is not what was sent as version"))
    outcome = "stopped with the figures" if code else "dropped and counted"
    caught = sum(dropped.get(step, 0.0) for step in steps)
    if not code and not caught and len(told_lies) < FEW_LIES:
        outcome = "too few tokens for the limits: seen in the step line alone"
    else:
        require(named and (code or caught), f"{len(told_lies)} lies ({lie}) in steps {sorted(steps)} have trained", run)
    require_clean(run)
    run.remove()
    return [Happened(f"{lie}, {share:.0%} of the sequences", outcome)]


def launched_kills(arena: Arena, rng: random.Random, name: str) -> list[Happened]:
    """Signals to launcher, torchrun and two ranks."""
    return kills(arena, rng, name, launched=True, strikes=2)


Episode = Callable[[Arena, random.Random, str], list[Happened]]
EPISODES: dict[str, Episode] = {
    "kills": kills,
    "damage": damage,
    "no_checkpoint_left": no_checkpoint_left,
    "run_files": run_files,
    "full_disk": full_disk,
    "lies": lies,
    "launched_kills": launched_kills,
    "partial_kills": partial(kills, partial=True),
}


def play(arena: Arena, kind: str, seed: int, episodes: dict[str, Episode] = EPISODES) -> list[Happened]:
    """One episode; a ChaosError names its kind and seed, so that it can be repeated."""
    name = f"{kind}_{seed}"
    try:
        return episodes[kind](arena, random.Random(f"{kind} {seed}"), name)
    except (ChaosError, OSError) as error:
        raise ChaosError(f"episode {kind} --seed {seed}: {error}") from error


def table(happened: Iterable[Happened]) -> str:
    """attack | what happened | how often | seconds until the next step: median and longest."""
    rows: dict[tuple[str, str], list[float | None]] = {}
    for each in happened:
        rows.setdefault((each.attack, each.outcome), []).extend([each.recovery_s] * each.times)
    lines = ["| attack | times | what happened | recovery, s: median (longest) |", "|---|---|---|---|"]
    for (attack, outcome), seconds in sorted(rows.items()):
        known = sorted(value for value in seconds if value is not None)
        took = f"{known[len(known) // 2]:.1f} ({known[-1]:.1f})" if known else ""
        lines.append(f"| {attack} | {len(seconds)} | {outcome} | {took} |")
    return "\n".join(lines)
