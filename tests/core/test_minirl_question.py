"""A tiny run of the tool of docs/minirl_question.md."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megarl.core.objectives import OBJECTIVES

TOOL = Path(__file__).parents[2] / "tools" / "minirl_question.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minirl_question", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["minirl_question"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_runs_have_denominators_of_their_own(tool: ModuleType) -> None:
    setup = tool.Setup(length=4)
    generator = torch.Generator().manual_seed(0)
    theta, old, mu = (torch.rand(5, 80, generator=generator).clamp(min=0.01).log() for _ in range(3))
    advantages = torch.randn(5, 80, generator=generator)
    columns = {"logprobs": theta, "old_logprobs": old, "rollout_logprobs": mu, "advantages": advantages}
    found = tool.weigh(setup, OBJECTIVES["minirl"], columns)
    for run in range(5):
        alone = {key: column[run : run + 1] for key, column in columns.items()}
        torch.testing.assert_close(found[run : run + 1], tool.weigh(setup, OBJECTIVES["minirl"], alone))
    w, r = (theta - mu).exp().clamp(max=5), (theta - old).exp()
    dropped = ((advantages > 0) & (r > 1.27)) | ((advantages < 0) & (r < 0.8))
    torch.testing.assert_close(found, torch.where(dropped, 0.0, w * advantages) / 20)


def test_routes_of_the_old_pass_hold_for_all_updates_of_a_batch(tool: ModuleType) -> None:
    """Same first batch and old pass, and other routes from the second update on."""
    setup = tool.Setup(seeds=2, noises=(0.5,), steps=1, lr=0.02)
    start, row = tool.cold_start(setup), OBJECTIVES["minirl"]
    native, recorded, replayed = (tool.train(setup, row, replay, start) for replay in ("none", "r2", "r3"))
    for name in ("reward", "gap", "k3", "flips"):
        torch.testing.assert_close(recorded[name], native[name])
    change = [torch.stack([log["lowest"], log["highest"]]) for log in (native, recorded)]
    assert (change[0] - change[1]).abs().max() > 1e-3
    torch.testing.assert_close(replayed["reward"], native["reward"])
    assert (replayed["k3"] < native["k3"]).all()
