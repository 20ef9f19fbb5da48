"""Training over the sets that tokens were drawn from: pi is mu while the weights are equal, on any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forks import Job, run_jobs
from train_world import Going, World, old_logprobs, sample, take_step, training

from megarl.config.file import parse
from megarl.run.metrics_log import read_metrics
from megarl.trainer.sampling.requests import eval_params, train_params

KEPT: dict[str, Any] = {"rollout__top_p": 0.7, "rollout__fp8_rounding": False, "train__replay": "r3"}
ADAPTIVE: dict[str, Any] = {
    **KEPT,
    "sampling__rule": "ada_seq_balance",
    "sampling__round_size": 3,
    "sampling__max_samples": 6,
    "train__objective_overrides": {"penalties": [{"estimator": "k3", "coef": 0.2}]},
    "reward__threshold": 0.3,
    "run__steps": 1,
}


def test_old_and_reference_passes_are_over_the_sets(world: World) -> None:
    """With the reference at the policy's weights, all log-probabilities of a token are the engine's."""
    rollouts = sample(world, top_p=0.6, max_kept_ids=1000)
    settings = world.settings(**KEPT, train__objective="kl_grpo", model__reference=str(world.model))
    with training(settings) as step:
        for mini in Going(step, rollouts).look().minis:
            refs = mini.ref_logprobs or []
            for micro, old, ref in zip(mini.micro_batches, old_logprobs(mini), refs, strict=True):
                mask = micro.batch.loss_mask
                assert mask.any()
                assert (old - micro.batch.rollout_logprobs)[mask].abs().max() < 2e-6
                assert (ref - old)[mask].abs().max() < 2e-6


def test_a_nucleus_of_one_token_has_nothing_to_learn(world: World) -> None:
    rollouts = sample(world, top_p=1e-6, max_kept_ids=1000)
    assert not any(rollout.rollout_logprobs.any() for rollout in rollouts)
    assert all((rollout.kept_counts == rollout.loss_mask).all() for rollout in rollouts)
    with training(world.settings(**KEPT)) as step:
        taken = take_step(step, rollouts)
    assert taken is not None
    assert taken.step["rollout/k3"] == 0.0
    assert [update["grad_norm"] for update in taken.updates] == [0.0, 0.0]


def test_what_engines_are_asked_for(world: World) -> None:
    """The sets of training samples with top_p below 1, unless they are not wanted; never of evaluation."""
    for changes, expected in (
        ({"rollout.top_p": 0.7}, 1 << 22),
        ({"rollout.top_p": 0.7, "rollout.max_kept_ids": 5}, 5),
        ({"rollout.top_p": 0.7, "rollout.keep_sampling_mask": False}, None),
        ({}, None),
    ):
        config = parse(world.table(), {**changes, "eval.temperature": 0.0})
        assert train_params(config, (), routes=True).max_kept_ids == expected
        assert eval_params(config, ()).max_kept_ids is None
    config = parse(world.table(), {"train.replay": "r3", "train.replay_gates": True})
    asked = train_params(config, (), routes=True)
    assert (asked.segment_tokens, asked.return_gate_weights, asked.return_indexer_topk) == (None, True, False)
    assert not train_params(config, (), routes=False).return_gate_weights


def test_keys_of_replay_ask_for_their_columns(world: World) -> None:
    """With routes only; and for nothing else."""
    names = {"replay_gates": "return_gate_weights", "replay_indexer": "return_indexer_topk"}
    for key, name in names.items():
        config = parse(world.table(), {"train.replay": "r3", f"train.{key}": True})
        plain = train_params(parse(world.table(), {"train.replay": "r3"}), (), routes=True)
        assert train_params(config, (), routes=True) == replace(plain, **{name: True})
        assert train_params(config, (), routes=False) == replace(plain, return_routed_experts=False)


@pytest.mark.multirank
def test_ranks_exchange_the_sets_of_adaptive_samples(world: World, tmp_path: Path) -> None:
    layouts = {"tp2": {"parallel__tp": 2}, "cp2": {"parallel__cp": 2}}
    jobs = []
    for name, layout in layouts.items():
        overrides = {**ADAPTIVE, **layout, "run__dir": str(tmp_path / name)}
        jobs.append(Job(name, 2, "train_jobs:run", {"world": world, "overrides": overrides}))
    for name, done in run_jobs(jobs, tmp_path / "jobs").items():
        done.checked()
        (step,) = (r for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["kind"] == "step")
        assert abs(step["rollout/k1"]) < 1e-6, name
        assert 0 <= step["rollout/k3"] < 1e-10, name
        assert step["rollout/ratio/min"] > 1 - 1e-4
