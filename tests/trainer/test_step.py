"""The training half of a step on one rank: replay modes, what is refused, and what reaches the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from train_world import (
    NUM_EXPERTS,
    NUM_MOE_LAYERS,
    NUM_SEQUENCES,
    ROWS,
    Going,
    Taken,
    World,
    counted_passes,
    fixed_advantages,
    sample,
    step_on,
    take_step,
    training,
    weights_of,
)

from megarl.config import Config
from megarl.config.file import parse
from megarl.core.metrics import finalize
from megarl.core.types import Rollout
from megarl.errors import NumericsError, ReplayError, RolloutError, TraceError
from megarl.megatron import rollout_routes
from megarl.trainer.step import TrainStep


@pytest.fixture(scope="module")
def taken(world: World) -> dict[str, Taken]:
    """One step on the same FP8 rollouts under each replay mode."""
    modes = ("none", "r2", "r3")
    return {mode: step_on(world.settings(train__replay=mode), world.rollouts()) for mode in modes}


def test_acceptance_r3_has_no_router_disagreement_and_less_kl_on_the_same_rollouts(taken: dict[str, Taken]) -> None:
    r3, none = taken["r3"].step, taken["none"].step
    assert r3["router/flip"] == 0.0
    assert r3["router/overlap"] == 1.0
    assert r3["router/token_any"] == 0.0
    assert r3["router/native/flip"] > 0.0
    assert none["router/flip"] > 0.01
    assert r3["rollout/k3"] < none["rollout/k3"]


def test_gates_of_the_rollout_reach_the_first_pass(taken: dict[str, Taken], world: World) -> None:
    gated = step_on(world.settings(train__replay="r3", train__replay_gates=True), world.rollouts()).step
    assert gated["router/flip"] == 0.0
    assert gated["rollout/k3"] not in (0.0, taken["r3"].step["rollout/k3"])
    assert gated["rollout/k3"] < taken["none"].step["rollout/k3"]
    bare = [replace(rollout, gate_weights=None) for rollout in world.rollouts()]
    with pytest.raises(TraceError, match="group 0 sample 0: gate weights are absent or not finite"):
        step_on(world.settings(train__replay="r3", train__replay_gates=True), bare)


def test_without_replay_the_recorded_disagreement_is_the_native_one(taken: dict[str, Taken]) -> None:
    for mode in ("none", "r2"):
        found = taken[mode].step
        native = {name: value for name, value in found.items() if name.startswith("router/native/")}
        assert native == {name: found[name.replace("native/", "")] for name in native} != {}
    per_layer = [taken["none"].step[f"router/flip/layer_{layer:02d}"] for layer in range(NUM_MOE_LAYERS)]
    assert np.mean(per_layer) == pytest.approx(taken["none"].step["router/flip"])
    # The first layer sees only embeddings and attention; nothing replayed lies below it.
    assert taken["r3"].step["router/native/flip/layer_00"] == pytest.approx(per_layer[0], abs=0.02)


def test_r2_leaves_the_gap_between_the_engines_as_it_is(taken: dict[str, Taken]) -> None:
    assert taken["r2"].step == taken["none"].step
    assert taken["r2"].updates[0]["loss"] == pytest.approx(taken["none"].updates[0]["loss"], rel=1e-6)


@pytest.mark.parametrize("replay", ["none", "r3"])
def test_an_exact_engine_agrees_with_training_even_without_replay(world: World, replay: str) -> None:
    found = step_on(world.settings(train__replay=replay), world.rollouts("fp32")).step
    assert found["router/flip"] == 0.0
    assert 0.0 <= found["rollout/k3"] < 1e-8
    assert found["rollout/ratio/min"] == pytest.approx(1.0, abs=1e-3)
    assert found["rollout/ratio/max"] == pytest.approx(1.0, abs=1e-3)


@contextmanager
def used_experts(step: TrainStep, chunks: Sequence[torch.nn.Module] = ()) -> Iterator[list[torch.Tensor]]:
    """The routers' own answer, bool [T, E] per call: not the replay object's word."""
    seen: list[torch.Tensor] = []
    routers = [m for chunk in chunks or step.policy.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
    handles = [router.register_forward_hook(lambda _, __, out: seen.append(out[1].clone())) for router in routers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _share_of_second_mini_batch_that_moved(world: World, replay: str) -> float:
    """Experts of mini-batch 1 in the old pass against those in its update, after mini-batch 0 has moved the weights."""
    with training(world.settings(train__replay=replay, optim__lr=0.02)) as step:
        going = Going(step, world.rollouts())
        going.old_pass(0)
        with used_experts(step) as before:
            going.old_pass(1)
        going.update(0)
        with used_experts(step) as after:
            going.update(1)
    assert len(before) == len(after) == NUM_MOE_LAYERS * len(going.minis[1].micro_batches)
    return float(np.mean([float((a != b).any(1).float().mean()) for a, b in zip(before, after, strict=True)]))


def test_r2_replays_the_old_pass_after_the_weights_have_moved(world: World) -> None:
    assert _share_of_second_mini_batch_that_moved(world, "none") > 0.05
    assert _share_of_second_mini_batch_that_moved(world, "r2") == 0.0
    assert _share_of_second_mini_batch_that_moved(world, "r3") == 0.0


def test_r3_uses_the_experts_of_the_rollouts_in_every_pass(world: World) -> None:
    with training(world.settings(train__replay="r3", optim__lr=0.02)) as step:
        going = Going(step, world.rollouts())
        with used_experts(step) as seen:
            going.old_pass(1)
            going.update(0)
            going.update(1)
    experts = [rollout.routed_experts for rollout in world.rollouts()]
    of_mini = [
        [np.concatenate([experts[part[sequence]] for sequence in micro.sequences]) for micro in mini.micro_batches]
        for mini, part in zip(going.minis, going.owned, strict=True)
    ]
    expected = [torch.from_numpy(of_micro) for index in (1, 0, 1) for of_micro in of_mini[index]]
    assert len(seen) == NUM_MOE_LAYERS * len(expected)
    for index, used in enumerate(seen):
        wanted = expected[index // NUM_MOE_LAYERS][:, index % NUM_MOE_LAYERS]
        assert torch.equal(used, torch.zeros_like(used).scatter(1, wanted.long(), True))


def _with_missing_rows(rollouts: list[Rollout], per_sequence: int) -> list[Rollout]:
    made = []
    for rollout in rollouts:
        present = np.ones(rollout.num_tokens, bool)
        present[rollout.num_tokens - per_sequence :] = False
        experts = np.where(present[:, None, None], rollout.routed_experts, 0).astype(np.uint8)
        made.append(replace(rollout, routed_mask=present, routed_experts=experts))
    return made


def test_too_many_missing_rows_are_an_error_before_anything_moves(world: World) -> None:
    _refused(world.settings(train__max_missing_rows=0.05), _with_missing_rows(world.rollouts(), 2), "no recorded route")


def test_last_tokens_may_have_no_row(world: World) -> None:
    without = step_on(world.settings(train__max_missing_rows=0.0), _with_missing_rows(world.rollouts(), 1))
    whole = step_on(world.settings(), world.rollouts())
    for one, two in zip(without.updates, whole.updates, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)  # nothing is predicted from them
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5)


def _refused(settings: Config, rollouts: list[Rollout], message: str, kind: type[Exception] = TraceError) -> None:
    with training(settings) as step:
        before = weights_of(step.policy)
        with pytest.raises(kind, match=message):
            take_step(step, rollouts)
        after = weights_of(step.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _corrupted(rollouts: list[Rollout], where: int, **changes: Any) -> list[Rollout]:
    return [replace(r, **{"gate_weights": None} | changes) if i == where else r for i, r in enumerate(rollouts)]


def test_corrupted_traces_are_refused_and_named(world: World) -> None:
    rollouts = world.rollouts()
    victim = rollouts[20]
    experts = victim.routed_experts
    assert experts is not None
    out_of_range, doubled = experts.copy(), experts.copy()
    out_of_range[2, 1, 0] = NUM_EXPERTS
    doubled[2, 1, :] = 3
    cases = {
        "expected 2 different ones of 0 to 7": {"routed_experts": out_of_range},
        "2 different ones": {"routed_experts": doubled},
        "routes of 2 layers": {"routed_experts": experts[:, :2]},
        "no routed experts": {"routed_experts": None, "routed_mask": None},
    }
    for message, changes in cases.items():
        label = "group 5 sample 0.*" + message
        _refused(world.settings(), _corrupted(rollouts, 20, **changes), label)
    shorter = _corrupted(rollouts, 20, routed_experts=experts[:-1], routed_mask=np.ones(len(experts) - 1, bool))
    _refused(world.settings(), shorter, "group 5 sample 0")


def _with_routes(rollouts: list[Rollout], change: Callable[[np.ndarray], np.ndarray]) -> list[Rollout]:
    return [replace(rollout, routed_experts=change(rollout.routed_experts)) for rollout in rollouts]


@pytest.mark.parametrize("rows", [1, -1], ids=["late", "early"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_routes_that_are_shifted_are_refused_and_named(world: World, rows: int, mini_batches: int) -> None:
    shifted = _with_routes(world.rollouts(), lambda experts: np.roll(experts, rows, 0))
    settings = world.settings(train__mini_batches=mini_batches)
    _refused(settings, shifted, "self-test.*native flip 6.*the router itself would have chosen", RolloutError)
    off = world.settings(train__mini_batches=mini_batches, train__max_native_flip="off")
    _refused(off, shifted, "shifted", ReplayError)


def test_a_rank_without_sequences_is_an_error_on_all_ranks(world: World) -> None:
    with training(world.settings()) as step, pytest.raises(RolloutError, match="no sequence of the mini-batch"):
        step.prepare([], np.empty(0))


def test_a_stage_without_moe_layers_sends_its_counts_from_the_device_of_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real ``gather_shared`` is stopped at its first collective call."""

    def stop(counts: torch.Tensor, *_: Any) -> None:
        raise StopIteration(counts.device.type, list(counts.shape))

    with training(world.settings()) as step:
        (micro, *_), *_ = (mini.micro_batches for mini in Going(step, world.rollouts()).minis)
        monkeypatch.setattr(rollout_routes, "gather_slots", stop)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
        with pytest.raises(StopIteration) as sent:
            rollout_routes.gather_shared([[]], [micro], layers=())
    assert sent.value.args == ("meta", [micro.num_slots, 0, 1])


def test_values_that_are_not_finite_end_the_step_and_leave_the_weights(world: World) -> None:
    rollouts = world.rollouts()
    for bad in (np.nan, np.inf):
        broken = rollouts[3].rollout_logprobs.copy()
        broken[-1] = bad
        _refused(
            world.settings(),
            _corrupted(rollouts, 3, rollout_logprobs=broken),
            "rollout_logprobs is (nan|inf)",
            NumericsError,
        )
    advantages = fixed_advantages()
    advantages[7] = np.nan
    with training(world.settings()) as step, pytest.raises(NumericsError, match="group 1 sample 3: the advantage"):
        take_step(step, rollouts, advantages)


def test_an_impossible_token_leaves_the_loss_and_is_counted(world: World) -> None:
    impossible = world.rollouts()[3].rollout_logprobs.copy()
    impossible[-1] = -np.inf
    rollouts = _corrupted(world.rollouts(), 3, rollout_logprobs=impossible)
    plain = step_on(world.settings(), world.rollouts()).updates[0]
    found = step_on(world.settings(), rollouts).updates[0]
    assert found["logprobs/invalid"] == 1.0
    assert found["loss_tokens"] == plain["loss_tokens"] - 1
    assert np.isfinite(found["loss"])


def test_weights_that_are_nan_are_an_error_and_not_a_loss(world: World) -> None:
    with training(world.settings(train__replay="none")) as step:
        with torch.no_grad():
            next(iter(step.policy.chunks[0].parameters())).fill_(float("nan"))
        with pytest.raises(NumericsError, match="nan"):
            take_step(step, world.rollouts())


def test_gradients_that_are_not_finite_leave_the_weights(world: World) -> None:
    with training(world.settings(train__mini_batches=1)) as step:
        advantages = np.full(NUM_SEQUENCES, 1e38)  # finite themselves, their gradients are not
        before = weights_of(step.policy)
        with pytest.raises(NumericsError, match=r"not finite|norm"):
            take_step(step, world.rollouts(), advantages)
        after = weights_of(step.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_temperature_is_that_of_the_rollouts(world: World, temperature: float) -> None:
    rollouts = sample(world, temperature=temperature)
    found = step_on(world.settings(rollout__temperature=temperature), rollouts).step
    assert 0.0 <= found["rollout/k3"] < 1e-8
    wrong = step_on(world.settings(rollout__temperature=1.0), rollouts).step
    assert wrong["rollout/k3"] > 1e-3


def test_top_p_renormalises_the_rollouts_and_not_the_policy(world: World) -> None:
    """pi_old / mu is the mass of the nucleus: between top_p and 1 for every token, so k1 lies in (0, -log top_p]."""
    rollouts = sample(world, top_p=0.6)
    found = step_on(world.settings(rollout__top_p=0.6), rollouts).step
    assert 0.6 - 1e-3 <= found["rollout/ratio/min"] < 0.95
    assert found["rollout/ratio/max"] <= 1.0 + 1e-3
    assert 0.0 < found["rollout/k1"] <= -np.log(0.6)


def test_micro_batches_do_not_change_the_step(world: World) -> None:
    cut = [step_on(world.settings(train__micro_batch_tokens=size), world.rollouts()) for size in (16, 64, 4096)]
    for other in cut[1:]:
        for one, two in zip(cut[0].updates, other.updates, strict=True):
            # A quantile is the middle of a bin, which float noise may change.
            exact = {name: value for name, value in one.items() if not name.endswith(("/p01", "/p50", "/p99"))}
            assert exact == pytest.approx({name: two[name] for name in exact}, rel=5e-5, abs=2e-6)
        assert cut[0].step == pytest.approx(other.step, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("row", ["adaptive_power", "adaptive theta/mu", "adaptive old/mu"])
@pytest.mark.parametrize("replay", ["none", "r3"])
def test_micro_batches_do_not_change_the_adaptive_power(world: World, row: str, replay: str) -> None:
    settings = {**ROWS[row], "optim__lr": 0.03, "train__replay": replay}
    small, large = (
        step_on(world.settings(train__micro_batch_tokens=size, **settings), world.rollouts()).updates[1]
        for size in (16, 4096)
    )
    assert 0.05 < large["tis/power"] < 1.0
    for key in ("loss", "grad_norm", "tis/power"):
        assert small[key] == pytest.approx(large[key], rel=1e-4), key
    # The effective sample size is what the exponent promises, of the whole mini-batch.
    target = world.settings(**settings).train.resolved_objective.factors[0].ess_target
    assert small["tis/ess/fraction"] == pytest.approx(target, rel=1e-4)


@pytest.mark.parametrize("old", ["recomputed", "rollout"])
def test_micro_batches_do_not_change_a_mask_over_the_mini_batch(world: World, old: str) -> None:
    settings = {**ROWS["m2po"], "optim__lr": 0.01, "train__old_logprobs": old}
    small, large = (
        step_on(world.settings(train__micro_batch_tokens=size, **settings), world.rollouts()).updates
        for size in (16, 4096)
    )
    for one, two in zip(small, large, strict=True):
        assert 0 < two["clip/high"] + two["clip/low"] < 0.6
        for key in ("loss", "grad_norm", "clip/high", "clip/low", "tis/kept_weight"):
            assert one[key] == pytest.approx(two[key], rel=1e-4), key


def test_the_exponent_costs_a_pass_only_where_the_weights_have_moved(world: World) -> None:
    def passes(row: str) -> list[int]:
        with training(world.settings(**ROWS[row])) as step:
            going, per_update = Going(step, world.rollouts()).look(), []
            for index in range(2):
                with counted_passes() as counts:
                    going.update(index)
                per_update.append(len(counts))
        return per_update

    assert passes("adaptive_power") == [1, 2]
    assert passes("adaptive old/mu") == [1, 1]
    assert passes("power") == [1, 1]
    assert passes("m2po") == [1, 2]
    assert passes("kl_grpo strong") == [1, 1]
    assert passes("kl_grpo current") == [1, 2]


@pytest.mark.parametrize("name", ROWS)
def test_every_objective_takes_a_step_also_with_one_mini_batch(world: World, name: str) -> None:
    found = step_on(world.settings(train__mini_batches=1, **ROWS[name]), world.rollouts())
    assert all(np.isfinite(update["loss"]) and update["grad_norm"] > 0 for update in found.updates)
    if name == "geo_rs":
        assert 0 < found.updates[0]["clip/both"] < 1


def test_the_reference_is_another_model_that_never_moves_and_never_replays(world: World) -> None:
    settings = {**ROWS["minirl k3"], "optim__lr": 0.02, "train__mini_batches": 1, "train__min_route_agreement": 0.0}
    columns = {}
    for replay in ("none", "r3"):
        with training(world.settings(train__replay=replay, **settings)) as step:
            for when in ("before", "after"):
                going = Going(step, world.rollouts()).look()
                columns[replay, when] = torch.cat(going.minis[0].ref_logprobs or [])
                going.update(0)
            assert step.reference is not None
            assert not any(p.requires_grad for chunk in step.reference.chunks for p in chunk.parameters())
    plain = columns["none", "before"]
    assert all(torch.equal(plain, column) for column in columns.values())


SAME: dict[str, Any] = {"train__replay_reference": True}


@pytest.mark.parametrize("replay", ["r2", "r3", "r3 with gates"])
@pytest.mark.parametrize("row", ["kl_grpo strong", "kl_grpo current", "minirl k3"])
def test_the_kl_at_equal_weights_is_0_where_the_reference_replays_the_policys_routes(
    world: World, replay: str, row: str
) -> None:
    """The rollouts are of an engine whose weights went through FP8: its routes are not those of the trainer."""
    settings = {**ROWS[row], **SAME, "train__replay": replay[:2], "model__reference": str(world.model)}
    settings["train__replay_gates"] = replay == "r3 with gates"
    with training(world.settings(**settings, train__mini_batches=2 if row.startswith("kl") else 1)) as step:
        going = Going(step, world.rollouts()).look()
        for mini in going.minis:
            if mini.first is not None:
                assert torch.equal(torch.cat(mini.first.logprobs), torch.cat(mini.ref_logprobs or []))
        if row.startswith("kl"):
            assert finalize(going.minis[0].metrics)["kl/ref"] == 0.0
        else:
            assert finalize(going.update(0))["kl/penalty"] == 0.0


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_a_reference_of_other_weights_uses_the_experts_of_the_policy(world: World, replay: str) -> None:
    with training(world.settings(**ROWS["minirl k3"], **SAME, train__replay=replay, train__mini_batches=1)) as step:
        going = Going(step, world.rollouts())
        assert going.plan.old_passes == (replay == "r2")  # which records there
        assert step.reference is not None
        with used_experts(step, step.reference.chunks) as of_reference:
            going.look()
        with used_experts(step) as of_policy:
            going.update(0)
    assert len(of_policy) == len(of_reference) > 0
    recorded = [routes.present for routes in going.minis[0].replayed or [] for _ in range(NUM_MOE_LAYERS)]
    for mine, theirs, rows in zip(of_policy, of_reference, recorded, strict=True):
        rows = torch.ones(len(mine), dtype=torch.bool) if rows is None else rows  # the others route natively
        assert torch.equal(mine[rows], theirs[rows])
        assert rows.sum() > len(rows) / 2


def test_without_a_kl_there_is_no_reference_and_without_a_path_it_is_the_policys_own(world: World) -> None:
    with training(world.settings()) as step:
        assert step.reference is None
    table = world.table()
    del table["model"]["reference"]
    settings = parse(
        table,
        {"train.objective": "grpo", "train.objective_overrides": {"penalties": [{"estimator": "k3", "coef": 0.1}]}},
    )
    penalties = [update["kl/penalty"] for update in step_on(settings, world.rollouts("fp32")).updates]
    assert penalties[0] == pytest.approx(0.0, abs=1e-9)
    assert penalties[1] > 1e-6


def test_advantages_of_zero_give_no_gradient_and_no_nan(world: World) -> None:
    with training(world.settings(train__mini_batches=1)) as step:
        before = weights_of(step.policy)
        taken = take_step(step, world.rollouts(), np.zeros(NUM_SEQUENCES))
        after = weights_of(step.policy)
    assert taken is not None
    assert taken.updates[0]["grad_norm"] == 0.0
    assert taken.updates[0]["loss"] == 0.0
    assert all(np.isfinite(value) for value in taken.updates[0].values())
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_mini_batch_without_any_counted_token_is_an_empty_step(world: World) -> None:
    empty = [replace(r, loss_mask=np.zeros_like(r.loss_mask)) for r in world.rollouts()]
    found = step_on(world.settings(train__mini_batches=1), empty)
    assert found.updates[0]["loss_tokens"] == 0
    assert found.updates[0]["loss"] == 0.0
    assert found.updates[0]["grad_norm"] == 0.0


def test_routes_without_a_mask_are_complete(world: World) -> None:
    bare = [replace(rollout, routed_mask=None) for rollout in world.rollouts()]
    mixed = [*bare[:5], *world.rollouts()[5:]]
    whole = step_on(world.settings(), world.rollouts())
    assert step_on(world.settings(), bare) == whole
    assert step_on(world.settings(), mixed) == whole


@pytest.mark.parametrize("replay", ["none", "r2"])
def test_a_lost_trace_ends_a_step_only_if_it_is_to_be_replayed(world: World, replay: str) -> None:
    bare = {"routed_experts": None, "routed_mask": None, "gate_weights": None}
    lost = [replace(world.rollouts()[0], **bare), *world.rollouts()[1:]]
    settings = world.settings(train__replay=replay, train__mini_batches=1)
    found, whole = step_on(settings, lost), step_on(settings, world.rollouts())
    assert found.updates == whole.updates
    assert not [name for name in found.step if name.startswith("router/")]
    _refused(world.settings(train__replay="r3"), lost, "no routed experts")
