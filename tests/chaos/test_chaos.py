"""A short run of chaos without servers; ``tools/chaos.py`` runs longer. And: the harness notices what it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from chaos_world import MARK, ChaosError, Run
from episodes import Arena, play, table
from invariants import numbers, require_clean, require_undisturbed, require_whole

pytestmark = [pytest.mark.slow(minutes=2), pytest.mark.multirank]

SHORT = [
    ("kills", 3),
    ("damage", 1),
    ("no_checkpoint_left", 0),
    ("run_files", 4),
    ("full_disk", 3),
    ("partial_kills", 1),
]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    return Arena(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize(("kind", "seed"), SHORT)
def test_an_episode_of_chaos(arena: Arena, kind: str, seed: int) -> None:
    """Again: ``tools/chaos.py --kinds KIND --seed SEED --episodes 1``."""
    happened = play(arena, kind, seed)
    if kind == "full_disk" and not happened:
        pytest.skip("nobody may mount a small disk here")
    assert happened, "nothing was struck"
    print(table(happened))


@pytest.fixture
def finished(arena: Arena) -> Iterator[Run]:
    """The undisturbed run, put back after the test."""
    arena.reference()
    run = arena.run("reference")
    run.starts = 1
    kept = {path: path.read_bytes() for path in (run.folder / "metrics.jsonl", run.folder / "samples.jsonl")}
    yield run
    for path, data in kept.items():
        path.write_bytes(data)


def test_the_harness_notices_a_lost_step_and_a_sample_that_trains_twice(arena: Arena, finished: Run) -> None:
    require_whole(finished)
    log = finished.folder / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["step"] != 3))
    with pytest.raises(ChaosError, match="metrics of steps"):
        require_whole(finished)
    log.write_text("".join(lines))
    samples = finished.folder / "samples.jsonl"
    text = samples.read_text()
    first = next(line for line in text.splitlines() if '"step": 1,' in line)
    samples.write_text(text + first.replace('"step": 1,', '"step": 7,') + "\n")
    with pytest.raises(ChaosError, match="the audit of samples"):
        require_whole(finished)


def test_the_harness_notices_other_numbers(arena: Arena, finished: Run) -> None:
    reference = numbers(finished.folder)
    assert require_undisturbed(finished, reference) == "lost nothing"
    key = next(key for key, value in reference[-1].items() if isinstance(value, float))
    other = [*reference[:-1], reference[-1] | {key: reference[-1][key] + 1e-7}]
    with pytest.raises(ChaosError, match="other numbers"):
        require_undisturbed(finished, other)


def test_the_harness_notices_what_is_left(arena: Arena, finished: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    require_clean(finished)
    left = finished.folder / "checkpoints" / "step_0000009.partial"
    left.mkdir()
    with pytest.raises(ChaosError, match="temporary files are left"):
        require_clean(finished)
    left.rmdir()
    words = [sys.executable, "-c", "input()"]
    with subprocess.Popen(words, env={**os.environ, MARK: str(finished.folder)}, stdin=subprocess.PIPE) as process:
        monkeypatch.setattr("invariants.ENDING_S", 0.1)
        with pytest.raises(ChaosError, match="processes are left"):
            require_clean(finished)
        process.kill()
    require_clean(finished)


def test_a_failed_episode_names_its_seed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ChaosError("lost")

    monkeypatch.setitem(sys.modules["episodes"].EPISODES, "kills", fails)
    with pytest.raises(ChaosError, match="episode kills --seed 12: lost"):
        play(arena, "kills", 12)
