"""How often the host waits for the GPU: budgets of the loss, of the log-probabilities and of a training step."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from null_gpu.counting import host_waits

from megarl.core.choices.parts import NON_NEGATIVE_ADVANTAGES
from megarl.core.devices import HostCopies, to_device
from megarl.core.measures import mismatch_metrics, surrogate_metrics
from megarl.core.metrics import finalize, merge, to_host
from megarl.core.objectives import (
    OBJECTIVES,
    BatchFacts,
    Denominators,
    TokenColumns,
    TopK,
    coefficients,
)
from megarl.errors import NumericsError

pytestmark = pytest.mark.gate
LENGTHS = [5, 1, 9, 7, 4]
DENOMINATORS = Denominators(100, 20)


def columns_on(device: str) -> TokenColumns:
    rng = np.random.default_rng(0)
    size = sum(LENGTHS)
    logprobs = -rng.random((4, size)).astype(np.float32) - 0.1
    loss_mask = rng.random(size) < 0.8
    given = [*map(torch.from_numpy, logprobs), torch.from_numpy(rng.normal(size=size).astype(np.float32))]
    theta, old, mu, ref, advantages = (column.to(device) for column in given)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = torch.from_numpy(loss_mask).to(device)
    topk = TopK((mu - 1)[:, None], (theta - 1)[:, None], mask & (mu < 0))
    drift = torch.from_numpy(rng.random(size, np.float32) * 0.3).to(device)
    return TokenColumns(theta, old, mu, advantages, mask, bounds.to(device), ref, topk, router_drift=drift)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_the_loss_of_every_objective_waits_once_and_is_that_of_the_cpu(computing: None, name: str) -> None:
    objective = OBJECTIVES[name]
    columns, of_cpu = columns_on("cuda"), columns_on("cpu")
    if objective.advantage in NON_NEGATIVE_ADVANTAGES:
        columns, of_cpu = (replace(one, advantages=one.advantages.abs()) for one in (columns, of_cpu))
    exponents = tuple(0.5 if factor.fn == "adaptive_power" else None for factor in objective.factors)
    bounds = tuple(0.01 if mask.scope == "batch_mean" else None for mask in objective.records)
    facts = BatchFacts(exponents, (None,) * len(exponents), bounds, DENOMINATORS)
    with host_waits() as waits:
        found = coefficients(objective, columns, DENOMINATORS, facts=facts)
    assert len(waits) == 1, waits
    wanted = coefficients(objective, of_cpu, DENOMINATORS, facts=facts)
    torch.testing.assert_close(found.values.cpu(), wanted.values, rtol=1e-5, atol=1e-7)
    assert finalize(to_host(found.metrics)) == pytest.approx(finalize(wanted.metrics), rel=1e-5, abs=1e-7)


def test_metrics_stay_on_the_device_until_they_are_read_at_once(computing: None) -> None:
    one = columns_on("cuda")
    policies = one.logprobs, one.old_logprobs, one.rollout_logprobs
    with host_waits() as waits:
        parts = [surrogate_metrics(*policies, one.loss_mask, one.cu_seqlens) for _ in range(3)]
        parts += [mismatch_metrics(*policies[1:], one.loss_mask, one.cu_seqlens)]
        merged = merge(parts)
    assert waits == []
    with host_waits() as waits:
        read = to_host(merged)
    assert len(waits) == 1
    assert finalize(read) == pytest.approx(finalize(merged))


@pytest.mark.parametrize(
    ("column", "value"), [("logprobs", torch.nan), ("old_logprobs", 1.0), ("advantages", torch.inf)]
)
def test_values_that_are_not_admissible_are_still_errors(computing: None, column: str, value: float) -> None:
    columns = columns_on("cuda")
    token = int(columns.loss_mask.nonzero()[2])
    getattr(columns, column)[token] = value
    with pytest.raises(NumericsError, match=f"{column} is .* at token {token}"):
        coefficients(OBJECTIVES["gspo"], columns, DENOMINATORS)


def test_copies_to_the_device_and_back_are_waited_for_once(computing: None) -> None:
    host = [torch.arange(5.0), torch.ones(3, 4, dtype=torch.bfloat16), torch.tensor([True, False])]
    with host_waits() as waits:
        there = [to_device(one, "cuda") for one in host]
    assert waits == []
    copies = HostCopies()
    for _ in range(2):  # the second time in the same memory
        addresses = [one.data_ptr() for one in copies._copies]
        with host_waits() as waits:
            copies.park(there)
        assert len(waits) <= 1, waits
        assert all(one.is_pinned() and torch.equal(one, given) for one, given in zip(there, host, strict=True))
        assert addresses in ([], [one.data_ptr() for one in there])
        there = [to_device(one, "cuda") for one in there]
        assert all(torch.equal(one.cpu(), given) for one, given in zip(there, host, strict=True))


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
    from tiny_world import write_models

    models = write_models(tmp_path_factory.mktemp("waits") / "models")["base"].parent
    script = Path(__file__).with_name("waits_of_a_step.py")
    done = subprocess.run([sys.executable, str(script), str(models)], capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_waits_as_rarely_as_it_can(waits: dict[str, Any]) -> None:
    found = {file for file in waits["old"]["megarl"] if file.startswith(("replay/", "megatron/rollout_routes"))}
    assert found == {"megatron/rollout_routes.py"}
    assert waits["prepare"]["megarl"] == {"trainer/mini_batch.py": 1}  # for the denominators over ranks
    # For the tokens that replay compares, the gap of each sequence, and the experts that both engines chose.
    assert sum(waits["old"]["megarl"].values()) == 3, waits["old"]
    update = waits["update"]
    assert waits["micro_batches"] == 3
    assert update["megarl"] == {"core/devices.py": 1}  # all checks together
    assert update["megatron"]["clip_grads.py"] == 1
    # Without Transformer Engine, Megatron's rotary embedding and permutation wait in every layer, and its norm for
    # every parameter.
    assert set(update["megatron"]) == {"clip_grads.py", "utils.py", "rope_utils.py", "moe_utils.py"}
    assert waits["metrics"]["megarl"]["core/metrics.py"] == 1
    assert sum(waits["offload"]["megarl"].values()) <= 1
    assert waits["reload"]["megarl"] == {}
