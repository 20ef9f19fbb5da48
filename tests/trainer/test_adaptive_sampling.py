"""Every sampling rule in the sampler: on any layout, resumed, one step ahead, and where things fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forks import Job, run_jobs
from run_configs import records_of
from train_jobs import adaptive, recorded, sampler_of, trained_on
from train_world import GROUP_SIZE, World, training

from megarl.core.metrics import finalize
from megarl.core.sampling.gvm import gvm_allocate
from megarl.core.types import Rollout
from megarl.data.prompts import PromptOrder
from megarl.errors import CheckpointError, ConfigError, RolloutError
from megarl.trainer.sampling.allocators import Gvm
from megarl.trainer.sampling.gradient_norms import gradient_norms
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.sampling.step_rollouts import SampleTable, response_advantages
from megarl.trainer.step import TrainStep

PROMPTS = 8
COMMON: dict[str, Any] = {
    "reward__function": "train_rewards:flat_where_told",
    "rollout__prompts_per_step": PROMPTS,
    "reward__threshold": 0.3,
}
BALANCE = {**COMMON, "sampling__rule": "ada_seq_balance", "sampling__round_size": 3, "sampling__max_samples": 9}
POS = {**BALANCE, "sampling__rule": "ada_seq_pos", "sampling__keep": "random"}
REFILL = {**COMMON, "sampling__refill": True, "sampling__spare": 2}
COUNTS = {**COMMON, "sampling__rule": "ada_est", "sampling__max_samples": 9}
GVM = {**COMMON, "sampling__rule": "gvm", "gvm__pre_samples": 3, "gvm__refresh_every": 2}
FEWER = {**COMMON, "sampling__train_size": 2, "sampling__subsample": "any", "sampling__advantages": "objective"}
RULES = {"balance": BALANCE, "pos": POS, "refill": REFILL, "counts": COUNTS, "gvm": GVM, "fewer": FEWER}
TWICE: dict[str, dict[str, Any]] = {
    "ragged": {},
    "ragged kl": {"train__objective": "kl_grpo"},
    "ragged steps": {"train__objective_overrides": {"advantage": "process"}},
    "gvm": {},
    "gvm raft": {"train__objective": "raft", "gvm__block": "output_layer"},
}
"""Runs of a step, on one rank and on two."""
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "ep2": {"parallel__ep": 2}, "tp2": {"parallel__tp": 2}}


def data_of(folder: Path, flat: set[int], rows: int = 64, told: str = "flat") -> str:
    """A data file in which these rows are told to have no contrast."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": f"{n // 10}{n % 10}{n % 7}=", "answer": told if n in flat else "mixed"} for n in range(rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "train.jsonl")


@contextmanager
def sampler(world: World, **overrides: Any) -> Iterator[tuple[Sampler, TrainStep]]:
    with training(world.settings(**overrides)) as train_step:
        made = sampler_of(world, train_step.config, train_step)
        yield made, train_step
        made.close()
        made.engine.close()


@pytest.fixture(scope="module")
def settings_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each rule with its data; refill has some prompts without contrast, and in one case a whole model copy has."""
    folder = tmp_path_factory.mktemp("data")
    some = data_of(folder / "some", set(range(0, 64, 3)))
    first = PromptOrder(64, 3).take(0, PROMPTS).tolist()
    half = data_of(folder / "half", set(first[PROMPTS // 2 :]))
    found = {name: {**rule, "data__train": some} for name, rule in RULES.items()}
    ragged = {"train__mini_batches": 1, "data__train": half, "sampling__max_prompts": PROMPTS, "sampling__spare": 0}
    return {**found, "ragged": {**REFILL, **ragged}}


@pytest.fixture(scope="module")
def by_layout(
    world: World, settings_of: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By layout and rule: two steps."""
    layouts = {f"{layout} {rule}": {**settings_of[rule], **LAYOUTS[layout]} for layout, rule in cases()}
    job = Job("adaptive", 2, "train_jobs:adaptive", {"world": world, "layouts": layouts})
    found = run_jobs([job], tmp_path_factory.mktemp("adaptive"))["adaptive"].checked()
    return {**found, **{f"single {rule}": value for rule, value in adaptive(world, settings_of).items()}}


def cases() -> list[tuple[str, str]]:
    """All rules on all layouts, but for those that differ little from another one."""
    few = ("pos", "fewer")
    return [(layout, rule) for layout in LAYOUTS for rule in (*RULES, "ragged") if rule not in few or layout == "ep2"]


@pytest.mark.multirank
@pytest.mark.parametrize(("layout", "rule"), cases())
def test_ranks_agree_and_train_on_what_was_selected(by_layout: dict[str, Any], layout: str, rule: str) -> None:
    for step in by_layout[f"{layout} {rule}"]:
        first, second = step["ranks"]
        assert first["selection"] == second["selection"]
        assert first["sizes"] == second["sizes"]  # a collective call per sequence waits for nobody
        assert first["fillers_with_loss"] == second["fillers_with_loss"] == 0
        prompts, samples, rewards, _ = first["selection"]
        keys = list(zip(prompts, samples, strict=True))
        if layout == "tp2":
            assert first["mini_batches"] == second["mini_batches"]
            trained = [each for part in first["mini_batches"] for each in part]
        else:
            assert [first["dp_rank"], second["dp_rank"]] == [0, 1]
            trained = [each for rank in step["ranks"] for part in rank["mini_batches"] for each in part]
        assert sorted(key for key, *_ in trained) == keys
        for rank in step["ranks"]:
            for part in rank["mini_batches"]:
                assert [key for key, *_ in part] == sorted(key for key, *_ in part)
        assert all(loss for *_, loss in trained)
        assert len(rewards) == step["metrics"]["sampling/trained"]


@pytest.mark.multirank
@pytest.mark.parametrize(("layout", "rule"), [case for case in cases() if case[1] not in ("refill", "ragged")])
def test_without_refill_every_layout_selects_and_credits_the_same(
    by_layout: dict[str, Any], layout: str, rule: str
) -> None:
    equal_sizes = rule in ("balance", "pos", "fewer")
    for alone, step in zip(by_layout[f"single {rule}"], by_layout[f"{layout} {rule}"], strict=True):
        (one,) = alone["ranks"]
        ranks = step["ranks"][:1] if layout == "tp2" else step["ranks"]
        assert ranks[0]["selection"] == one["selection"]
        parts = [
            sorted(each for rank in ranks for each in rank["mini_batches"][n]) for n in range(len(one["mini_batches"]))
        ]
        if equal_sizes:
            assert parts == one["mini_batches"]
        # Counts that differ are dealt to so many equal parts: only the step as a whole is the same.
        assert sorted(each for part in parts for each in part) == sorted(
            each for part in one["mini_batches"] for each in part
        )
        for name in ("sampling/samples", "sampling/tokens", "sampling/samples_per_prompt", "reward/mean"):
            assert step["metrics"][name] == pytest.approx(alone["metrics"][name])


@pytest.mark.multirank
@pytest.mark.parametrize("layout", ["single", *LAYOUTS])
def test_refill_fills_the_batch_with_contrast_and_takes_no_prompt_twice(by_layout: dict[str, Any], layout: str) -> None:
    seen: list[tuple[int, ...]] = []
    for step in by_layout[f"{layout} refill"]:
        prompts, _, rewards, drawn = step["ranks"][0]["selection"]
        assert len(set(prompts)) == PROMPTS
        values = np.array(rewards).reshape(PROMPTS, GROUP_SIZE)
        assert (values.min(1) < values.max(1)).all()
        assert step["metrics"]["sampling/missing_prompts"] == 0
        assert step["metrics"]["sampling/replaced_prompts"] > 0
        assert len(drawn[0]) == len(set(drawn[0]))
        trained = [each for rank in step["ranks"] for part in rank["mini_batches"] for each in part]
        seen += {tuple(tokens[:length]) for _, tokens, length, *_ in trained}
    assert len(seen) == len(set(seen)) == 2 * PROMPTS


@pytest.mark.multirank
def test_a_copy_without_a_selected_prompt_trains_on_fillers(by_layout: dict[str, Any]) -> None:
    for layout in ("dp2", "ep2"):
        first, second = by_layout[f"{layout} ragged"][0]["ranks"]
        assert [len(part) for part in first["mini_batches"]] == [PROMPTS // 2 * GROUP_SIZE]
        assert second["mini_batches"] == [[]]
        assert second["sizes"] == first["sizes"] == [PROMPTS // 2 * GROUP_SIZE]
        assert by_layout[f"{layout} ragged"][0]["metrics"]["sampling/missing_prompts"] == PROMPTS // 2


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("rule", TWICE)
def test_a_run_on_two_ranks_is_that_on_one(runs: Path, rule: str) -> None:
    """Losses and gradients of a step that one copy spends on fillers, or in which groups differ in size."""
    alone, two = (records_of(runs / f"{rule}_{name}") for name in ("one", "two"))
    assert [(record["kind"], record["step"]) for record in two] == [
        (record["kind"], record["step"]) for record in alone
    ]
    for one, other in zip(alone, two, strict=True):
        for key in one.keys() & {"loss", "grad_norm", "reward/mean", "sampling/samples", "sampling/trained", "entropy"}:
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def runs(world: World, settings_of: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one step on one rank and on two."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = []
    for rule, more in TWICE.items():
        for name, ranks in (("one", 1), ("two", 2)):
            overrides = {**settings_of[rule.split()[0]], **more, "run__steps": 1, "train__mini_batches": 1}
            overrides |= {"run__dir": str(folder / f"{rule}_{name}"), "parallel__ep": ranks}
            jobs.append(Job(f"{rule} {name}", ranks, "train_jobs:run", {"world": world, "overrides": overrides}))
    for ended in run_jobs(jobs, folder / "jobs").values():
        ended.checked()
    return folder


def shown(made: Sampler, step: int) -> dict[str, Any]:
    selections = recorded(made)
    return trained_on(made.sample_step(step), selections[-1])


@pytest.mark.parametrize("rule", list(RULES))
def test_one_step_ahead_is_the_same_step(world: World, settings_of: dict[str, dict[str, Any]], rule: str) -> None:
    with sampler(world, **settings_of[rule]) as (made, train_step):
        now = [shown(made, step) for step in (0, 1)]
        again = Sampler(made.config, made.engine, made.objective, train_step)
        later = [shown(again, 0)]
        again.begin_step(1)
        again.settle()
        selections = recorded(again)
        later.append(trained_on(again.sample_step(1), selections[-1]))
    assert later == now


def test_the_random_choice_is_seeded_by_run_and_step(world: World, settings_of: dict[str, dict[str, Any]]) -> None:
    def chosen(**overrides: Any) -> list[Any]:
        with sampler(world, **{**settings_of["fewer"], **overrides}) as (made, _):
            return [shown(made, step)["selection"][1] for step in (0, 0, 1)]

    first, random = chosen(), chosen(sampling__keep="random")
    assert first[0] == [0, 1] * PROMPTS != random[0]
    assert random[0] == random[1] != random[2]
    assert chosen(sampling__keep="random", run__seed=4)[0] != random[0]
    estimated = {"sampling__rule": "ada_est", "sampling__max_samples": 9}
    assert chosen(**estimated)[0] == [0, 1] * PROMPTS != chosen(**estimated, sampling__keep="random")[0]


def test_gvm_draws_a_first_stage_now_and_then_and_allots_by_it(
    world: World, settings_of: dict[str, dict[str, Any]]
) -> None:
    with sampler(world, **{**settings_of["gvm"], "run__steps": 5}) as (made, train_step):
        allocator = made._allocator
        assert isinstance(allocator, Gvm)
        stages: dict[int, Any] = {}
        presample = allocator._presample

        def drawn(step: int, keys: Any) -> Any:
            assert step not in stages
            stages[step] = presample(step, keys)
            return stages[step]

        allocator._presample = drawn
        selections, looked, states = recorded(made), [], []
        for step in range(5):
            made.sample_step(step)
            looked.append(sorted(stages))
            states.append(json.loads(json.dumps(made.state_dict())))
        assert looked == [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
        for step, selection in enumerate(selections):
            rates, norms = _first_stage(stages[step], train_step)
            counts = gvm_allocate(rates, norms, PROMPTS * GROUP_SIZE)
            assert selection.drawn[1].tolist() == counts.tolist()
            assert len(set(counts.tolist())) > 2
        assert {(prompt, sample) for prompt, sample in stages[0]} == {(p, s) for p in range(PROMPTS) for s in range(3)}
        # Estimates survive a checkpoint: the step that follows needs no first stage.
        later = Sampler(made.config, made.engine, made.objective, train_step)
        later.load_state_dict(states[2])
        again = recorded(later)
        assert isinstance(later._allocator, Gvm)
        later._allocator._presample = lambda step, keys: pytest.fail("a first stage was drawn anew")
        later.sample_step(3)
        assert again[0].drawn.tolist() == selections[3].drawn.tolist()


def _first_stage(stage: dict[tuple[int, int], Any], train_step: TrainStep) -> tuple[np.ndarray, np.ndarray]:
    rates, norms = np.zeros(PROMPTS), np.zeros(PROMPTS)
    for prompt in range(PROMPTS):
        good = [sample.rollout for key, sample in stage.items() if key[0] == prompt and sample.reward > 0.3]
        rates[prompt] = len(good) / 3
        each = [float(gradient_norms(train_step, [rollout], "embedding")[0]) for rollout in good]
        norms[prompt] = np.mean(each) if each else 0.0
    return rates, norms


def test_the_first_stage_has_noise_of_its_own(world: World, settings_of: dict[str, dict[str, Any]]) -> None:
    with sampler(world, **settings_of["gvm"]) as (made, _):
        keys = [(prompt, sample) for prompt in range(PROMPTS) for sample in range(3)]
        stage = made._presample(0, keys)
        trained = made.sample_step(0)
    responses = {key: tuple(sample.rollout.response_tokens) for key, sample in stage.items() if sample.rollout}
    same = [
        tuple(rollout.response_tokens) == responses.get((rollout.group, rollout.sample))
        for part in trained.mini_batches
        for rollout in part
    ]
    assert sum(same) <= 2


def test_ada_est_allots_more_to_prompts_that_failed_before(
    world: World, settings_of: dict[str, dict[str, Any]]
) -> None:
    """Steps over the same eight prompts: counts follow from the fading counts of the steps before."""
    overrides = {**settings_of["counts"], "data__train": data_of(world.folder / "eight", set(), rows=PROMPTS)}
    with sampler(world, **overrides) as (made, _):
        selections = recorded(made)
        indices = [[prompt.index for prompt in made._step_prompts(step)] for step in range(4)]
        for step in range(4):
            made.sample_step(step)
    samples, positives, pool = np.zeros(PROMPTS), np.zeros(PROMPTS), np.zeros(2)
    counts = np.zeros(0)
    for index, selection in zip(indices, selections, strict=True):
        mean = (1 + pool[1]) / (2 + pool[0])
        rates = (positives[index] + 2 * mean) / (samples[index] + 2)
        counts = selection.drawn[1]
        assert counts.sum() == PROMPTS * GROUP_SIZE
        order = np.argsort(rates)
        assert (np.diff(counts[order]) <= 0).all() or np.ptp(rates[order]) == 0
        samples[index] = 0.9 * samples[index] + selection.drawn[2]
        positives[index] = 0.9 * positives[index] + selection.drawn[3]
        pool = 0.9 * pool + [PROMPTS, (selection.drawn[3] / selection.drawn[2]).sum()]
    assert np.ptp(counts) > 0


@pytest.mark.parametrize(("saved", "loaded"), [("gvm", "counts"), ("balance", "gvm")])
def test_estimates_of_another_kind_are_refused(
    world: World, settings_of: dict[str, dict[str, Any]], saved: str, loaded: str
) -> None:
    with sampler(world, **settings_of[saved]) as (made, _):
        state = made.state_dict()
    expected = pytest.raises(CheckpointError, match="or of another sampling")
    with sampler(world, **settings_of[loaded]) as (made, _), expected:
        made.load_state_dict(state)


@pytest.mark.parametrize("rule", list(RULES))
class TestFailures:
    def test_rewards_that_fail_cost_their_samples(
        self, world: World, settings_of: dict[str, dict[str, Any]], rule: str
    ) -> None:
        overrides = {**settings_of[rule], "reward__function": "train_rewards:sometimes_raises_here"}
        with sampler(world, **overrides) as (made, _):
            selections = recorded(made)
            drawn = made.sample_step(0)
            made.sample_step(1)
        metrics, selection = finalize(drawn.metrics), selections[0]
        assert 0 < metrics["reward/error_fraction"] < 1
        assert metrics["sampling/failed"] > 0
        assert (selection.drawn[2] <= selection.drawn[1]).all()
        assert selection.drawn[1].sum() - selection.drawn[2].sum() > 0
        assert drawn.unjudged is not None
        for part, advantages, rows in zip(drawn.mini_batches, drawn.advantages, drawn.judged.owned, strict=True):
            assert np.isfinite(np.asarray(advantages)).all()
            for rollout, row in zip(part, rows, strict=True):
                assert rollout.loss_mask.any() == (row < len(selection.prompts))

    def test_a_prompt_whose_rewards_all_fail_costs_nothing_but_itself(
        self, world: World, settings_of: dict[str, dict[str, Any]], rule: str, tmp_path: Path
    ) -> None:
        failing = set(PromptOrder(64, 3).take(0, 2).tolist())
        overrides = {
            **settings_of[rule],
            "reward__function": "train_rewards:fails_where_told",
            "data__train": data_of(tmp_path, failing, told="fails"),
        }
        with sampler(world, **overrides) as (made, _):
            selections = recorded(made)
            made.sample_step(0)
        assert not set(selections[0].prompts.tolist()) & {0, 1}
        assert len(set(selections[0].prompts.tolist())) >= (PROMPTS if rule == "refill" else 1)

    def test_an_engine_that_fails_midway_ends_the_step_and_not_the_process(
        self, world: World, settings_of: dict[str, dict[str, Any]], rule: str
    ) -> None:
        with sampler(world, **settings_of[rule]) as (made, _):
            sound = made.engine
            made.engine = Failing(sound, RolloutError("the engine broke"), after=2)
            before = made.state_dict()
            with pytest.raises(RolloutError, match="the engine broke"):
                made.sample_step(0)
            assert made.state_dict() == before  # which is saved then
            made.engine = sound
            made.sample_step(0)


class Failing:
    """The real engine, until a session has asked it for so many responses; then an error."""

    def __init__(self, engine: Any, error: Exception, after: int) -> None:
        self.engine, self.error, self.left = engine, error, after

    def converse(self, begin: Any, *arguments: Any) -> None:
        self.engine.converse(lambda session: begin(_FailingSession(session, self)), *arguments)


class _FailingSession:
    def __init__(self, session: Any, failing: Failing) -> None:
        self._session, self._failing = session, failing
        self.start = session.start

    async def sample(self, request: Any) -> Rollout:
        found = await self._session.sample(request)
        self._failing.left -= 1
        if self._failing.left == -1:
            raise self._failing.error
        return found


def test_no_contrast_under_refill_ends_the_run_and_says_what_to_do(world: World, tmp_path: Path) -> None:
    overrides = {**REFILL, "data__train": data_of(tmp_path, set(range(64)))}
    expected = pytest.raises(RolloutError, match="step 1: none of 32 prompts had rewards that differ: take other")
    with sampler(world, **overrides) as (made, _), expected:
        made.sample_step(0)


@pytest.mark.parametrize("threshold", [0.2, 0.6])
def test_one_threshold_says_what_is_correct(world: World, threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, RAFT and both pass rates count the same responses, with rewards between 0 and 1."""
    overrides = {
        "reward__threshold": threshold,
        "train__objective": "raft",
        "sampling__rule": "ada_seq_pos",
        "sampling__advantages": "objective",
        "data__train": data_of(world.folder / "correct", set(range(0, 64, 3))),
        "reward__function": "train_rewards:flat_where_told",
    }
    with sampler(world, **overrides) as (made, _):
        selections = recorded(made)
        seen: list[SampleTable] = []
        original = SampleTable.gather
        monkeypatch.setattr(SampleTable, "gather", lambda *given: seen.append(original(*given)) or seen[-1])
        drawn = made.sample_step(0)
        accepted = response_advantages(made.config, made.objective, selections[0], seen[0])[0]
        found = finalize(drawn.metrics)
        evaluated, _ = made.evaluate()
    (selection,) = selections
    _, _, judged, positives = selection.drawn
    assert 0 < positives.sum() < judged.sum()
    assert found["reward/pass_rate"] == pytest.approx(positives.sum() / judged.sum())
    assert accepted.tolist() == [float(reward > threshold) for reward in selection.rewards]
    assert evaluated["eval/pass_rate"] == (seen[-1].column("reward") > threshold).mean()


@pytest.mark.parametrize(("rule", "scale"), [("balance", "rate"), ("counts", "root_rate"), ("gvm", "rate")])
def test_negative_rewards_are_no_pass_rates(
    world: World, settings_of: dict[str, dict[str, Any]], rule: str, scale: str
) -> None:
    """At the first such reward, and not only when a prompt's mean is negative."""
    overrides = {**settings_of[rule], "reward__function": "train_rewards:signed", "credit__scale": scale}
    overrides["sampling__advantages"] = "credit"
    expected = pytest.raises(ConfigError, match=rf'credit.scale: found "{scale}".*reward is -')
    with sampler(world, **overrides) as (made, _), expected:
        made.sample_step(0)
