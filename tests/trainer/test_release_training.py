"""The trainer takes the same steps on every release of Megatron-Core: R2, R3, recomputation, checkpoints, two ranks.

One run on 0.16.1 as it was installed is what the others are compared with: the same rollouts and checkpoint, so the
same losses, gradient norms and all other metrics, and the same records of a run that is resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forks import Ended
from release_checks import TRAINED, VARIANTS, prepared, trained
from run_configs import records_of
from train_world import World

pytestmark = [pytest.mark.multirank, pytest.mark.slow(minutes=4)]


def of_run(where: Path) -> list[dict[str, Any]]:
    return records_of(where / "run")


def split(record: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Floating-point numbers, and the rest."""
    numbers = {name: value for name, value in record.items() if isinstance(value, float)}
    return numbers, {name: value for name, value in record.items() if name not in numbers}


@pytest.fixture(scope="module")
def unpatched(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Ended], list[dict[str, Any]]]:
    where = tmp_path_factory.mktemp("installed") / "jobs"
    return trained(None, world, where)[0], of_run(where)


@pytest.mark.parametrize("version", TRAINED)
def test_the_trainer_takes_the_same_steps_on_every_release(
    version: str, world: World, unpatched: tuple[dict[str, Ended], list[dict[str, Any]]], tmp_path: Path
) -> None:
    expected, records = unpatched
    found, _ = trained(prepared(version, tmp_path / "packages"), world, tmp_path / "jobs")
    for name in VARIANTS:
        one, two = expected[name].checked()[name], found[name].checked()[name]
        assert len(two.updates) == 2
        assert two.updates == [pytest.approx(update, rel=1e-5, abs=1e-7) for update in one.updates]
        assert two.step == pytest.approx(one.step, rel=1e-5, abs=1e-7)
    for name in ("run", "resumed"):
        found[name].checked()
    assert "resumed from" in found["resumed"].output
    same = of_run(tmp_path / "jobs")
    assert [(r["kind"], r["step"], r["minibatch"]) for r in same if r["kind"] == "step"] == [
        ("step", step, None) for step in (1, 2, 3)
    ]
    assert len(same) == len(records)
    for record, one in zip(same, records, strict=True):
        (numbers, rest), (found_numbers, found_rest) = split(one), split(record)
        assert found_numbers == pytest.approx(numbers, rel=1e-5, abs=1e-7)
        assert found_rest == rest
