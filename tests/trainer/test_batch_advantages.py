"""Advantages with statistics over the whole step: lengths, several rewards, failed responses; on one rank and two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forks import Job, run_jobs
from oracles import reference
from train_jobs import recorded, sampled, sampler_of
from train_world import GROUP_SIZE, World, layout

from megarl.core.choices.stopping import Uniform
from megarl.core.metrics import finalize
from megarl.engines.player import Failure, Sample
from megarl.trainer.mini_batch import make_rollout
from megarl.trainer.sampling.assignment import RankCoordinates, SequenceAssignment
from megarl.trainer.sampling.step_rollouts import SampleTable, response_advantages

# Groups of 4 over 4 mini-batches of 2 ranks: both cut through groups.
BATCH: dict[str, Any] = {"rollout__prompts_per_step": 6, "train__mini_batches": 4}
WEIGHTS = {"digits": 2.0, "short": -0.5}
SINGLE = {"train__objective": "flash_reinforce", "rollout__group_size": 1, "rollout__prompts_per_step": 24}
SEVERAL: dict[str, Any] = {"reward__function": "train_rewards:digits_and_length", "reward__weights": WEIGHTS}


def advantage(name: str, **more: Any) -> dict[str, Any]:
    return {**BATCH, "train__objective_overrides": {"advantage": name, **more}}


VARIANTS = {
    "opo": advantage("opo"),
    "reinforce_pp": advantage("reinforce_pp"),
    "gdpo": {**advantage("gdpo"), **SEVERAL},
    "batch_mean": {**BATCH, **SINGLE},
    "rloo": {**advantage("rloo"), "reward__function": "train_rewards:sometimes_raises"},
}


@pytest.fixture(scope="module")
def single(world: World) -> dict[str, Any]:
    return {name: found["ranks"][0] for name, found in sampled(world, VARIANTS).items()}


@pytest.mark.multirank
def test_two_ranks_have_the_statistics_of_the_whole_step(
    world: World, single: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = Job("sampled", 2, "train_jobs:sampled", {"world": world, "layouts": VARIANTS})
    found = run_jobs([job], tmp_path_factory.mktemp("sampled"))["sampled"].checked()
    for name, alone in single.items():
        first, second = found[name]["ranks"]
        for n, whole in enumerate(alone["advantages"]):
            assert first["advantages"][n] + second["advantages"][n] == whole, name
        assert first["rewards"] == second["rewards"] == alone["rewards"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_has_the_advantages_of_the_reference(world: World, name: str) -> None:
    settings = world.settings(**VARIANTS[name])
    with layout(settings):
        made = sampler_of(world, settings)
        selections = recorded(made)
        drawn = made.sample_step(0)
        made.engine.close()
        made.close()
    (selection,) = selections
    rollouts = {(r.group, r.sample): r for part in drawn.mini_batches for r in part}
    advantages = {
        (r.group, r.sample): value
        for part, values in zip(drawn.mini_batches, drawn.advantages, strict=True)
        for r, value in zip(part, np.asarray(values).tolist(), strict=True)
    }
    rewards, groups = selection.rewards.tolist(), selection.prompts.tolist()
    lengths = [int(rollouts[key].loss_mask.sum()) for key in selection.keys]
    assert len(set(lengths)) > 1
    if name == "opo":
        expected = reference.opo(rewards, groups, lengths)
    elif name == "reinforce_pp":
        expected = reference.whiten(rewards, lengths)
    elif name == "batch_mean":
        assert len(set(groups)) == len(groups) == 24
        expected = (np.array(rewards) - np.mean(rewards)).tolist()
    elif name == "rloo":
        expected = reference.rloo(rewards, groups)
    else:
        texts = [made.tokenizer.decode(rollouts[k].response_tokens, skip_special_tokens=True) for k in selection.keys]
        digits = [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]
        short = [1 / (1 + len(text)) for text in texts]
        assert rewards == pytest.approx([2 * d - 0.5 * s for d, s in zip(digits, short, strict=True)])
        summed = reference.grpo_sum(list(zip(digits, short, strict=True)), [2.0, -0.5], groups)
        expected = reference.whiten(summed, lengths)
        logged = finalize(drawn.metrics)
        assert logged["reward/component/digits"] == pytest.approx(np.mean(digits))
        assert logged["reward/component/short"] == pytest.approx(np.mean(short))
        assert logged["reward/mean"] == pytest.approx(np.mean(rewards))
    found = [advantages[key] for key in selection.keys]
    assert np.abs(found).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
    if name == "rloo":  # G counts the responses with a reward, which differs between groups
        sizes = set(np.unique(groups, return_counts=True)[1].tolist())
        assert len(sizes) > 1
        assert max(sizes) <= GROUP_SIZE
        failed = advantages.keys() - set(selection.keys)
        assert failed
        assert all(advantages[key] == 0 and not rollouts[key].loss_mask.any() for key in failed)


def test_an_aborted_response_is_in_no_group(world: World) -> None:
    """[1, 0, 0, aborted] is a group of three: an aborted episode is never judged, so it is not selected."""
    config = world.settings(**{**advantage("rloo"), "rollout__prompts_per_step": 1, "train__mini_batches": 1})
    whole = make_rollout(np.arange(5), np.arange(5) > 2)
    samples = {(0, n): Sample(replace(whole, finish_reason="stop"), reward) for n, reward in enumerate((1.0, 0.0, 0.0))}
    samples[0, 3] = Sample(whole, None, failure=Failure("the engine aborted turn 0", "", of_episode=True))
    assert whole.finish_reason == "abort"
    with layout(config):
        table = SampleTable.gather(samples)
    selection = SequenceAssignment(Uniform(4), 1, 1, RankCoordinates(0, 1, 0, 1)).select(table.rewards())
    values, trains = response_advantages(config, config.train.resolved_objective, selection, table)
    assert (selection.keys, trains.tolist()) == ([(0, 0), (0, 1), (0, 2)], [True] * 3)
    assert values.tolist() == [1, -0.5, -0.5]


def test_a_response_that_was_stopped_has_no_share_of_any_reward(world: World) -> None:
    """A function marked ``wrong_if_stopped`` gives no components then: the response is wrong in all of them."""
    config = world.settings(**advantage("gdpo"), **SEVERAL)
    whole = make_rollout(np.arange(5), np.arange(5) > 2)
    samples = {(0, 1): Sample(whole, 0.0, late_reward=True), (0, 0): Sample(whole, 1.75, components=(1.0, 0.5))}
    with layout(config):
        table = SampleTable.gather(samples, tuple(WEIGHTS))
    selection = SequenceAssignment(Uniform(2), 1, 1, RankCoordinates(0, 1, 0, 1)).select(table.rewards())
    values, _ = response_advantages(config, config.train.resolved_objective, selection, table)
    # 2 g - 0.5 g with g = +-0.5 / (sqrt(0.5) + 1e-6), on two tokens each
    assert values.tolist() == pytest.approx([0.75**0.5, -(0.75**0.5)], abs=1e-5)


def test_the_tokens_of_samples_are_counted_by_who_wrote_them(world: World) -> None:
    def sample(*mask: int, **more: Any) -> Sample:
        return Sample(make_rollout(np.arange(len(mask)), np.array(mask, bool)), **{"reward": 1.0, **more})

    samples = {
        (1, 0): sample(0, 1, 1, 0, 1, turns=2),
        (0, 1): Sample(None, None, failure=Failure("ValueError: no", "prompt '1'", of_episode=True)),
        (0, 2): sample(0, 0, reward=None, failure=Failure("TypeError: None", "prompt '0'")),
        (0, 0): sample(0, 0, 0, 1),
    }
    with layout(world.settings()):
        table, empty = SampleTable.gather(samples), SampleTable.gather({}, ("right",))
    columns = ("prompt", "sample", "tokens", "appended", "generated", "judged", "turns", "episode_failed")
    assert np.stack([table.column(name) for name in columns], 1).tolist() == [
        [0, 0, 4, 0, 1, 1, 1, 0],
        [0, 1, 0, 0, 0, 0, 1, 1],
        [0, 2, 2, 0, 0, 0, 1, 0],
        [1, 0, 5, 1, 3, 1, 2, 0],
    ]
    assert empty.rows.shape == (0, table.rows.shape[1] + 1)
