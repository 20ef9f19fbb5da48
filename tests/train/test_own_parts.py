"""Parts of the user's own in a run: an engine and an objective that the configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_world import World

from megarl.errors import ConfigError
from megarl.run.metrics_log import read_metrics, without_timing
from megarl.train.loop import train


@pytest.mark.parametrize("engine", ["own_parts:counting", "own_parts:named"])
def test_an_own_engine_trains_as_the_engine_that_it_wraps(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    found = {}
    for name in ("local", engine):
        folder = tmp_path / name.replace(":", "-")
        train(world.settings(run__dir=str(folder), run__steps=1, rollout__fp8_rounding=False, rollout__engine=name))
        found[name] = without_timing(read_metrics(folder / "metrics.jsonl"))
    assert found[engine] == found["local"]
    assert "own engine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rollout__engine": "vllm"}, 'engine: found \'vllm\', expected "local" or "sglang", or package.module:name'),
        ({"rollout__engine": "no_such_module:engine"}, "cannot import 'no_such_module'"),
        ({"rollout__engine": "own_parts:nothing"}, "own_parts.py has nothing named 'nothing'"),
        ({"rollout__engine": "own_parts:not_an_engine"}, "engine: found int at 'own_parts:not_an_engine'"),
        ({"rollout__engine": "own_parts:without_routes"}, 'train.replay: found "r3" with rollout.engine = "own_parts:'),
        (
            {"rollout__engine": "own_parts:counting", "rollout__fp8_rounding": True},
            "rollout.fp8_rounding: found true with engine",
        ),
        ({"rollout__engine": "own_parts:counting", "rollout__top_p": 0.9}, "rollout.top_p: found 0.9, expected 1"),
        ({"rollout__engine": "own_parts:counting", "rollout__one_step_off": True}, "rollout.one_step_off: found true"),
    ],
)
def test_an_own_engine_that_cannot_is_refused(world: World, changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world.settings(**{"rollout__fp8_rounding": False, **changes})
    assert told in str(caught.value)
