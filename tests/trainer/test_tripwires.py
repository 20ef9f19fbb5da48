"""Answers that are well-formed and wrong: dropped and counted, or the run stops; never trained without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Job, run_jobs
from local_engines import local_engine
from megatron.core.transformer.moe.router import Router
from run_configs import records_of
from tampered_engine import FROM_VERSION, KINDS, TAMPERED, glue, routes_of, shift_routes
from train_jobs import judged
from train_world import NUM_SEQUENCES, World, fixed_advantages, take_step, trainer_of, training, weights_of

from megarl.core.types import Rollout, SampleRequest
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.engines.protocol import SamplingParams
from megarl.errors import RolloutError
from megarl.megatron import distributed
from megarl.megatron.checkpoints.folders import complete_checkpoints
from megarl.run.status import show
from megarl.trainer import step as tripwires
from megarl.trainer.loop import train
from megarl.trainer.mini_batch import StepPlan
from megarl.watch import tripwires as rules
from megarl.watch.tripwires import COLUMNS, Drops

NARROW: dict[str, Any] = {"train__max_k3": 0.05, "train__max_native_flip": 0.3}
"""Between honest and wrong responses of some eight tokens, most of which the ceilings alone would let pass."""


@pytest.fixture(autouse=True)
def from_the_first_weights_on() -> None:
    TAMPERED.clear()
    FROM_VERSION[0] = 0


def audit(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    records = records_of(folder)
    return [record for record in records if record["kind"] == "step"]


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("attack", KINDS)
def test_acceptance_exactly_the_wrong_answers_are_dropped_counted_and_named(
    world: World, tmp_path: Path, attack: str, mini_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    FROM_VERSION[0] = 1
    settings = {"run__dir": str(tmp_path), "run__steps": 2, "train__mini_batches": mini_batches, **NARROW}
    train(world.settings(rollout__engine=f"tampered_engine:with_{attack}", **settings))
    assert {(1, group, 1) for group in range(4)} == TAMPERED
    honest, tampered = steps_of(tmp_path)
    assert (honest["tripwires/dropped"], tampered["tripwires/dropped"]) == (0, 4)
    first, second = (record for record in audit(tmp_path) if "step" in record)
    assert "dropped" not in first
    assert set(second["dropped"]) == {f"{8 + group}/{sample}" for _, group, sample in TAMPERED}
    assert all("native flip" in why for why in second["dropped"].values())
    assert sum(len(samples) for samples in second["prompts"].values()) == NUM_SEQUENCES - 4
    said = capsys.readouterr().out
    assert "4 of 32 responses dropped" in said
    assert "  dropped 4  " in said
    assert show(tmp_path) == 0
    assert "4 responses dropped" in capsys.readouterr().out


def test_acceptance_the_self_test_stops_a_run_before_a_weight_changes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = world.settings(run__dir=str(tmp_path), rollout__engine="tampered_engine:other_weights")
    distributed.initialize(settings)
    trainer = trainer_of(settings)
    before = weights_of(trainer.policy)
    message = r"self-test of the engines has failed, no weight has changed: k3 .*likely causes: docs/tripwires.md"
    with pytest.raises(RolloutError, match=message):
        trainer.run()
    trainer.log.close()
    after = weights_of(trainer.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "self-test: k3" in capsys.readouterr().out
    assert not complete_checkpoints(tmp_path / "checkpoints")
    assert [record for record in audit(tmp_path) if "step" in record] == []


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_acceptance_bad_steps_train_on_nothing_and_then_end_the_run_which_can_continue(
    world: World, tmp_path: Path, mini_batches: int
) -> None:
    FROM_VERSION[0] = 2
    common: dict[str, Any] = {"run__dir": str(tmp_path), "run__steps": 6, "train__mini_batches": mini_batches}
    with pytest.raises(RolloutError, match=r"2 bad steps in a row: k3 .* 32 of 32 responses dropped"):
        train(world.settings(rollout__engine="tampered_engine:other_weights", train__max_bad_steps=2, **common))
    assert [record["tripwires/dropped"] for record in steps_of(tmp_path)] == [0, 0, 32, 32]
    assert [step for step, _ in complete_checkpoints(tmp_path / "checkpoints")] == [4]
    distributed.shutdown()
    FROM_VERSION[0] = 99
    train(world.settings(rollout__engine="tampered_engine:other_weights", train__max_bad_steps=2, **common))
    assert [record["tripwires/dropped"] for record in steps_of(tmp_path)] == [0, 0, 32, 32, 0, 0]


@pytest.mark.parametrize(("attack", "first"), [("swapped", 0), ("replayed", 1)])
def test_acceptance_drops_that_persist_end_the_run_by_name(
    world: World, tmp_path: Path, attack: str, first: int
) -> None:
    """Short answers of another prompt and of the step before, 4 of 32 in each step, less than makes a step bad."""
    with pytest.raises(RolloutError, match=r"dropped in step after step: k3 .* 4 of 32 responses dropped"):
        train(world.settings(run__dir=str(tmp_path), run__steps=9, rollout__engine=f"tampered_engine:with_{attack}"))
    dropped = [record["tripwires/dropped"] for record in steps_of(tmp_path)]
    assert len(dropped) - first <= 5
    assert sum(dropped) >= 0.8 * 4 * (len(dropped) - first)


@pytest.mark.parametrize(
    ("dropped", "responses", "steps"),
    [(4, 128, 3), (32, 128, 3), (64, 128, 3), (1, 32, 12), (1, 128, None), (0, 8, None)],
)
def test_how_many_steps_with_drops_end_a_run(world: World, dropped: int, responses: int, steps: int | None) -> None:
    judge = tripwires.Tripwires(world.settings().train)
    gaps = np.zeros((responses, COLUMNS))
    gaps[:, 4], gaps[:dropped, 9] = 9, 99.0
    judge.verdict = verdict = Drops(gaps, np.array([0.05, 0.25, 20.0]))
    for step in range(1, 40):
        judge.learn(verdict, [0.0, 0.0])
        if step == steps:
            why = "3 bad steps in a row" if 4 * dropped > responses else "dropped in step after step"
            with pytest.raises(RolloutError, match=why):
                judge.stop_if_bad()
            assert judge.state["drop_evidence"] == 0.0  # says nothing of the engine that continues the run
            return
        judge.stop_if_bad()
    assert steps is None


def test_a_run_that_never_stops_still_counts(world: World, tmp_path: Path) -> None:
    settings = {"rollout__engine": "tampered_engine:other_weights", "train__max_bad_steps": 0}
    train(world.settings(run__dir=str(tmp_path), run__steps=1, **settings))
    assert [record["tripwires/dropped"] for record in steps_of(tmp_path)] == [32]


def test_a_step_whose_routes_agree_too_little_still_leaves_its_traces(world: World, tmp_path: Path) -> None:
    FROM_VERSION[0] = 1
    settings = {"rollout__engine": "tampered_engine:other_weights", "log__traces_every": 1}
    exact = {"rollout__fp8_rounding": False, "train__mini_batches": 1}
    train(world.settings(run__dir=str(tmp_path), run__steps=2, train__min_route_agreement=0.9, **settings, **exact))
    assert [record["tripwires/dropped"] for record in steps_of(tmp_path)] == [0, 32]
    assert len(list((tmp_path / "traces").glob("step_0000002.*"))) == 2


def test_switched_off_it_says_so_and_measures_on(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = {"train__max_k3": "off", "train__max_native_flip": "off"}
    train(world.settings(run__dir=str(tmp_path), run__steps=1, rollout__engine="tampered_engine:with_swapped", **off))
    said = capsys.readouterr().out
    assert 'warning: train.max_k3 and train.max_native_flip: found "off"' in said
    assert "native flip" in said
    assert not [name for name in steps_of(tmp_path)[0] if name.startswith("tripwires/")]


def test_what_the_first_steps_teach_is_saved(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rules, "LEARNING_STEPS", 3)
    for folder, lengths in (("whole", [6]), ("parts", [2, 4, 6])):
        for steps in lengths:
            more = {"run__steps": steps, "optim__decay_steps": 6}
            train(world.settings(run__dir=str(tmp_path / folder), train__mini_batches=1, **more))
    whole, parts = (steps_of(tmp_path / folder) for folder in ("whole", "parts"))
    assert parts == whole
    limits = [record["tripwires/native_flip_limit"] for record in whole]
    assert all(0.25 <= later <= limits[0] <= 0.5 for later in limits)  # they hold from the first step on, and tighten
    assert len(set(limits[2:])) == 1
    assert [record["tripwires/k3_limit"] for record in whole] == [0.05] * 6
    assert capsys.readouterr().out.count("self-test: ") == 4


def tampered_rollouts(world: World) -> tuple[list[Rollout], list[int]]:
    """The fixed batch with four wrong responses, the last one in a few rows, and which."""
    rollouts = world.rollouts()
    wrong = {3: glue(rollouts[3], rollouts[8]), 17: shift_routes(rollouts[17])}
    wrong[30] = routes_of(rollouts[30], rollouts[20])
    wrong[9] = replace(rollouts[9], routed_experts=_others_in(rollouts[9], slice(3, 8)))
    return [wrong.get(index, rollout) for index, rollout in enumerate(rollouts)], list(wrong)


def _others_in(rollout: Rollout, rows: slice) -> np.ndarray:
    """The routes with two other experts in these rows."""
    assert rollout.routed_experts is not None
    experts = rollout.routed_experts.copy()
    for row in experts[rows].reshape(-1, experts.shape[2]):
        row[:] = [expert for expert in range(4) if expert not in row][:2]
    return experts


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("objective", ["minirl", "grpo"])
def test_dropping_a_sequence_leaves_the_others_and_their_denominators(
    world: World, mini_batches: int, objective: str
) -> None:
    rollouts, wrong = tampered_rollouts(world)
    advantages = fixed_advantages()
    zeroed = np.where(np.isin(np.arange(NUM_SEQUENCES), wrong), 0.0, advantages)
    common: dict[str, Any] = {"train__mini_batches": mini_batches, "train__objective": objective, "optim__lr": 0.01}
    off = {"train__max_k3": "off", "train__max_native_flip": "off"}
    after = []
    for values, limits in ((advantages, NARROW), (zeroed, off), (advantages, off)):
        with training(world.settings(**common, **limits)) as step:
            taken = take_step(step, rollouts, values)
            after.append((weights_of(step.policy), taken))
    (dropped, found), (by_hand, _), (trained, _) = after
    assert found is not None
    assert found.step["tripwires/dropped"] == 4
    assert found.step["tripwires/foreign_runs"] >= 1
    apart = [float((dropped[name] - by_hand[name]).abs().max()) for name in dropped]
    assert max(apart) < 1e-5
    assert max(float((dropped[name] - trained[name]).abs().max()) for name in dropped) > 1e-3


def test_the_pass_without_the_dropped_ones_finds_the_expert_biases_of_the_first_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, _ = tampered_rollouts(world)
    found: list[list[float]] = []
    with training(world.settings(train__mini_batches=1, **NARROW)) as step:
        bias, run = torch.zeros(step.policy.shape.num_experts), step.backward
        router = next(module for module in step.policy.chunks[0].modules() if isinstance(module, Router))
        del router.expert_bias  # None: the router was made without one
        router.register_buffer("expert_bias", bias)

        def moves_the_bias(*arguments: Any, **named: Any) -> Any:
            found.append(bias.tolist())
            bias.add_(1.0)  # as Megatron does at the end of each backward pass
            return run(*arguments, **named)

        monkeypatch.setattr(step, "backward", moves_the_bias)
        take_step(step, rollouts)
    assert (found, bias.tolist()) == ([[0.0] * len(bias)] * 2, [1.0] * len(bias))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2": (2, {"parallel__tp": 2}),
    "pp2 ep1": (2, {"parallel__pp": 2}),
    "cp2 ep2": (4, {"parallel__cp": 2, "parallel__ep": 2}),
    "pp4": (4, {"parallel__pp": 4}),
}


@pytest.mark.multirank
def test_acceptance_all_ranks_of_every_layout_come_to_the_verdict_of_one_rank(world: World, tmp_path: Path) -> None:
    rollouts, wrong = tampered_rollouts(world)
    variants: dict[str, dict[str, Any]] = {
        f"{replay} {mini_batches}": {"train__replay": replay, "train__mini_batches": mini_batches, **NARROW}
        for replay, mini_batches in (("r3", 1), ("r3", 2), ("none", 1), ("r2", 2))
    }
    jobs = [
        Job(name, ranks, "train_jobs:judged", {"world": world, "rollouts": rollouts, "variants": of_layout})
        for name, (ranks, layout) in LAYOUTS.items()
        for of_layout in [{key: variant | layout for key, variant in variants.items()}]
    ]
    ended = run_jobs(jobs, tmp_path)
    alone = judged(world, rollouts, variants)
    for variant, (reasons, figures, metrics, weights) in alone.items():
        assert set(reasons) == {(rollouts[index].group, rollouts[index].sample) for index in wrong}, variant
        assert "rows 3 to 7 are of other tokens" in reasons[rollouts[9].group, rollouts[9].sample]
        for job in jobs:
            of_ranks, theirs, numbers, moved = ended[job.name].checked()[variant]
            assert set(of_ranks) == set(reasons), (job.name, variant)
            np.testing.assert_allclose(theirs, figures, atol=1e-4, err_msg=f"{job.name} {variant}")
            for name in ("router/native/flip", "tripwires/dropped", "tripwires/native_flip_max"):
                assert numbers[name] == pytest.approx(metrics[name], abs=1e-12), (job.name, variant, name)
            assert moved == pytest.approx(weights, rel=2e-3), (job.name, variant)


DEPTHS = {48: 8, 4: 32}
"""Layers, and the length of the run."""
NUM_DEEP, PROMPT, RESPONSE = 16, 40, 60


def made(folder: Path, num_layers: int) -> tuple[World, list[Rollout]]:
    """A model, and the responses of an engine in bf16, which flips some experts."""
    world = World(folder)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_experts": 16, "top_k": 4, "expert_width": 8, "max_positions": 128}
    write_tiny_model(world.model, num_layers=num_layers, num_heads=2, num_kv_heads=1, initializer_range=0.1, **sizes)
    write_sort_task(world.folder / "task", num_train=64, num_heldout=16, num_demonstrations=256, digits=3)
    engine = local_engine(world.model, dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 32, (NUM_DEEP, PROMPT)).astype(np.int32)
    requests = [SampleRequest(prompt, s // 4, s % 4, seed=s) for s, prompt in enumerate(prompts)]
    rollouts = engine.generate(requests, SamplingParams(1.0, 1.0, RESPONSE, (), True, None))
    engine.close()
    return world, rollouts


Change = Callable[[np.ndarray, np.ndarray, slice], np.ndarray]
FAULTS: dict[str, tuple[int, Change]] = {
    "of another response, in the prompt": (3, lambda experts, other, rows: other[rows]),
    "of another response, across the boundary": (PROMPT - 4, lambda experts, other, rows: other[rows]),
    "of the slot's earlier owner": (50, lambda experts, other, rows: other[-9 - rows.stop + rows.start : -9]),
    "zeros": (44, lambda experts, other, rows: np.arange(experts.shape[2])),
    "one row repeated": (60, lambda experts, other, rows: other[5]),
    "of other layers": (20, lambda experts, other, rows: np.roll(experts[rows], 1, 1)),
}


@pytest.mark.parametrize("num_layers", DEPTHS)
def test_acceptance_a_short_run_of_foreign_rows_is_dropped_and_named(tmp_path: Path, num_layers: int) -> None:
    world, rollouts = made(tmp_path, num_layers)
    size, places = DEPTHS[num_layers], {}
    for index, (first, change) in enumerate(FAULTS.values()):
        mine, other = (rollouts[place].routed_experts for place in (2 * index, 2 * index + 1))
        assert mine is not None
        assert other is not None
        places[2 * index] = rows = slice(first, first + size)
        changed = mine.copy()
        changed[rows] = change(mine, other, rows)
        rollouts[2 * index] = replace(rollouts[2 * index], routed_experts=changed)
    for replay in ("r3", "none"):
        limits: dict[str, Any] = {"train__micro_batch_tokens": 2048, "train__max_bad_steps": 0}
        with training(world.settings(train__replay=replay, **limits)) as step:
            mini = step.prepare(rollouts, np.ones(NUM_DEEP))
            ([mini], _) = step.tripwires.judge([step.old_pass(StepPlan.of(step.config, 1), mini)])
            verdict = step.tripwires.verdict
        assert verdict is not None
        flip = mini.statistics["router/native/flip" if replay == "r3" else "router/flip"].sums
        assert float(flip[0] / flip[1]) > 0
        found = {int(index): tuple(verdict.gaps[index, 10:12]) for index in verdict.over[:, 2].nonzero()[0]}
        assert set(found) == set(places), replay
        for index, rows in places.items():
            assert np.abs(np.subtract(found[index], (rows.start, rows.stop - 1))).max() <= 2, (replay, index)
            assert f"rows {found[index][0]:.0f} to {found[index][1]:.0f}" in verdict.reasons()[index // 4, index % 4]
