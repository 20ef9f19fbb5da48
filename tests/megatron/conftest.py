from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import Case, Outcome, launch


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny checkpoints by name."""
    from tiny_world import write_models

    return write_models(tmp_path_factory.mktemp("tiny") / "models")


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Outcome]:
    """Launches the cases of all selected tests of a file when the first outcome is read."""
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
        and "case" in item.callspec.params
    ]
    outcomes: dict[Case, Outcome] = {}

    def outcome_of(case: Case) -> Outcome:
        if case not in outcomes:
            folder = tmp_path_factory.mktemp("ranks")
            (folder / "models").symlink_to(next(iter(models.values())).parent)
            outcomes.update(launch(list(dict.fromkeys(wanted)), folder / "run"))
        return outcomes[case]

    return outcome_of


@pytest.fixture
def outcome(case: Case, launched: Callable[[Case], Outcome]) -> Any:
    """What the case of this test returned on rank 0; fails with the traceback of the ranks."""
    found = launched(case)
    if found.error is not None:
        pytest.fail(found.error, pytrace=False)
    return found.value


@pytest.fixture
def one_rank() -> None:
    """Marks a test that uses Megatron in this process: they share the groups of its one rank (``tiny_world.join``)."""


@pytest.fixture
def world(models: dict[str, Path], one_rank: None) -> Any:
    """The base model on one rank with the fixed batch and its routes."""
    from cases_replay import World

    return World(models["base"])


@pytest.fixture
def in_model_folder(monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], one_rank: None) -> None:
    """Case functions find the checkpoints below the working directory, here as on the launched ranks."""
    monkeypatch.chdir(models["base"].parent.parent)
