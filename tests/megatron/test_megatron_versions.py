"""The same tests of replay, and the example, on every release of Megatron-Core that megarl runs on.

A release is installed beside the environment, without its dependencies; a copy of it is patched and comes first on the
path of a pytest of its own. Releases before 0.16 run the example alone: the tests build models as the trainer does.
``tools/version_matrix.py`` runs more, and writes docs/version_matrix.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_releases import installed
from release_checks import (
    NEWER,
    OLDER,
    PATCHED,
    RELEASES,
    REPLAY_TESTS,
    prepared,
    routes_alike,
    run_example,
    run_tests,
)

pytestmark = [pytest.mark.multirank, pytest.mark.slow(minutes=3)]

SEMANTICS = (
    "megatron/test_megatron_replay_semantics.py",
    "megatron/test_megatron_newer.py",
    "megatron/test_megatron_exempt_layers.py",
    "verify/test_watch.py",
)
"""Of the newest, whose hook is Megatron's own; test_release_training.py replays on those before it."""


@pytest.fixture(scope="module", params=[version for version in RELEASES if version not in NEWER[:-1]])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a release, and the folder with its patched copy."""
    return request.param, prepared(request.param, tmp_path_factory.mktemp("release") / "packages")


def test_without_an_object_in_the_hook_routing_is_that_of_the_unpatched_release(release: tuple[str, Path]) -> None:
    version, folder = release
    file = "megatron/core/transformer/moe/moe_utils.py"
    assert ((installed(version) / file).read_bytes() != (folder / file).read_bytes()) == (version in PATCHED)
    if version in PATCHED:
        assert routes_alike(version, folder) == 20


def test_replay_works_unchanged_with_another_release(release: tuple[str, Path]) -> None:
    version, folder = release
    if version in OLDER:
        return
    done = run_tests(folder, SEMANTICS if version in NEWER else REPLAY_TESTS)
    assert done.status == 0, done.output[-3000:]
    assert done.passed > (16 if version in NEWER else 45)
    assert " skipped" not in done.output


def test_the_example_replays_on_two_ranks_with_recomputation(release: tuple[str, Path]) -> None:
    version, folder = release
    if version in OLDER:
        done = run_example(folder, "--replay", "r3", "--tp", "2", "--recompute")
        assert done.status == 0, done.output[-3000:]
        assert "r3 held" in done.output
