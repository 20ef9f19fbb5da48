"""The sampling half of a step: who draws what, with which noise, and what becomes of rewards."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import train_rewards
from forks import Job, run_jobs
from train_jobs import sampled, sampler_of
from train_world import GROUP_SIZE, NUM_GROUPS, NUM_SEQUENCES, World, layout
from transformers import AutoTokenizer

from megarl.core.metrics import finalize
from megarl.core.types import Rollout
from megarl.data.prompts import Prompt
from megarl.data.tiny import EOS_ID
from megarl.engines.player import Draw
from megarl.errors import CheckpointError, ConfigError, DataError, RewardError, RolloutError, StopError, WeightSyncError
from megarl.trainer.sampling.evaluation import stop_tokens
from megarl.trainer.sampling.requests import EVALUATE, TRAIN, make_requests, sampling_seed
from megarl.trainer.sampling.sampler import Sampler


def test_each_request_has_a_seed_of_its_own() -> None:
    seeds = [
        sampling_seed(run, purpose, step, group, sample)
        for run in (0, 1)
        for purpose in (TRAIN, EVALUATE)
        for step in range(6)
        for group in range(20)
        for sample in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    numpys = np.random.SeedSequence([2**70, TRAIN, 5, 7, 1]).generate_state(1, np.uint64)[0]
    assert sampling_seed(2**70, TRAIN, 5, 7, 1) == numpys
    prompts = [Prompt(row, np.array([row], np.int32), str(row), "", "") for row in range(32)]
    request, prompt = make_requests(7, EVALUATE, 3, prompts.__getitem__)(31, 9)
    assert (request.group, request.sample, request.seed) == (31, 9, sampling_seed(7, EVALUATE, 3, 31, 9))
    assert request.prompt_tokens is prompt.tokens is prompts[31].tokens


@contextmanager
def sampler(world: World, **overrides: Any) -> Iterator[Sampler]:
    settings = world.settings(**overrides)
    with layout(settings):
        made = sampler_of(world, settings)
        yield made
        made.engine.close()
        made.close()


@pytest.fixture(scope="module")
def by_layout(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Step 1 and an evaluation, sampled on one rank and on two."""
    # Groups of 4 over 4 mini-batches of 2 ranks: 6 sequences of a mini-batch cut through groups, and so do the ranks.
    batch = {"rollout__prompts_per_step": 6, "train__mini_batches": 4}
    two = {"dp2": batch, "ep2": {**batch, "parallel__ep": 2}, "tp2": {**batch, "parallel__tp": 2}}
    job = Job("sampled", 2, "train_jobs:sampled", {"world": world, "layouts": two})
    found = run_jobs([job], tmp_path_factory.mktemp("sampled"))["sampled"].checked()
    return {**found, **sampled(world, {"single": batch})}


@pytest.mark.multirank
@pytest.mark.parametrize("name", ["dp2", "ep2", "tp2"])
def test_two_ranks_draw_and_divide_the_same_step_as_one(by_layout: dict[str, Any], name: str) -> None:
    (alone,) = by_layout["single"]["ranks"]
    ranks = by_layout[name]["ranks"]
    for column in ("tokens", "advantages"):
        for n, whole in enumerate(alone[column]):
            if name == "tp2":  # one model copy: both of its ranks hold everything
                assert ranks[0][column][n] == ranks[1][column][n] == whole
            else:
                assert [rank["dp_rank"] for rank in ranks] == [0, 1]
                assert ranks[0][column][n] + ranks[1][column][n] == whole
    assert ranks[0]["rewards"] == ranks[1]["rewards"] == alone["rewards"]
    assert by_layout[name]["eval"] == by_layout["single"]["eval"]


def test_held_out_prompts_have_a_split_of_their_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sorting"
    folder.mkdir()
    for split in ("train", "test"):
        rows = pa.table({"prompt": [f"{n}{len(split)}1=" for n in range(3)], "answer": [split] * 3})
        parquet.write_table(rows, folder / f"{split}.parquet")
    train: dict[str, Any] = {"data__train": str(folder), "data__split": "train"}
    heldout: dict[str, Any] = {"data__heldout": str(folder)}
    own_split = {"data__heldout_split": "test"}
    assert _answers(world, train | heldout | own_split) == ({"train"}, {"test"})
    assert _answers(world, train | heldout) == ({"train"}, {"train"})
    of_files = _answers(world, {})
    assert _answers(world, train) == ({"train"}, of_files[1])  # a held-out file has no split
    assert _answers(world, heldout | own_split) == (of_files[0], {"test"})
    with pytest.raises(DataError, match=r"splits train, test; choose one with --split, data\.split or data\.heldout"):
        _answers(world, heldout)


def _answers(world: World, overrides: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Of the training prompts, and of the held-out ones."""
    with sampler(world, **overrides) as made:
        heldout = made.benchmarks["heldout"].prompts
        return {prompt.answer for prompt in made.prompts}, {prompt.answer for prompt in heldout}


def test_a_response_without_reward_trains_nothing_and_is_in_no_statistic(world: World) -> None:
    with sampler(world, reward__function="train_rewards:sometimes_raises", train__mini_batches=1) as made:
        drawn = made.sample_step(0)
        config = made.config.model_copy(update={"reward": world.settings().reward})
        plain = Sampler(config, made.engine, made.objective).sample_step(0)
        tokenizer = made.tokenizer
    (rollouts,), (advantages,) = drawn.mini_batches, drawn.advantages
    (judged,), _ = plain.mini_batches, plain.advantages
    texts = [tokenizer.decode(r.response_tokens, skip_special_tokens=True) for r in judged]
    failed = np.array([text[:1].isdigit() for text in texts])
    assert 0 < failed.sum() < NUM_SEQUENCES
    for rollout, bad in zip(rollouts, failed, strict=True):
        assert rollout.loss_mask.any() != bad
    assert not advantages[failed].any()
    rewards = np.array([sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts])
    groups = np.repeat(np.arange(NUM_GROUPS), GROUP_SIZE)
    for group in range(NUM_GROUPS):
        own = (groups == group) & ~failed
        if own.any():
            expected = rewards[own] - rewards[own].mean()
            np.testing.assert_allclose(advantages[own], expected, atol=1e-12)
    metrics = finalize(drawn.metrics)
    assert metrics["reward/error_fraction"] == pytest.approx(failed.mean())
    assert metrics["reward/mean"] == pytest.approx(rewards[~failed].mean())
    assert drawn.unjudged.startswith(f"{NUM_SEQUENCES - failed.sum()} of {NUM_SEQUENCES} judged; first failure: ")
    assert metrics["reward/pass_rate"] == pytest.approx((rewards[~failed] > 0.7).sum() / NUM_SEQUENCES)
    assert (metrics["reward/judged"], metrics["reward/responses"]) == (NUM_SEQUENCES - failed.sum(), NUM_SEQUENCES)


@pytest.mark.parametrize("selection", ["mixed_groups", "positive"])
def test_responses_that_are_not_selected_leave_the_denominators(world: World, selection: str) -> None:
    """The reward fails on some responses and is uniform in some groups, which only the second kind of row ignores."""
    overrides = {"train__mini_batches": 1, "train__objective_overrides": {"selection": selection}}
    with sampler(world, reward__function="train_rewards:often_uniform", **overrides) as made:
        drawn = made.sample_step(0)
    (rollouts,), (advantages,) = drawn.mini_batches, drawn.advantages
    rewards = drawn.judged.rewards[:-1].reshape(NUM_GROUPS, GROUP_SIZE)
    mixed = np.repeat(rewards.min(1) < rewards.max(1), GROUP_SIZE)
    assert 0 < mixed.sum() < NUM_SEQUENCES
    expected = mixed & ((advantages > 0) | (selection != "positive"))
    assert [bool(r.loss_mask.any()) for r in rollouts] == expected.tolist()


def test_rewards_of_steps_become_advantages_of_tokens(world: World) -> None:
    """Each character is a step here: a token's advantage is the sum of the standardised rewards from its own on."""
    overrides = {"advantage": "process"}
    with sampler(world, reward__function="train_rewards:digit_by_digit", train__objective_overrides=overrides) as made:
        drawn = made.sample_step(0)
        tokenizer = made.tokenizer
    groups: dict[int, list[list[float]]] = {}
    for part in drawn.mini_batches:
        for rollout in part:
            texts = [tokenizer.decode([token], skip_special_tokens=True) for token in rollout.response_tokens]
            scores = [float(text.isdigit()) for text in texts if text]
            groups.setdefault(rollout.group, []).append(scores or [0.0])
    checked = 0
    for part, columns in zip(drawn.mini_batches, drawn.advantages, strict=True):
        for rollout, column in zip(part, columns, strict=True):
            every = np.concatenate(groups[rollout.group])
            texts = [tokenizer.decode([token], skip_special_tokens=True) for token in rollout.response_tokens]
            characters = [float(text.isdigit()) for text in texts if text]
            if every.std() == 0 or not characters:
                continue
            standardised = (np.array(characters) - every.mean()) / (every.std(ddof=1) + 1e-6)
            to_go = np.cumsum(standardised[::-1])[::-1]
            first = rollout.prompt_length
            places = [first + index for index, text in enumerate(texts) if text]
            np.testing.assert_allclose(column[places], to_go, atol=1e-9)
            checked += 1
    assert checked > NUM_SEQUENCES // 2


def test_a_reward_that_fails_on_everything_ends_the_run(world: World) -> None:
    with sampler(world, reward__function="train_rewards:always_raises") as made:
        lines, first = inspect.getsourcelines(train_rewards.always_raises)
        place = re.escape(f"({train_rewards.__file__}:{first + len(lines) - 1})")
        told = rf"no response has a reward; first: ValueError: no verdict {place}; prompt '.*', response '.*', answer '"
        with pytest.raises(RewardError, match=rf"step 1: {told}"):
            made.sample_step(0)
        with pytest.raises(RewardError, match=rf"evaluation on heldout: {told}"):
            made.evaluate()


def test_a_server_that_does_not_answer_is_no_error_of_the_reward(world: World) -> None:
    with sampler(world, reward__function="train_rewards:has_no_server") as made:
        with pytest.raises(RolloutError, match="no response has a reward; first: RuntimeError: no answer") as raised:
            made.sample_step(0)
        assert type(raised.value) is RolloutError  # which a launcher starts again


def test_training_and_evaluation_noise(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training noise changes with the step and repeats with it; evaluation repeats always and is never training's."""
    with sampler(world, data__heldout=str(world.folder / "task" / "train.jsonl"), train__mini_batches=1) as made:
        first, again, later = (made.sample_step(step).mini_batches[0] for step in (0, 0, 1))
        drawn: list[list[Rollout]] = []
        original = Draw.run

        def kept(*rest: Any) -> Any:
            samples = original(*rest)
            drawn.append([samples[key].rollout for key in sorted(samples)])
            return samples

        monkeypatch.setattr(Draw, "run", kept)
        evaluated = [made.evaluate(), made.evaluate()]
    assert [r.tokens.tolist() for r in first] == [r.tokens.tolist() for r in again]
    assert [r.tokens.tolist() for r in first] != [r.tokens.tolist() for r in later]
    assert evaluated[0] == evaluated[1]
    assert [r.tokens.tolist() for r in drawn[0]] == [r.tokens.tolist() for r in drawn[1]]
    trained = {tuple(r.tokens[: r.prompt_length]): tuple(r.response_tokens) for r in first if r.sample == 0}
    held = {tuple(r.tokens[: r.prompt_length]): tuple(r.response_tokens) for r in drawn[0]}
    assert set(trained) <= set(held)
    assert sum(trained[prompt] == held[prompt] for prompt in trained) <= 1


def test_what_is_drawn_in_the_background_is_what_would_be_drawn_now(world: World) -> None:
    """And its count, and the age of its weights."""
    with sampler(world, train__mini_batches=1) as made:
        now = made.sample_step(3)
        made.begin_step(3)
        made.settle()
        finished: list[int] = []
        made.on_finish = finished.append
        later = made.sample_step(3)
    assert sum(finished) == NUM_SEQUENCES
    for one, other in zip(now.mini_batches[0], later.mini_batches[0], strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    version = now.mini_batches[0][0].weight_versions[0]
    assert finalize(later.metrics)["rollout/staleness_mean"] == 3 - version


def test_prompts_that_were_passed_over_must_train(world: World) -> None:
    """A checkpoint of partial rollouts goes on without them only if no younger prompt has trained."""
    state = {"position": 8, "estimates": {}, "trained": {"first": 8, "trained": [10], "limit": 1}}
    with sampler(world) as made:
        with pytest.raises(CheckpointError, match=r"passed over prompts.*keep rollout\.max_staleness"):
            made.load_state_dict(state)
        made.load_state_dict(state | {"trained": {"first": 8, "trained": [], "limit": 1}})
        assert made.state_dict() == {"position": 8, "estimates": {}}
    with sampler(world, rollout__max_staleness=1) as made:
        made.load_state_dict({"position": 8, "estimates": {}})  # a checkpoint of whole rollouts
        assert made.state_dict()["trained"] == {"first": 8, "trained": [], "limit": 1}
        made.load_state_dict(state)
        drawn = made.sample_step(1)
    assert 8 in drawn.places
    assert 10 not in drawn.places


def test_an_error_in_the_background_is_raised_by_the_step(world: World) -> None:
    with sampler(world, train__mini_batches=1) as made:
        made.engine.close()
        made.begin_step(0)
        made.settle()
        with pytest.raises(WeightSyncError, match="closed"):
            made.sample_step(0)


def test_stop_tokens_come_from_the_checkpoint(world: World, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    assert stop_tokens(str(world.model), tokenizer) == (EOS_ID,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert stop_tokens(str(tmp_path), tokenizer) == (EOS_ID, 5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert stop_tokens(str(tmp_path), tokenizer) == (EOS_ID, 9)
    tokenizer.eos_token = None
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="no end token"):
        stop_tokens(str(tmp_path), tokenizer)


class _Retracting:
    """The real engine, but for the versions that one of its responses reports: as if it had been prefilled anew."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def close(self) -> None:
        self.engine.close()

    def prove_weights(self) -> bool:
        return self.engine.prove_weights()

    def converse(self, begin: Any, *arguments: Any) -> None:
        self.engine.converse(lambda session: begin(_RetractingSession(session)), *arguments)


class _Foreign(_Retracting):
    """The real engine, whose weights somebody else changes during the first draw."""

    changes = 1

    def prove_weights(self) -> bool:
        self.changes -= 1
        return self.changes >= 0

    def converse(self, *arguments: Any) -> None:
        self.engine.converse(*arguments)


def test_samples_of_foreign_weights_are_refused(world: World) -> None:
    with sampler(world) as made:
        made.sample_step(0)
        made.engine = foreign = _Foreign(made.engine)
        refused = pytest.raises(RolloutError, match="somebody else has changed the weights of a server")
        with refused:
            made.sample_step(0)
        made.sample_step(0)
        foreign.changes = 1
        made.begin_step(1)
        with refused:
            made.sample_step(1)
        foreign.changes = 1
        made.begin_step(3)
        with refused:
            made.settle()  # an evaluation sends other weights next, so nobody could tell later
        foreign.changes = 1
        with refused:
            made.evaluate()


class _RetractingSession:
    def __init__(self, session: Any) -> None:
        self.session = session
        self.start = session.start

    async def sample(self, request: Any) -> Rollout:
        found = await self.session.sample(request)
        if request.group or request.sample:
            return found
        return replace(found, route_versions=found.weight_versions + 1)


def test_routes_of_other_weights_are_counted(world: World) -> None:
    with sampler(world) as made:
        made.engine = _Retracting(made.engine)
        stale = finalize(made.sample_step(0).metrics)["routes/stale_rows_fraction"]
        assert 0 < stale < 0.2


@pytest.mark.parametrize("where", ["ahead", "given samples"])
def test_a_request_to_stop_ends_waits_that_no_progress_bar_counts(world: World, where: str) -> None:
    asked = False

    def while_waiting(count: int) -> None:
        if asked:
            raise StopError("asked to stop")

    with sampler(world) as first:
        made = Sampler(first.config, first.engine, first.objective, on_finish=while_waiting)
        if where == "ahead":
            made.begin_step(0)
            made.settle()
            rollouts = made.sample_step(0).mini_batches
            versions = {int(version) for part in rollouts for rollout in part for version in rollout.weight_versions}
            assert min(versions) == first.engine.weight_version
            asked = True
            made.begin_step(1)
            made.settle()  # not raised here: other ranks may not have heard of it
            with pytest.raises(StopError):
                made.sample_step(1)
        else:
            assert len(made._presample(0, [(0, 0), (1, 0)])) == 2
            asked = True
            with pytest.raises(StopError):
                made._presample(0, [(0, 0), (1, 0)])
