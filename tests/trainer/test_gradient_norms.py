"""Gradient norms of single samples against transformers and autograd, in every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Job, run_jobs
from megatron.core.transformer.moe.router import TopKRouter
from test_step_oracle import logprobs_of, model_at
from train_jobs import BLOCKS, Case, case_training, norms, steps_around, tied_model
from train_world import World, training

from megarl.core.types import Rollout
from megarl.errors import NumericsError
from megarl.trainer.sampling.gradient_norms import gradient_norms

NUM = 5
REPLAYED: dict[str, Any] = {"train__replay": "r3"}
RECOMPUTED = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
UNTIED = {
    "tp2": Case({"parallel__tp": 2}, (NUM,)),
    "pp2": Case({"parallel__pp": 2}, (NUM,)),
    "cp2": Case({"parallel__cp": 2}, (NUM,)),
    "ep2": Case({"parallel__ep": 2}, (3, 2)),
    "ep2, none on the second": Case({"parallel__ep": 2}, (NUM, 0)),
    "ep2 allgather": Case({"parallel__ep": 2, "parallel__dispatcher": "allgather"}, (1, 4)),
    "ep2 overlapped": Case({"parallel__ep": 2, "megatron__overlap_grad_reduce": True}, (2, 3)),
    "vpp": Case({"parallel__pp": 2, "parallel__vpp": 2}, (NUM,)),
}
TIED = {
    "tied tp2": Case({"parallel__tp": 2}, (NUM,), tied=True),
    "tied pp2": Case({"parallel__pp": 2}, (NUM,), tied=True),
    "tied cp2": Case({"parallel__cp": 2}, (NUM,), tied=True),
    "tied ep2": Case({"parallel__ep": 2}, (0, NUM), tied=True),
}
R3 = {
    "r3 tp2": Case({**REPLAYED, "parallel__tp": 2}, (NUM,), engine="fp8"),
    "r3 pp2 recomputed": Case({**REPLAYED, **RECOMPUTED, "parallel__pp": 2}, (NUM,), engine="fp8"),
    "r3 cp2": Case({**REPLAYED, "parallel__cp": 2}, (NUM,), engine="fp8"),
    "r3 ep2": Case({**REPLAYED, "parallel__ep": 2}, (4, 1), engine="fp8"),
    "r3 vpp": Case({**REPLAYED, "parallel__pp": 2, "parallel__vpp": 2}, (NUM,), engine="fp8"),
}
ON_FOUR = {
    "tied tp2 pp2": Case({"parallel__tp": 2, "parallel__pp": 2}, (3,), tied=True),
    "r3 cp2 ep2": Case({**REPLAYED, "parallel__cp": 2, "parallel__ep": 2}, (1, 2), engine="fp8"),
}
AROUND = {
    "ep2 overlapped": Case({**UNTIED["ep2 overlapped"].overrides, **REPLAYED}, (2, 1), engine="fp8"),
    "tied pp2": Case({**REPLAYED, "parallel__pp": 2}, (2,), tied=True, engine="fp8", blocks=("output_layer",)),
}


@contextmanager
def _forced(model: Any, rollout: Rollout) -> Iterator[None]:
    """transformers' routers choose the experts of the rollout; where it has no row they choose themselves."""
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    assert rollout.routed_experts is not None
    present = torch.ones(rollout.num_tokens, dtype=torch.bool)
    if rollout.routed_mask is not None:
        present = torch.from_numpy(rollout.routed_mask)
    for column, gate in enumerate(gates):
        given = torch.from_numpy(rollout.routed_experts[:, column].astype(np.int64))

        def forward(hidden: torch.Tensor, gate: Any = gate, given: torch.Tensor = given) -> Any:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.size(-1)), gate.weight)
            shares = logits.softmax(-1)
            chosen = torch.where(present[:, None], given, shares.topk(gate.top_k, -1).indices)
            picked = shares.gather(1, chosen)
            return logits, picked / picked.sum(-1, keepdim=True) if gate.norm_topk_prob else picked, chosen

        gate.forward = forward
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def _oracle(folder: Path, rollouts: Sequence[Rollout], forced: bool = False) -> dict[str, np.ndarray]:
    """By block, one backward pass of plain PyTorch per rollout."""
    model = model_at(folder)
    found: dict[str, list[float]] = {block: [] for block in BLOCKS}
    for rollout in rollouts:
        model.zero_grad()
        with _forced(model, rollout) if forced else torch.enable_grad():
            logprobs_of(model, rollout, 0.9)[torch.from_numpy(rollout.loss_mask)].sum().backward()
        named = dict(model.named_parameters(remove_duplicate=False))
        for block, names in BLOCKS.items():
            found[block].append(sum(float(named[name].grad.double().square().sum()) for name in names) ** 0.5)
    return {block: np.array(values) for block, values in found.items()}


@pytest.fixture(scope="module")
def oracles(world: World) -> dict[str, dict[str, np.ndarray]]:
    return {
        "untied": _oracle(world.model, world.rollouts("fp32")[:NUM]),
        "tied": _oracle(tied_model(world), world.rollouts("fp32")[:NUM]),
        "r3": _oracle(world.model, world.rollouts("fp8")[:NUM], forced=True),
    }


@pytest.fixture(scope="module")
def on_two_ranks(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tied_model(world)
    jobs = [
        Job("norms", 2, "train_jobs:norms", {"world": world, "cases": UNTIED | TIED | R3}),
        Job("around", 2, "train_jobs:steps_around", {"world": world, "cases": AROUND}),
    ]
    return {name: ended.checked() for name, ended in run_jobs(jobs, tmp_path_factory.mktemp("norms")).items()}


def _same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for block in BLOCKS:
        assert (expected[block] > 1e-3).all()
        np.testing.assert_allclose(found[block], expected[block], rtol=1e-5, err_msg=block)


@pytest.mark.parametrize("kind", ["untied", "tied", "r3"])
def test_norms_are_those_of_transformers_and_autograd(
    world: World, oracles: dict[str, dict[str, np.ndarray]], kind: str
) -> None:
    replayed = Case({**REPLAYED, **RECOMPUTED}, (NUM,), engine="fp8")
    case = replayed if kind == "r3" else Case({}, (NUM,), tied=kind == "tied")
    _same(norms(world, {kind: case})[kind], oracles[kind])


def test_replayed_routes_change_the_norms(oracles: dict[str, dict[str, np.ndarray]], world: World) -> None:
    """Else the cases with replay would show nothing."""
    native = _oracle(world.model, world.rollouts("fp8")[:NUM])
    assert np.abs(oracles["r3"]["embedding"] / native["embedding"] - 1).max() > 0.01


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("name", UNTIED | TIED | R3)
def test_acceptance_norms_are_those_of_transformers_in_every_layout(
    on_two_ranks: dict[str, Any], oracles: dict[str, dict[str, np.ndarray]], name: str
) -> None:
    _same(on_two_ranks["norms"][name], oracles[name.split()[0] if name in TIED | R3 else "untied"])


@pytest.mark.slow
@pytest.mark.multirank
def test_norms_are_the_same_where_ways_to_be_parallel_combine(
    world: World, oracles: dict[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    tied_model(world)
    job = Job("four", 4, "train_jobs:norms", {"world": world, "cases": ON_FOUR})
    for name, found in run_jobs([job], tmp_path)["four"].checked().items():
        _same(found, {block: values[:3] for block, values in oracles[name.split()[0]].items()})


def test_norms_in_16_bits_are_near_those_in_32(world: World) -> None:
    case = Case({**REPLAYED, "model__dtype": "bf16"}, (NUM,), engine="fp8")
    found = norms(world, {"bf16": case, "fp32": Case(REPLAYED, (NUM,), engine="fp8")})
    for block in BLOCKS:
        np.testing.assert_allclose(found["bf16"][block], found["fp32"][block], rtol=0.06, err_msg=block)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("name", AROUND)
def test_a_step_on_several_ranks_is_bit_for_bit_the_same_after_it(on_two_ranks: dict[str, Any], name: str) -> None:
    _same_step(*on_two_ranks["around"][name])


BALANCED = {
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.1],
    "moe_z_loss_coeff": 0.1,
}


@pytest.mark.parametrize("megatron", [{}, BALANCED], ids=["plain", "balancing losses"])
def test_a_step_is_bit_for_bit_the_same_after_it(world: World, megatron: dict[str, Any]) -> None:
    overrides = {**REPLAYED, **{f"megatron__{name}": value for name, value in megatron.items()}}
    _same_step(*steps_around(world, {"one": Case(overrides, (4,), engine="fp8")})["one"])


def _same_step(without: Any, after: Any) -> None:
    (one, weights), (two, weights_after) = without, after
    assert one == two
    assert weights.keys() == weights_after.keys()
    assert all(torch.equal(weights[name], weights_after[name]) for name in weights)


def test_balancing_losses_are_no_part_of_the_norm(world: World, oracles: dict[str, dict[str, np.ndarray]]) -> None:
    settings = {f"megatron__{name}": value for name, value in BALANCED.items()}
    _same(norms(world, {"one": Case(settings, (NUM,))})["one"], oracles["untied"])


def test_tokens_are_not_counted_for_the_expert_bias(world: World) -> None:
    with case_training(world, Case({}, (2,))) as step:
        routers = [module for module in step.policy.chunks[0].modules() if isinstance(module, TopKRouter)]
        for router in routers:
            router.enable_expert_bias, router.local_tokens_per_expert = True, torch.full((8,), 7.0)
        gradient_norms(step, world.rollouts("fp32")[:2], "embedding")
        assert all(router.local_tokens_per_expert.tolist() == [7.0] * 8 for router in routers)


def test_norm_of_a_rollout_without_loss_is_zero_and_others_are_by_themselves(world: World) -> None:
    rollouts = world.rollouts("fp32")[:3]
    silent = replace(rollouts[1], loss_mask=np.zeros_like(rollouts[1].loss_mask))
    with case_training(world, Case({}, (3,))) as step:
        alone = [gradient_norms(step, [rollout], "embedding")[0] for rollout in rollouts]
        together = gradient_norms(step, [rollouts[0], silent, rollouts[2]], "embedding")
        assert gradient_norms(step, [], "embedding").shape == (0,)
    assert together[1] == 0
    np.testing.assert_allclose(together, [alone[0], 0.0, alone[2]], rtol=1e-6)


def test_norm_that_is_not_finite_names_the_rollout_and_leaves_no_trace(world: World) -> None:
    rollouts = world.rollouts("fp32")[:2]
    with training(world.settings(train__replay="none")) as step:
        weight = dict(step.policy.chunks[0].named_parameters())["module.output_layer.weight"]
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(NumericsError, match=f"group {rollouts[0].group} sample {rollouts[0].sample}"):
            gradient_norms(step, rollouts, "embedding")
        with torch.no_grad():
            weight.copy_(kept)
        assert np.isfinite(gradient_norms(step, rollouts, "embedding")).all()
