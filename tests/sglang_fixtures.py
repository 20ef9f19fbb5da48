"""Fixtures around a real SGLang server; the conftest.py beside the tests makes them known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.data.tiny import write_tiny_model
from megarl.rollout.sglang_server import Server, ServerSpec

START_DEADLINE_S = 300.0
"""A start is 20 s of imports on an idle machine and minutes on a busy one."""


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter of the pinned environment; tests fail where it is missing, for skipping would hide them."""
    python = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
    if not python.exists():
        pytest.fail(f"found no SGLang environment at {python}: run `make sglang-cpu`")
    return python


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts in every layer (SGLang's Qwen3-MoE knows no dense ones) and routes that differ."""
    path = tmp_path_factory.mktemp("sglang") / "model"
    return write_tiny_model(path, hidden_size=64, num_experts=8, expert_width=32, initializer_range=0.3)


@pytest.fixture(scope="session")
def sglang_spec(sglang_python: Path, sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    log_file = tmp_path_factory.mktemp("sglang") / "server.log"
    return ServerSpec(sglang_model, sglang_python, dtype="float32", log_file=log_file, max_total_tokens=8192)


@pytest.fixture(scope="session")
def sglang_server(sglang_spec: ServerSpec) -> Iterator[Server]:
    """One running fp32 server, shared by the tests that leave it as it was."""
    with Server(sglang_spec) as server:
        server.wait_ready(START_DEADLINE_S)
        yield server
