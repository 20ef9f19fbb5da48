"""Gradients reduced during the backward pass and weights gathered during the next one change no number of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import Job, run_jobs
from train_world import World

PLAIN: dict[str, Any] = {
    "train__replay": "r3",
    "optim__lr": 0.01,
    "optim__adam_eps": 1e-4,  # the default of 1e-8 makes a step of the rounding in gradients that are almost zero
    "megatron__bucket_size": 2000,
}
OVERLAP: dict[str, Any] = {"megatron__overlap_grad_reduce": True, "megatron__overlap_param_gather": True}
RECOMPUTED = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "ep2 recomputed": (2, {"parallel__ep": 2, **RECOMPUTED}),
    "dp2 vpp": (4, {"parallel__pp": 2, "parallel__vpp": 2}),
    "dp2 tp2": (4, {"parallel__tp": 2}),
}


@pytest.mark.multirank
@pytest.mark.parametrize("name", LAYOUTS)
def test_overlap_changes_no_number(world: World, tmp_path: Path, name: str) -> None:
    """Two steps of old-log-prob pass and two updates, the gradient norms of single samples between them."""
    ranks, layout = LAYOUTS[name]
    variants = {"plain": {**PLAIN, **layout}, "overlap": {**PLAIN, **layout, **OVERLAP}}
    found = run_jobs([Job(name, ranks, "train_jobs:overlapped", {"world": world, "variants": variants})], tmp_path)
    plain, overlap = (found[name].checked()[key] for key in ("plain", "overlap"))
    assert not plain["overlaps"]
    assert overlap["overlaps"]
    for one, two in zip(plain["steps"], overlap["steps"], strict=True):
        for before, after in zip(one.updates, two.updates, strict=True):
            assert after == pytest.approx(before, rel=2e-4, abs=1e-6)  # the norm adds up other shares
    np.testing.assert_allclose(overlap["norms"], plain["norms"], rtol=1e-4)
    for number, (one, two) in enumerate(zip(plain["weights"], overlap["weights"], strict=True)):
        assert one.keys() == two.keys()
        for weight in one:
            np.testing.assert_allclose(two[weight], one[weight], rtol=1e-3, atol=2e-5, err_msg=f"{number} {weight}")
    moved = [np.abs(plain["weights"][1][weight] - plain["weights"][0][weight]).max() for weight in plain["weights"][0]]
    assert min(moved) > 1e-3
