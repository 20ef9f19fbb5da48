"""A short run of chaos; ``tools/chaos.py`` runs longer. And: the harness notices what it must."""

from __future__ import annotations

import json

import pytest
from chaos_world import ChaosError
from episodes import Arena, play, table
from invariants import numbers, require_clean, require_undisturbed, require_whole

pytestmark = [pytest.mark.slow(minutes=2), pytest.mark.multirank]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    return Arena(tmp_path_factory.mktemp("chaos"))


@pytest.mark.parametrize(("kind", "seed"), [("kills", 3), ("damage", 1)])
def test_an_episode_of_chaos(arena: Arena, kind: str, seed: int) -> None:
    """Again: ``tools/chaos.py --kinds KIND --seed SEED --episodes 1``."""
    happened = play(arena, kind, seed)
    assert happened, "nothing was struck"
    print(table(happened))


def test_the_harness_notices_a_lost_step_a_sample_that_trains_twice_other_numbers_and_what_is_left(
    arena: Arena,
) -> None:
    reference, run = arena.reference(), arena.run("reference")
    run.starts = 1
    require_clean(run)
    assert require_undisturbed(run, reference) == "lost nothing"
    log, samples = run.folder / "metrics.jsonl", run.folder / "samples.jsonl"
    kept, text = log.read_text(), samples.read_text()
    key = next(key for key, value in reference[-1].items() if isinstance(value, float))
    other = [*reference[:-1], reference[-1] | {key: reference[-1][key] + 1e-7}]
    with pytest.raises(ChaosError, match="other numbers"):
        require_undisturbed(run, other)
    log.write_text("".join(line for line in kept.splitlines(keepends=True) if json.loads(line)["step"] != 3))
    with pytest.raises(ChaosError, match="metrics of steps"):
        require_whole(run)
    log.write_text(kept)
    assert numbers(run.folder) == reference
    first = next(line for line in text.splitlines() if '"step": 1,' in line)
    samples.write_text(text + first.replace('"step": 1,', '"step": 7,') + "\n")
    with pytest.raises(ChaosError, match="the audit of samples"):
        require_whole(run)
    samples.write_text(text)
    (run.folder / "checkpoints" / "step_0000009.partial").mkdir()
    with pytest.raises(ChaosError, match="temporary files are left"):
        require_clean(run)
    (run.folder / "checkpoints" / "step_0000009.partial").rmdir()
