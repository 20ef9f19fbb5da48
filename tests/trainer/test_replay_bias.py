"""The replay bias: the policy with replayed routes against itself with its own, at the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Job, run_jobs
from train_jobs import biases
from train_world import NUM_MOE_LAYERS, TOP_K, Going, Taken, World, old_logprobs, take_step, training
from transformers import AutoModelForCausalLM

from megarl.errors import ConfigError
from megarl.run.metrics_log import read_metrics
from megarl.trainer.loop import train
from megarl.trainer.passes import run_pass
from megarl.trainer.step import TrainStep

PREFIX = "replay_bias/"


def _of(update: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in update.items() if name.startswith(PREFIX)}


@pytest.fixture(scope="module")
def alone(world: World) -> dict[str, Taken]:
    """One step on the FP8 rollouts, the bias measured, by replay mode."""
    return biases(world, {mode: {"train__replay": mode} for mode in ("r2", "r3")})


def test_r2_has_none_before_the_weights_move_and_some_afterwards(alone: dict[str, Taken]) -> None:
    first, second = (_of(update) for update in alone["r2"].updates)
    assert first[PREFIX + "kl/max"] == first[PREFIX + "flip"] == 0.0
    assert (first[PREFIX + "ratio/min"], first[PREFIX + "ratio/max"]) == (1.0, 1.0)
    assert second[PREFIX + "flip"] > 0.0
    assert second[PREFIX + "kl/max"] > 0.0


def test_measuring_changes_nothing(world: World, alone: dict[str, Taken]) -> None:
    for mode, measured in alone.items():
        plain = biases(world, {mode: {"train__replay": mode}}, measure=False)[mode]
        for one, two in zip(plain.updates, measured.updates, strict=True):
            assert one == {name: value for name, value in two.items() if not name.startswith(PREFIX)}
        assert plain.step == measured.step


def _passes(step: TrainStep, world: World) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """What the first update measures, and the log-probabilities of its tokens with either routing."""
    going = Going(step, world.rollouts(), old_pass=True, replay_bias=True).look()
    mini = going.minis[0]
    found = {"replayed": torch.cat(old_logprobs(mini))}
    found["native"] = torch.cat(run_pass(step.policy, mini, step.policy.replay.record(keep=False)).logprobs)
    mask = torch.cat([micro.batch.loss_mask for micro in mini.micro_batches])
    return going.collect_update(0) or {}, {name: column[mask].double().numpy() for name, column in found.items()}


def test_r3_is_compared_with_a_pass_that_routes_natively(world: World) -> None:
    with training(world.settings(train__replay="r3")) as step:
        update, logprobs = _passes(step, world)
    ratio = np.exp(logprobs["replayed"] - logprobs["native"])
    assert update[PREFIX + "ratio/mean"] == pytest.approx(ratio.mean(), rel=1e-6)
    assert update[PREFIX + "ratio/max"] == pytest.approx(ratio.max(), rel=1e-5)
    assert update[PREFIX + "extreme_2"] == pytest.approx(np.mean(np.abs(np.log(ratio)) > np.log(2)), abs=1e-9)
    assert update[PREFIX + "kl/mean"] > 1e-6


def test_flips_and_divergence_are_those_of_transformers(world: World) -> None:
    """An oracle without Megatron: Hugging Face's model by itself, and with the rollout's experts forced on it."""
    model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float32).eval()
    with training(world.settings(train__replay="r3", train__mini_batches=1)) as step:
        update = Going(step, world.rollouts(), replay_bias=True).collect_update(0) or {}
    flips, divergences = [], []
    for rollout in world.rollouts():
        native, own = _forward(model, rollout.tokens, None)
        replayed, _ = _forward(model, rollout.tokens, rollout.routed_experts)
        asked = own.sort(-1).values != torch.from_numpy(np.sort(rollout.routed_experts, -1)).long()
        flips.append(asked.any(-1)[torch.from_numpy(rollout.routed_mask)])
        divergence = (replayed.exp() * (replayed - native)).sum(-1)
        divergences.append(divergence[:-1][torch.from_numpy(rollout.loss_mask)[1:]])
    by_layer = torch.cat(flips).double().mean(0).tolist()
    assert [update[f"{PREFIX}flip/layer_{layer:02d}"] for layer in range(NUM_MOE_LAYERS)] == pytest.approx(by_layer)
    assert update[PREFIX + "flip"] == pytest.approx(np.mean(by_layer))
    every = torch.cat(divergences)
    assert update[PREFIX + "kl/mean"] == pytest.approx(float(every.mean()), rel=1e-3)
    assert update[PREFIX + "kl/max"] == pytest.approx(float(every.max()), rel=1e-3)


def _forward(model: Any, tokens: np.ndarray, experts: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax [T, V] and the routers' own choice [T, L, K]."""
    chosen: list[torch.Tensor] = []
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]

    def route(module: Any, arguments: Any, output: Any) -> Any:
        scores = torch.nn.functional.linear(arguments[0].reshape(-1, module.weight.shape[1]), module.weight)
        chances = scores.float().softmax(-1)
        chosen.append(chances.topk(TOP_K, -1).indices)
        if experts is None:
            return None
        forced = torch.from_numpy(experts[:, len(chosen) - 1].astype(np.int64))
        gates = chances.gather(1, forced)
        return (output[0], gates / gates.sum(-1, keepdim=True), forced)

    handles = [block.gate.register_forward_hook(route) for block in blocks]
    try:
        with torch.no_grad():
            logits = model(torch.from_numpy(np.asarray(tokens, np.int64))[None]).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits.double().log_softmax(-1), torch.stack(chosen, 1)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "ep2 cp2": (4, {"parallel__ep": 2, "parallel__cp": 2}),
    "tp2 pp2": (4, {"parallel__tp": 2, "parallel__pp": 2}),
    "pp4": (4, {"parallel__pp": 4}),
}
"""The second stage of pp4 has no router."""


@pytest.fixture(scope="module")
def spread(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Taken]]:
    jobs = [
        Job(name, ranks, "train_jobs:biases", {"world": world, "variants": variants})
        for name, (ranks, layout) in LAYOUTS.items()
        for variants in [{mode: {**layout, "train__replay": mode} for mode in ("r2", "r3")}]
    ]
    ended = run_jobs(jobs, tmp_path_factory.mktemp("biases"))
    return {name: ended[name].checked() for name in LAYOUTS}


@pytest.mark.multirank
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_ranks_measure_what_one_does(
    alone: dict[str, Taken], spread: dict[str, dict[str, Taken]], layout: str
) -> None:
    for mode, one in alone.items():
        two = spread[layout][mode]
        for index, (a, b) in enumerate(zip(one.updates, two.updates, strict=True)):
            assert set(a) == set(b)
            names = [name for name in a if name.startswith((PREFIX, "first_order/", "gap/", "ratio/"))]
            # Quantiles come from a histogram; a later mini-batch reads weights that Adam has moved by float noise.
            for name in (name for name in names if "/p" not in name):
                assert b[name] == pytest.approx(a[name], rel=5e-3, abs=2e-5), (mode, index, name)
            if mode == "r3" and index == 0:
                assert b[PREFIX + "flip"] == a[PREFIX + "flip"] > 0.0


def test_r2_needs_no_routes_of_the_engine(world: World, alone: dict[str, Taken]) -> None:
    lost = [replace(rollout, routed_experts=None, routed_mask=None) for rollout in world.rollouts()]
    with training(world.settings(train__replay="r2", optim__lr=0.01)) as step:
        found = take_step(step, lost, replay_bias=True)
    assert found is not None
    for one, two in zip(alone["r2"].updates, found.updates, strict=True):
        assert two[PREFIX + "kl/mean"] == one[PREFIX + "kl/mean"]
        assert two[PREFIX + "flip"] == pytest.approx(one[PREFIX + "flip"], rel=0.2)  # last tokens count too


def test_every_kth_step_measures_it_and_its_records_say_so(world: World, tmp_path: Path) -> None:
    train(world.settings(run__dir=str(tmp_path), run__steps=3, train__replay_bias_every=2, eval__every=0))
    found = [record for record in read_metrics(tmp_path / "metrics.jsonl") if record["kind"] == "minibatch"]
    assert [(record["step"], PREFIX + "kl/mean" in record) for record in found] == [
        (step, step == 2) for step in (1, 2, 3) for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("replay", "mini_batches", "why"), [("none", 2, "nothing is replayed"), ("r2", 1, "choose anyway")]
)
def test_where_it_is_zero_by_definition_it_is_refused(world: World, replay: str, mini_batches: int, why: str) -> None:
    asked: dict[str, Any] = {"train__replay": replay, "train__mini_batches": mini_batches}
    with pytest.raises(ConfigError, match=f"replay_bias_every: found 1 .*0 by definition.*{why}"):
        world.settings(train__replay_bias_every=1, **asked)
