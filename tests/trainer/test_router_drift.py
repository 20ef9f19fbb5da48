"""The drift of routers that rspo reads, against the routers of transformers, on one rank and on several."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Job, run_jobs
from safetensors.torch import save_file
from test_step_oracle import model_at
from train_jobs import drifts
from train_world import NUM_SEQUENCES, TOP_K, World, counted_passes, take_step, training

from megarl.core.types import Rollout

VARIANTS: dict[str, dict[str, Any]] = {replay: {"train__replay": replay} for replay in ("none", "r2", "r3")}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"parallel__ep": 2}),
    "pp2": (2, {"parallel__pp": 2}),
    "cp2": (2, {"parallel__cp": 2}),
    "tp2": (2, {"parallel__tp": 2}),
    "pp4": (4, {"parallel__pp": 4}),
}
"""The second of pp4's stages has no router."""


def log_probs(model: Any, rollout: Rollout, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(ln r [T, L, E], experts in use [T, L, K]); given: experts int64 [T, L, K] to use in all rows but the last."""
    seen, used = [], []

    def see(gate: Any, _: Any, result: Any) -> Any:
        logits, _, experts = result
        if given is not None:
            experts = torch.cat([given[:-1, len(seen)], experts[-1:]])
        scores = logits.softmax(-1).gather(1, experts)
        seen.append(logits.log_softmax(-1))
        used.append(experts)
        return logits, scores / scores.sum(1, keepdim=True), experts

    handles = [layer.mlp.gate.register_forward_hook(see) for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    with torch.no_grad():
        model(torch.as_tensor(rollout.tokens, dtype=torch.int64)[None])
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1), torch.stack(used, 1)


def expected_drift(old: Any, new: Any, rollout: Rollout, replay: str) -> np.ndarray:
    """[T], 0 for the first token; replay as ``train.replay``."""
    assert rollout.routed_experts is not None
    given = torch.as_tensor(rollout.routed_experts.astype(np.int64)) if replay == "r3" else None
    before, experts = log_probs(old, rollout, given)
    after, _ = log_probs(new, rollout, experts if replay == "r2" else given)
    moved = (after.gather(2, experts) - before.gather(2, experts)).abs().mean((1, 2))
    assert experts.shape[2] == TOP_K
    return np.concatenate([[0.0], moved[:-1].numpy()])


@pytest.fixture(scope="module")
def alone(world: World) -> dict[str, Any]:
    return drifts(world, VARIANTS)


@pytest.mark.parametrize("replay", VARIANTS)
def test_acceptance_the_drift_is_that_of_the_routers_of_transformers(
    world: World, alone: dict[str, Any], replay: str, tmp_path: Path
) -> None:
    rollouts, found = world.rollouts("fp32"), alone[replay]
    shutil.copytree(world.model, tmp_path / "moved")
    (file,) = (tmp_path / "moved").glob("*.safetensors")
    save_file({name: value.contiguous() for name, value in found["weights"].items()}, file, metadata={"format": "pt"})
    old, new = model_at(world.model), model_at(tmp_path / "moved")
    assert len(found["drift"]) == NUM_SEQUENCES // 2
    for sequence in list(found["drift"])[:4]:
        expected = expected_drift(old, new, rollouts[sequence], replay)
        assert expected[1:].min() > 1e-3
        np.testing.assert_allclose(found["drift"][sequence], expected, rtol=2e-3, atol=2e-5)
    first, second = found["metrics"]
    assert first["router/drift"] == 0.0
    assert second["router/drift"] > 1e-3


@pytest.mark.multirank
def test_acceptance_it_is_the_same_on_several_ranks(
    world: World, alone: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    jobs = [
        Job(name, ranks, "train_jobs:drifts", {"world": world, "variants": {k: v | way for k, v in VARIANTS.items()}})
        for name, (ranks, way) in LAYOUTS.items()
    ]
    ended = run_jobs(jobs, tmp_path_factory.mktemp("drifts"))
    for name, replay in ((name, replay) for name in LAYOUTS for replay in VARIANTS):
        found = ended[name].checked()[replay]["drift"]
        assert found.keys() == alone[replay]["drift"].keys()
        for sequence, drift in found.items():
            # Adam carries float noise of the first update on.
            np.testing.assert_allclose(drift, alone[replay]["drift"][sequence], rtol=0.05, atol=2e-3, err_msg=name)


def test_a_step_takes_one_more_pass_for_each_update_with_moved_weights(world: World) -> None:
    for name, more in (("gmpo", 0), ("rspo", 3)):
        settings = world.settings(train__objective=name, train__mini_batches=4)
        with training(settings) as step, counted_passes() as counts:
            take_step(step, world.rollouts())
        assert len(counts) == 3 + 4 + more
