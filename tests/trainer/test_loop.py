"""The loop on one rank: what a run folder accepts, what corrupts it, and that sampling follows training."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_rewards
from run_configs import records_of
from train_world import NUM_SEQUENCES, World, trainer_of
from transformers import AutoConfig, AutoModelForCausalLM

from megarl import cli
from megarl.config import Config
from megarl.config.file import parse
from megarl.core.types import Rollout
from megarl.errors import ConfigError, NumericsError
from megarl.megatron import distributed
from megarl.megatron.checkpoints.folders import complete_checkpoints
from megarl.megatron.hf_weights import export_hf, save_hf
from megarl.models.hf_files import HFCheckpoint
from megarl.run.metrics_log import read_metrics
from megarl.trainer.loop import Trainer, train


def run(settings: Config) -> list[dict[str, Any]]:
    """Train and return the records."""
    train(settings)
    return records_of(settings.run_dir)


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


@pytest.fixture
def trainer(world: World, tmp_path: Path) -> Trainer:
    settings = world.settings(run__dir=str(tmp_path / "run"), rollout__fp8_rounding=False)
    distributed.initialize(settings)
    return trainer_of(settings)


def test_the_engine_follows_the_trainer_and_tokens_carry_the_version(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    drawn: list[list[list[Rollout]]] = []
    original = trainer.sampler.sample_step

    def sample_step(*rest: Any) -> Any:
        found = original(*rest)
        drawn.append([[*part] for part in found.mini_batches])  # the loop lets go of them as soon as they are packed
        return found

    trainer.sampler.sample_step = sample_step  # type: ignore[method-assign]
    trainer.run()
    trainer.log.close()
    save_hf(trainer.policy.chunks, trainer.policy.shape, world.model, tmp_path / "trained")
    for step, mini_batches in enumerate(drawn):
        versions = {int(v) for part in mini_batches for r in part for v in r.weight_versions}
        assert versions == {step}
    # The engine of step 2 had the weights after step 1: neither the first nor the last ones.
    second = drawn[1][0]
    for weights in (world.model, tmp_path / "trained"):
        assert np.abs(_teacher_forced(world, weights, second) - _reported(second)).max() > 1e-3
    first = drawn[0][0]
    assert np.abs(_teacher_forced(world, world.model, first) - _reported(first)).max() < 1e-4


def _teacher_forced(world: World, weights: Path, rollouts: list[Any]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(
        weights, config=AutoConfig.from_pretrained(world.model), dtype=torch.float32
    ).eval()
    found = []
    for rollout in rollouts:
        tokens = torch.as_tensor(rollout.tokens, dtype=torch.int64)
        with torch.no_grad():
            full = torch.log_softmax(model(tokens[None]).logits[0], -1)
        picked = full[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        found.append(picked[rollout.loss_mask[1:]])
    return np.concatenate(found)


def _reported(rollouts: list[Any]) -> np.ndarray:
    return np.concatenate([r.rollout_logprobs[r.loss_mask] for r in rollouts])


def test_the_reward_rises(world: World, tmp_path: Path) -> None:
    settings = world.settings(
        run__dir=str(tmp_path / "run"), run__steps=12, rollout__prompts_per_step=16, optim__lr=3e-3
    )
    rewards = [record["reward/mean"] for record in of_kind(run(settings), "step")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2


@pytest.mark.parametrize(
    ("key", "value", "expected"), [("at_end", False, []), ("asynchronous", True, [3]), ("every", 2, [2, 3])]
)
def test_the_last_step_is_saved_by_default_and_the_console_says_where(
    world: World, tmp_path: Path, key: str, value: int, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    run(world.settings(run__dir=str(tmp_path), run__steps=3, **{f"checkpoint__{key}": value}))
    assert [step for step, _ in complete_checkpoints(tmp_path / "checkpoints")] == expected
    said = capsys.readouterr().out
    assert all(f"saved {tmp_path}/checkpoints/step_{step:07d}" in said for step in expected)


def test_more_steps_continue_a_finished_run_exactly(world: World, tmp_path: Path) -> None:
    common: dict[str, Any] = {"checkpoint__every": 2, "eval__every": 2}
    whole = run(world.settings(run__dir=str(tmp_path / "whole"), run__steps=4, **common))
    run(world.settings(run__dir=str(tmp_path / "parts"), run__steps=2, **common))
    for _ in range(2):  # a run that is done is left as it is
        assert run(world.settings(run__dir=str(tmp_path / "parts"), run__steps=4, **common)) == whole


def test_more_steps_stretch_a_schedule_that_ends_with_the_run(world: World, tmp_path: Path) -> None:
    """Without decay_steps the decay ends with the run: a longer run must not go on at a rate of 0."""
    common: dict[str, Any] = {"checkpoint__every": 2, "optim__decay_style": "linear", "run__dir": str(tmp_path / "run")}
    run(world.settings(run__steps=2, **common))
    longer = run(world.settings(run__steps=4, **common))
    rates = [record["lr"] for record in of_kind(longer, "minibatch") if record["step"] > 2]
    assert rates[0] == pytest.approx(1e-3 / 2)
    assert all(rate > 0 for rate in rates)


def test_other_settings_in_the_folder_of_a_run_are_refused(world: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run(world.settings(run__dir=folder, checkpoint__every=1))
    saved = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    changes: dict[str, dict[str, Any]] = {
        "optim.lr": {"optim__lr": 2e-3},
        "train.replay": {"train__replay": "none"},
        "run.seed": {"run__seed": 4},
        "rollout.group_size": {"rollout__group_size": 8},
    }
    for key, change in changes.items():
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            train(world.settings(run__dir=folder, **change))
        distributed.shutdown()
    with pytest.raises(ConfigError, match=r"checkpoint\.resume is off"):
        train(world.settings(run__dir=folder, checkpoint__resume=False))
    distributed.shutdown()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == saved
    # How often to save or evaluate may change, and the staleness, as docs/partial_rollouts.md says.
    train(world.settings(run__dir=folder, checkpoint__every=2, checkpoint__keep=1, rollout__max_staleness=1))


RULES: dict[str, dict[str, Any]] = {
    "one over p": {"sampling__rule": "ada_est", "sampling__max_samples": 12, "estimate__objective": "inverse:1"},
    "log": {"sampling__rule": "ada_est", "sampling__max_samples": 12, "estimate__objective": "log"},
    "tiers": {"sampling__rule": "tiers", "sampling__tiers": [2, 4, 12]},
    "gvm": {"sampling__rule": "gvm", "gvm__pre_samples": 2, "gvm__refresh_every": 2},
    # With workers, the time of each reward decides which prompts are drawn, though not which of them train.
    "refill": {"sampling__refill": True, "reward__function": "train_rewards:starts_low_at_once"},
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_sampling_trains_and_resumes(world: World, tmp_path: Path, rule: str) -> None:
    """Four steps at once, and two and two: the same records."""
    table = {"reward__function": "train_rewards:starts_low", **RULES[rule], "checkpoint__every": 2}
    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
        for steps in parts:
            run(world.settings(run__dir=str(tmp_path / name), **table, run__steps=steps))
    whole, cut = (of_kind(records_of(tmp_path / name), "step") for name in ("whole", "parts"))
    assert cut == whole
    assert (sum(step.get("gvm/first_stage_samples", 0.0) for step in whole) > 0) == (rule == "gvm")


def test_a_run_that_ended_before_its_first_step_leaves_its_folder_to_another(world: World, tmp_path: Path) -> None:
    common: dict[str, Any] = {"eval__every": 1, "run__steps": 1}

    def fail(*_: Any) -> None:
        raise NumericsError("no first step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", fail)
        with pytest.raises(NumericsError, match="no first step"):
            train(world.settings(run__dir=str(tmp_path / "run"), **common))
    distributed.shutdown()
    (evaluated,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (evaluated["kind"], evaluated["step"]) == ("eval", 0)
    anew = run(world.settings(run__dir=str(tmp_path / "run"), optim__lr=2e-3, **common))
    assert anew == run(world.settings(run__dir=str(tmp_path / "fresh"), optim__lr=2e-3, **common))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_is_used(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    more = world.settings(run__dir=str(tmp_path / "run"), checkpoint__every=1, checkpoint__keep=3, run__steps=3)
    straight = run(more)
    for file in ((folder / "step_0000003" / ".metadata"), next((folder / "step_0000002").glob("*.distcp"))):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    capsys.readouterr()
    assert run(more) == straight  # steps 2 and 3 were trained again
    said = " ".join(capsys.readouterr().out.split())
    for name in (r"step_0000003/\.metadata", "step_0000002/__0_"):
        assert re.search(rf"warning: \S*{name}\S* is not the file that was written.*?; step 1 is used instead", said)
    assert "verified" in said
    assert "resumed from" in said
    assert "after step 1;" in said
    names = ["step_0000001", "step_0000002", "step_0000002.damaged", "step_0000003", "step_0000003.damaged"]
    assert sorted(path.name for path in folder.iterdir()) == names
    # Nothing intact: one line, nothing is renamed, and this is no mistake of the user.
    for step in (1, 2, 3):
        (folder / f"step_000000{step}" / "manifest.json").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run.toml").write_text(more.to_toml())
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 1
    distributed.shutdown()
    said = capsys.readouterr().err
    assert "no checkpoint is intact" in said
    assert f"remove {folder} to go on from step 0" in said
    assert sorted(path.name for path in folder.iterdir()) == names
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_ends_the_run_with_one_line_and_a_later_start_goes_on(
    world: World, tmp_path: Path, disk: Callable[[int | None], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = disk(None) / "run"
    first = world.settings(run__dir=str(folder), run__steps=1)
    train(first)
    size = sum(file.stat().st_size for file in (folder / "checkpoints" / "step_0000001").iterdir())
    (tmp_path / "run.toml").write_text(first.to_toml())
    disk(size // 2)
    capsys.readouterr()
    assert cli.main(["train", str(tmp_path / "run.toml"), "--run.steps", "2"]) == 2
    distributed.shutdown()
    # There may be warnings beside it: the status of the run is on the same disk.
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("megarl: error"))
    assert "step_0000002 could not be written" in said
    assert "No space left on device" in said
    assert "; step_0000001 is as it was" in said
    disk(None)
    assert cli.main(["train", str(tmp_path / "run.toml"), "--run.steps", "2"]) == 0
    assert [step for step, _ in complete_checkpoints(folder / "checkpoints")] == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"rollout__group_size": 1, "train__objective": "raft", "reward__threshold": -1.0},
        {"rollout__group_size": 1, "train__objective": "flash_reinforce"},
        {"reward__function": "train_rewards:uniform"},
        {"rollout__max_response_tokens": 1},
        {"train__micro_batch_tokens": 16},
        {"rollout__temperature": 0.7, "rollout__top_p": 0.8},
        {"train__replay": "r2"},
        {"train__replay": "none", "train__mini_batches": 1},
        {"train__old_logprobs": "rollout", "train__mini_batches": 4},
        {"reward__function": "train_rewards:sometimes_raises"},
        {"rollout__max_batch_size": 3},
        {"data__max_prompt_tokens": 4},
    ],
    ids=lambda change: "-".join(map(str, change.values())),
)
def test_odd_settings_train_without_nan(world: World, tmp_path: Path, change: dict[str, Any]) -> None:
    records = run(world.settings(run__dir=str(tmp_path / "run"), eval__every=1, **change))
    assert len(of_kind(records, "step")) == 2
    for record in records:
        bad = [key for key, value in record.items() if isinstance(value, float) and not np.isfinite(value)]
        assert not bad, (record["kind"], record["step"], bad)
    updates = of_kind(records, "minibatch")
    if "uniform" in str(change.get("reward__function")):
        assert all(update["grad_norm"] == 0.0 and update["loss"] == 0.0 for update in updates)
    else:
        assert all(update["grad_norm"] > 0.0 for update in updates)


def test_a_resumed_run_has_the_reference_of_its_beginning(world: World, tmp_path: Path) -> None:
    table = world.table()
    del table["model"]["reference"]  # so the reference is what training starts from, and must not follow it
    table["run"] |= {"dir": str(tmp_path / "run"), "steps": 1}
    table["checkpoint"] = {"every": 1}
    table["train"] |= {"objective": "kl_grpo"}
    records = run(parse(table))
    assert of_kind(records, "step")[0]["kl/ref"] == pytest.approx(0.0, abs=0.05)
    distributed.shutdown()
    settings = parse(table, {"run.steps": 2})
    distributed.initialize(settings)
    trainer = trainer_of(settings)
    assert trainer._resume() == 1
    assert trainer.train_step.reference is not None
    shape = trainer.policy.shape
    reference = dict(export_hf(trainer.train_step.reference.chunks, shape))
    policy = {name: weight.clone() for name, weight in trainer.policy.export()}
    with HFCheckpoint(world.model) as first:
        moved = []
        for name, weight in reference.items():
            assert torch.equal(weight, first.read(name)), name
            moved.append(not torch.equal(policy[name], first.read(name)))
    assert any(moved)


def test_how_many_responses_are_judged_and_why_the_others_are_not_is_said(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward returns None for what it does not like, as a reward with a forgotten return does."""
    steps = {"run__steps": 2, "eval__every": 2, "health__patience_steps": 1}
    run(world.settings(run__dir=str(tmp_path), reward__function="train_rewards:only_starts_low", **steps))
    records, said = read_metrics(tmp_path / "metrics.jsonl"), capsys.readouterr().out
    why = re.escape(
        f"TypeError: the reward function returned None (NoneType), expected a number ({train_rewards.__file__}"
    )
    for record in of_kind(records, "step"):
        counts = f"{record['reward/judged']:.0f} of {NUM_SEQUENCES} judged"
        assert 0 < record["reward/pass_rate"] == record["reward/judged"] / NUM_SEQUENCES < 1 == record["reward/mean"]
        assert re.search(rf"reward 1\.000  pass {record['reward/pass_rate']:.1%}  {counts}  length", said)
        failure = rf"{counts}; first failure: {why}:\d+\); prompt '.+', response '.*', answer '.*'"
        assert re.fullmatch(failure, record["unjudged"])
        assert record["unjudged"] in said
    for record in of_kind(records, "eval"):
        assert record["eval/pass_rate"] == record["eval/judged"] / record["eval/responses"] < 1
        counts = f"{record['eval/judged']:.0f} of {record['eval/responses']:.0f} judged"
        assert re.search(rf"s; heldout: {counts}; first failure: {why}", said)
    assert cli.main(["status", str(tmp_path)]) == 0
    told = of_kind(records, "step")[-1]["unjudged"]
    assert capsys.readouterr().out.count(told) == 2  # also in the verdict


def test_several_benchmarks_and_the_checkpoints_that_stay(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each benchmark has its curve; the average weighs 16 and 64 prompts; every second step stays."""
    common: dict[str, Any] = {"run__steps": 5, "eval__every": 1, "optim__lr": 3e-2}
    settings = world.settings(
        run__dir=str(tmp_path / "run"),
        eval__sets={"other": str(world.folder / "task" / "train.jsonl")},
        checkpoint__every=2,
        checkpoint__keep=1,
        checkpoint__keep_every=2,
        reward__threshold=0.5,
        **common,
    )
    evals = of_kind(run(settings), "eval")
    for record in evals:
        for key in ("pass_rate", "reward", "length_mean"):
            of_each = record[f"eval/heldout/{key}"], record[f"eval/other/{key}"]
            assert record[f"eval/{key}"] == pytest.approx((16 * of_each[0] + 64 * of_each[1]) / 80)
        assert record["eval/responses"] == 80
    said = capsys.readouterr().out
    assert f"pass rate {evals[-1]['eval/pass_rate']:.1%} of 80 responses" in said
    assert [step for step, _ in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 4, 5]
    alone = of_kind(run(world.settings(run__dir=str(tmp_path / "alone"), reward__threshold=0.5, **common)), "eval")
    assert [r["eval/pass_rate"] for r in alone] == [r["eval/heldout/pass_rate"] for r in evals]
    assert not any(key.startswith("eval/heldout") for record in alone for key in record)
