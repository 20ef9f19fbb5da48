"""Replayed gate weights: the values are the rollout's, the gradients are the router's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_proofs import changed, make_prompts
from local_engines import local_engine
from tiny_families import FAMILIES
from tiny_world import RECOMPUTE, batch_of, config, fixed_coefficients, micro_batches, policy_of, safetensors_of

from megarl.core.types import Rollout
from megarl.engines.protocol import SamplingParams
from megarl.errors import ReplayError, TraceError
from megarl.files.hf_config import DENSE
from megarl.megatron.passes.forward import run
from megarl.megatron.rollout_routes import check_rollouts, deliver_keys, deliver_routes
from megarl.replay import MicroRoutes
from megarl.replay.sessions import Session
from megarl.stand_ins.sparse_attention import find_indexers

PARAMS = SamplingParams(max_response_tokens=8, return_gate_weights=True)
SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""They replay the keys of the engine, too."""
WITH_EXPERTS = [name for name in FAMILIES if name not in DENSE]


class World:
    """A policy, and rollouts with gate weights of an engine with the same or with other weights."""

    def __init__(self, model: Path, other_weights: bool, **settings: Any) -> None:
        self.settings = config(model, train__replay="r3", **settings)
        self.policy = policy_of(self.settings)
        engine = local_engine(model)
        if other_weights:
            engine.update_weights(changed(safetensors_of(model)), 1)
        is_sparse = bool(self.policy.shape.indexer_layers)
        params = replace(PARAMS, return_indexer_topk=is_sparse)
        self.rollouts: list[Rollout] = engine.generate(make_prompts(4), params)
        self.micros = micro_batches(self.settings, batch_of(self.rollouts))
        if is_sparse:
            check_rollouts(self.rollouts, self.policy.shape, keys=True)
            layers = find_indexers(self.policy.chunks)
            self.micros = deliver_keys(self.rollouts, self.micros, layers, self.policy.shape)

    def routes(self, gates: bool = True) -> list[MicroRoutes]:
        shape = self.policy.shape
        check_rollouts(self.rollouts, shape, gates)
        return deliver_routes(self.rollouts, self.micros, self.policy.replay.layers, shape, gates)  # type: ignore[union-attr]

    def train(self, routes: Sequence[MicroRoutes]) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]:
        """Log-probabilities, what the routers return by layer and micro-batch, and gradients."""
        policy, probs = self.policy, []
        assert policy.replay is not None
        hooks = [
            hook.router.register_forward_hook(lambda _, __, output: probs.append(output[0].detach().clone()))
            for hook in policy.replay._hooks
        ]
        policy.zero_grad()
        sizes = {"temperature": 1.0, "vocab_size": policy.shape.vocab_size}
        with policy.replay.replay(routes, min_agreement=0.0):
            outputs = run(policy.chunks, self.micros, **sizes, coefficients=fixed_coefficients)
        for hook in hooks:
            hook.remove()
        named = [(n, p) for chunk in policy.chunks for n, p in chunk.named_parameters()]
        gradients = {n: vars(p)["main_grad"].clone() for n, p in named if "main_grad" in vars(p)}
        return [output.logprobs for output in outputs], probs, gradients

    def pairs(self, routes: Sequence[MicroRoutes], probs: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
        """By micro-batch and layer: what a router returned at the experts of the present rows, and their gates."""
        num_layers = len(self.policy.replay.layers)  # type: ignore[union-attr]
        for index, returned in enumerate(probs):
            micro, layer = routes[index // num_layers], index % num_layers
            present = slice(None) if micro.present is None else micro.present
            yield returned.gather(1, micro.experts[:, layer].long())[present], micro.gates[present, layer]  # type: ignore


@pytest.mark.parametrize("model", WITH_EXPERTS)
def test_the_engines_gates_are_those_of_megatron_in_every_family(
    model: str, models: dict[str, Path], one_rank: None
) -> None:
    """Of softmax before and after the top-k, sigmoid, expert biases, groups, normalisation and scaling."""
    world = World(models[model], other_weights=False)
    routes, (logprobs, probs, gradients) = world.routes(), world.train(world.routes(gates=False))
    for own, rollout in world.pairs(routes, probs):
        torch.testing.assert_close(own, rollout, atol=2e-5, rtol=2e-5)
    found = world.train(routes)
    for mine, expected in zip(found[0], logprobs, strict=True):
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=0)
    for name, gradient in gradients.items():  # of a whole parameter: a norm in front of an embedding of 0 amplifies
        assert (found[2][name] - gradient).norm() <= 5e-3 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("model", ["qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"])
def test_values_are_the_rollouts_and_gradients_the_routers(
    model: str, models: dict[str, Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(models[model], other_weights=True)
    routes = [replace(micro, present=torch.arange(len(micro.experts)) % 5 > 0) for micro in world.routes()]
    found, native = world.train(routes), world.train([replace(micro, gates=None) for micro in routes])
    assert all(torch.equal(returned, rollout) for returned, rollout in world.pairs(routes, found[1]))
    assert not any(torch.equal(returned, rollout) for returned, rollout in world.pairs(routes, native[1]))
    absent = ~routes[0].present  # type: ignore[operator]
    assert torch.equal(found[1][0][absent], native[1][0][absent])  # of the first layer, whose input is the same

    def composed(probs: torch.Tensor, experts: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        own = probs.gather(1, experts)
        return probs.scatter(1, experts, own + (torch.where(gates.isnan(), own, gates) - own).detach())

    monkeypatch.setattr("megarl.replay.hooks._StraightThrough.apply", composed)
    torch.testing.assert_close(world.train(routes)[2], found[2], atol=1e-5, rtol=1e-4)
    router = next(name for name in found[2] if name.endswith("router.weight"))
    assert found[2][router].any()
    assert not torch.allclose(found[2][router], native[2][router], rtol=1e-2)


def test_a_change_of_routers_alone_is_invisible_under_replayed_gates(models: dict[str, Path], one_rank: None) -> None:
    """The price: no ratio sees it, while the routers get gradients."""
    world = World(models["deepseek_v3"], other_weights=False)
    assert all(micro.present is None for micro in world.routes())
    before = [world.train(world.routes(gates))[0] for gates in (True, False)]
    with torch.no_grad():
        for hook in world.policy.replay._hooks:  # type: ignore[union-attr]
            hook.router.weight.mul_(1.5)
    after = [world.train(world.routes(gates))[0] for gates in (True, False)]
    assert all(torch.equal(*pair) for pair in zip(before[0], after[0], strict=True))
    assert max((a - b).abs().max() for a, b in zip(before[1], after[1], strict=True)) > 1e-2


@pytest.mark.parametrize("recompute", ["uniform", "moe"])
def test_a_recomputation_takes_the_same_gates(recompute: str, models: dict[str, Path], one_rank: None) -> None:
    plain = World(models["deepseek_v3"], other_weights=True)
    expected = plain.train(plain.routes())
    world = World(models["deepseek_v3"], other_weights=True, recompute=RECOMPUTE[recompute])
    found = world.train(world.routes())
    assert len(found[1]) == 2 * len(expected[1])
    torch.testing.assert_close(found[2], expected[2], atol=1e-6, rtol=1e-5)


def test_a_row_that_does_not_use_its_experts_has_the_routers_gates(
    models: dict[str, Path], one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, choose = World(models["qwen3_moe"], other_weights=True), Session._find_experts
    routes = world.routes()

    def change_even_rows(session: Session, hook: Any, call: Any, question: Any) -> torch.Tensor:
        experts = choose(session, hook, call, question).clone()
        experts[::2] = question.preferred()[::2].flip(1).to(experts.dtype)  # other slots, if no other experts
        return experts

    monkeypatch.setattr(Session, "_find_experts", change_even_rows)
    probs = world.train(routes)[1][0]
    torch.testing.assert_close(probs.sum(1), torch.ones(len(probs)))
    assert torch.equal(probs.gather(1, routes[0].experts[:, 0].long())[1::2], routes[0].gates[1::2, 0])  # type: ignore
    own = probs[::2].topk(2, 1)
    assert not torch.isin(own.values, routes[0].gates).any()  # type: ignore[arg-type]


WRONG = {
    r"gates are torch\.int64": lambda gates: gates.long(),
    r"gates are torch\.float32 \[\d+, 3, 1\], expected floating": lambda gates: gates[..., :1],
    "gates are not finite": lambda gates: gates / 0,
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_gates_are_refused(text: str, models: dict[str, Path], one_rank: None) -> None:
    world = World(models["qwen3_moe"], other_weights=False)
    wrong = [replace(micro, gates=WRONG[text](micro.gates)) for micro in world.routes()]
    with pytest.raises(ReplayError, match=text):
        world.train(wrong)


def test_a_router_that_uses_gates_of_its_own_is_named(models: dict[str, Path], one_rank: None) -> None:
    world = World(models["qwen3_moe"], other_weights=False)
    router = world.policy.replay._hooks[1].router  # type: ignore[union-attr]
    router.routing = type(router).routing.__get__(router)
    with pytest.raises(ReplayError, match=r"layer 2: .* its own gate weights were used"):
        world.train(world.routes())
    world.train(world.routes(gates=False))
    world.policy.replay.detach()  # type: ignore[union-attr]
    assert "routing" not in vars(router)


def test_rollouts_without_the_requested_gates_are_named(models: dict[str, Path], one_rank: None) -> None:
    world = World(models["qwen3_moe"], other_weights=False)
    first, *others = world.rollouts
    for gates in (None, first.gate_weights * np.nan):  # type: ignore[operator]
        world.rollouts = [*others, replace(first, gate_weights=gates)]
        with pytest.raises(TraceError, match="group 0 sample 0: gate weights are absent or not finite"):
            world.routes()
