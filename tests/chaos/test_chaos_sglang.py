"""A short run of chaos with a real SGLang server behind a lying proxy, and with a run's own servers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from episodes import Arena, table
from server_episodes import SERVER_EPISODES

from megarl.rollout.sglang.server import Server

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=2)]


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory, updated_server: Server, hostile_model: Path) -> Arena:
    arena = Arena(tmp_path_factory.mktemp("chaos"), hostile_model)
    arena.server = updated_server
    return arena


@pytest.mark.parametrize("kind", list(SERVER_EPISODES))
def test_an_episode_of_chaos_with_a_server(arena: Arena, kind: str) -> None:
    print(table(SERVER_EPISODES[kind](arena, random.Random(f"{kind} 0"), kind)))
