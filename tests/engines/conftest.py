"""A small Qwen3-MoE with a dense layer, its engine and its oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_engines import local_engine
from rollout_oracle import Oracle
from transformers import AutoModelForCausalLM

from megarl.data.tiny import write_tiny_model
from megarl.engines.local.engine import LocalEngine
from megarl.engines.sglang.fleet import Fleet


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A wide initialisation, so that probabilities, routes and positions all differ visibly.
    return write_tiny_model(
        tmp_path_factory.mktemp("rollout") / "model",
        hidden_size=32,
        num_experts=8,
        expert_width=16,
        dense_layers=(1,),
        max_positions=64,
        initializer_range=0.3,
    )


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Oracle:
    model = AutoModelForCausalLM.from_pretrained(
        model_path, attn_implementation="eager", experts_implementation="eager"
    )
    return Oracle(model.eval())


@pytest.fixture(scope="session")
def engine(model_path: Path) -> LocalEngine:
    """Shared by tests that leave the weights alone."""
    return local_engine(model_path, weight_version=7)


@pytest.fixture(autouse=True)
def _close_fleets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a test leaves running: its keepers would send their weights to a server that other tests use too."""
    started: list[Fleet] = []
    start = Fleet.start
    monkeypatch.setattr(Fleet, "start", lambda fleet, **options: (started.append(fleet), start(fleet, **options))[1])
    yield
    for fleet in started:
        fleet.close()
