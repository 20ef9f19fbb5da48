from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from megarl.data.judge import Judge

if TYPE_CHECKING:
    from train_world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model, its task, and rollouts of a whole step; made once."""
    from train_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module", autouse=True)
def _close_judges() -> Iterator[None]:
    """End the workers of trainers and samplers that a file does not close: tests of other files count processes."""
    made: list[Judge] = []
    make = Judge.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "__init__", lambda judge, *a, **more: (make(judge, *a, **more), made.append(judge))[0])
        yield
    for judge in made:
        judge.close()


SHARES_GROUPS = {
    "test_step",
    "test_old_pass",
    "test_step_oracle",
    "test_masked_tokens",
    "test_sampler",
    "test_adaptive_sampling",
    "test_gradient_norms",
}
"""Modules whose tests enter and leave by ``train_world.layout``, which keeps the groups of a lone rank."""


@pytest.fixture(autouse=True)
def process_groups(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of whole runs begin and end without process groups."""
    if request.module.__name__ in SHARES_GROUPS:
        yield
        return
    _leave_groups()
    yield
    _leave_groups()


def _leave_groups() -> None:
    if "megarl.megatron.distributed" in sys.modules:
        from megarl.megatron import distributed

        distributed.shutdown()
