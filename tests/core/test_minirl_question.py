"""Facts about anchors of a mask that the experiment of docs/minirl_question.md rests on, and a tiny run of its tool."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from megarl.core.objectives import OBJECTIVES, Mask, Objective, TokenColumns, coefficients

ROWS = ("minirl", "dppo_tv", "dppo_kl", "minimal_mask")
TOOL = Path(__file__).parents[2] / "tools" / "minirl_question.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minirl_question", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["minirl_question"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchored(name: str, anchor: str) -> Objective:
    """Return a row with its mask on theta and this policy."""
    row = OBJECTIVES[name]
    masks = tuple(replace(mask, policies=f"theta_{anchor}") for mask in row.masks if isinstance(mask, Mask))
    return replace(row, masks=masks)


def values(objective: Objective, theta: Tensor, old: Tensor, mu: Tensor, advantages: Tensor) -> Tensor:
    mask, bounds = torch.ones(len(theta), dtype=torch.bool), torch.tensor([0, len(theta)])
    return coefficients(objective, TokenColumns(theta, old, mu, advantages, mask, bounds)).values


def draw(count: int = 400) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of three policies that lie apart, and advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    theta, old, mu = (torch.rand(count, generator=generator).clamp(min=0.01).log() for _ in range(3))
    return theta, old, mu, torch.randn(count, generator=generator)


@pytest.mark.parametrize("name", ROWS)
def test_anchors_are_equal_exactly_where_the_engines_are(name: str) -> None:
    theta, old, mu, advantages = draw()
    at_mu, at_old = anchored(name, "mu"), anchored(name, "old")
    equal = values(at_mu, theta, mu, mu, advantages)
    assert torch.equal(equal, values(at_old, theta, mu, mu, advantages))
    assert (equal == 0).any()
    assert (equal != 0).any()
    assert not torch.equal(values(at_mu, theta, old, mu, advantages), values(at_old, theta, old, mu, advantages))


@pytest.mark.parametrize("name", ROWS)
def test_a_mask_anchored_at_old_drops_nothing_in_the_first_update(name: str) -> None:
    theta, _, mu, advantages = draw()
    assert ((theta - mu).exp() > 5).any(), "the gap is large"
    weight = (theta - mu).exp()
    weight = weight.clamp(max=5.0) if name == "minirl" else weight
    found = values(anchored(name, "old"), theta, theta, mu, advantages)
    torch.testing.assert_close(found, weight * advantages)
    assert (values(anchored(name, "mu"), theta, theta, mu, advantages) == 0).any()


def test_runs_have_denominators_of_their_own(tool: ModuleType) -> None:
    setup = tool.Setup(length=4)
    theta, old, mu, advantages = (column.view(5, 80) for column in draw())
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
