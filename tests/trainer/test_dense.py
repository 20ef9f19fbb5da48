"""Dense models: what a step computes, what a run leaves behind, and that nothing asks for routes that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from local_engines import local_engine
from test_step_oracle import Before, logprobs_of, model_at, oracle
from train_world import NUM_SEQUENCES, Going, World, fixed_advantages, sample, trainer_of, training

from megarl import cli
from megarl.config import Config
from megarl.data.tiny import Family, write_sort_task, write_tiny_model
from megarl.errors import ConfigError
from megarl.megatron import distributed
from megarl.megatron.hf_weights import save_hf
from megarl.models.hf_files import HFCheckpoint
from megarl.ops.report.report import write_report
from megarl.run.metrics_log import read_metrics
from megarl.trainer.loop import train

DENSE = [family for family in get_args(Family) if family != "qwen3_moe"]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """A tiny model of each family, with a task."""
    made = {family: World(tmp_path_factory.mktemp(family)) for family in DENSE}
    for family, one in made.items():
        write_tiny_model(
            one.model, family=family, hidden_size=32, num_layers=2, max_positions=64, initializer_range=0.15
        )
        write_sort_task(one.folder / "task", num_train=64, num_heldout=16, num_demonstrations=0, digits=3)
    return made


def settings_of(world: World, **more: Any) -> Config:
    return world.settings(train__replay="none", rollout__fp8_rounding=False, **more)


@pytest.mark.parametrize("family", DENSE)
def test_loss_and_gradient_norm_are_those_of_plain_pytorch(
    family: str, worlds: dict[str, World], tmp_path: Path
) -> None:
    """Of both mini-batches; the second one has moved away from the rollout."""
    world, temperature = worlds[family], 0.9
    settings = settings_of(world, optim__lr=0.01, rollout__temperature=temperature)
    rollouts = sample(world, temperature=temperature, routes=False)
    rewards, half, found = fixed_advantages(), NUM_SEQUENCES // 2, []
    with training(settings) as step:
        assert step.policy.replay is None
        going = Going(step, rollouts, rewards).look()
        for index in range(2):
            found.append(going.collect_update(index) or {})
            if index == 0:
                save_hf(step.policy.chunks, step.policy.shape, world.model, tmp_path / "moved")
        measured = going.collect_step() or {}
    distributed.shutdown()
    with torch.no_grad():
        model = model_at(world.model)
        old = [logprobs_of(model, r, temperature).tolist() for r in rollouts]
    known = Before(old, old, [[float(a)] * r.num_tokens for r, a in zip(rollouts, rewards, strict=True)])
    for index, theta in enumerate((world.model, tmp_path / "moved")):
        loss, norm, _ = oracle(theta, known, settings, rollouts, slice(index * half, (index + 1) * half), world.model)
        assert found[index]["loss"] == pytest.approx(loss, rel=2e-4, abs=1e-5)
        assert found[index]["grad_norm"] == pytest.approx(norm, rel=2e-4)
    assert 0.0 <= measured["rollout/k3"] < 1e-9
    assert not [name for name in measured if "router" in name or "flip" in name]


@pytest.mark.parametrize("family", DENSE)
def test_a_run_samples_trains_saves_goes_on_and_is_evaluated(
    family: str, worlds: dict[str, World], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, folder = worlds[family], tmp_path / "run"
    settings = settings_of(world, run__dir=str(folder), eval__every=2, optim__lr=0.01)
    train(settings)
    said = capsys.readouterr().out
    assert "flip" not in said
    assert "routes" not in said
    assert "self-test: k3 " in said
    train(settings_of(world, run__dir=str(folder), eval__every=2, run__steps=3, optim__lr=0.01))
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(record["rollout/k3"] < 1e-9 for record in steps)
    assert not [name for record in records for name in record if "router" in name or "flip" in name or "routes" in name]
    report = write_report(folder).read_text()
    assert "outer choice" not in report
    (tmp_path / "run.toml").write_text(settings.to_toml())
    assert cli.main(["eval", str(tmp_path / "run.toml"), "--checkpoint", str(folder), "--trust"]) == 0
    assert "heldout" in capsys.readouterr().out


@pytest.mark.parametrize("family", DENSE)
def test_weights_arrive_in_the_engine_and_in_an_export_as_they_are_in_the_trainer(
    family: str, worlds: dict[str, World], tmp_path: Path
) -> None:
    settings = settings_of(worlds[family], run__dir=str(tmp_path / "run"), optim__lr=0.01)
    distributed.initialize(settings)
    trainer = trainer_of(settings)
    trainer.engine.update_weights(trainer.policy.export(), version=0)
    trainer._step(0)
    save_hf(trainer.policy.chunks, trainer.policy.shape, settings.model.path, tmp_path / "exported")
    held = trainer.engine._views
    fresh = local_engine(settings.model.path)._views
    with HFCheckpoint(tmp_path / "exported") as stored:
        assert stored.names() == held.keys() == fresh.keys()
        assert all(torch.equal(stored.read(name), tensor) for name, tensor in held.items())
    assert sum(not torch.equal(held[name], fresh[name]) for name in held) > len(held) / 2
    trainer.log.close()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"train__replay": "r3"}, 'train.replay: found "r3", expected "none": the qwen3 model'),
        ({"train__replay": "r2"}, 'train.replay: found "r2"'),
        ({"train__max_native_flip": 0.4}, "train.max_native_flip: found 0.4"),
        ({"log__traces_every": 1}, "log.traces_every: found 1"),
    ],
)
def test_what_needs_experts_is_refused_before_the_run_folder_is_made(
    more: dict[str, Any], says: str, worlds: dict[str, World], tmp_path: Path
) -> None:
    settings = worlds["qwen3"].settings(**{"train__replay": "none", "run__dir": str(tmp_path / "run"), **more})
    with pytest.raises(ConfigError, match=says):
        train(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "fetched"),
    [
        ({"train__replay": "none"}, [True, True]),  # the tripwire watches
        ({"train__replay": "none", "train__max_native_flip": "off"}, [False, False]),
        ({"train__replay": "r2", "train__max_native_flip": "off"}, [False, False]),
        ({"train__replay": "r2", "train__max_native_flip": "off", "log__traces_every": 2}, [False, True]),
        ({"train__replay": "none", "train__max_native_flip": "off", "log__traces_every": 2}, [False, True]),
        ({"train__replay": "r3", "train__max_native_flip": "off"}, [True, True]),
    ],
    ids=str,
)
def test_a_step_of_a_moe_fetches_routes_where_they_are_replayed_watched_or_written(
    more: dict[str, Any], fetched: list[bool], world: World, tmp_path: Path
) -> None:
    settings = world.settings(run__dir=str(tmp_path / "run"), **more)
    distributed.initialize(settings)
    trainer, asked, found = trainer_of(settings), [], []
    converse, prepare_step = trainer.engine.converse, trainer.train_step.prepare
    trainer.engine.converse = lambda begin, params, *rest: (  # type: ignore[method-assign]
        asked.append(params.return_routed_experts),
        converse(begin, params, *rest),
    )[1]
    trainer.train_step.prepare = lambda rollouts, *rest: (  # type: ignore[method-assign]
        found.append({rollout.routed_experts is not None for rollout in rollouts}),
        prepare_step(rollouts, *rest),
    )[1]
    trainer.run()
    trainer.log.close()
    assert asked == fetched
    assert found == [{one} for one in np.repeat(fetched, 2).tolist()]
    steps = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "step"]
    assert ["router/native/flip" in record for record in steps] == fetched
    written = sorted((tmp_path / "run" / "traces").glob("*")) if (tmp_path / "run" / "traces").exists() else []
    assert len(written) == (2 if "log__traces_every" in more else 0)
