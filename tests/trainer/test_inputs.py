"""A run goes on with the inputs that it began with, by content; another one is named, and refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from train_world import World

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.run import folder
from megarl.run.folder import claim

STEP = '{"kind": "step", "step": 1, "minibatch": null, "wall_s": 1.0}\n'


@pytest.fixture
def place(world: World, tmp_path: Path) -> Path:
    """Copies of all inputs, and a run that has finished a step."""
    for name, source in (("model", world.model), ("reference", world.reference), ("task", world.folder / "task")):
        shutil.copytree(source, tmp_path / name)
    claim(settings(world, tmp_path))
    (tmp_path / "run" / "metrics.jsonl").write_text(STEP)
    return tmp_path


def settings(world: World, place: Path, **more: object) -> Config:
    task = place / "task"
    return world.settings(
        run__dir=str(place.parent / "run" if place.name == "moved" else place / "run"),
        model__path=str(place / "model"),
        model__reference=str(place / "reference"),
        data__train=str(task / "train.jsonl"),
        data__heldout=str(task / "heldout.jsonl"),
        eval__sets={"shown": str(task / "shown.jsonl")} if (task / "shown.jsonl").exists() else {},
        eval__every=1,
        **more,
    )


def rows(name: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def changed(place: Path) -> None:
        file = place / "task" / name
        file.write_text("".join(change(file.read_text().splitlines(True))))

    return changed


def permute_digits(place: Path) -> None:
    file = place / "model" / "tokenizer.json"
    table = json.loads(file.read_text())
    vocabulary = table["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(table))


def change_weights(folder: str) -> Callable[[Path], None]:
    """One number of one tensor, the size of the file stays."""

    def change(place: Path) -> None:
        file = place / folder / "model.safetensors"
        tensors = load_file(file)
        next(iter(tensors.values())).view(-1)[0] += 1
        save_file(tensors, file, metadata={"format": "pt"})

    return change


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "prompts reordered": ("data.train", rows("train.jsonl", lambda lines: lines[::-1])),
    "another answer": ("data.train", rows("train.jsonl", lambda rows: [rows[0].replace('r": "', 'r": "9'), *rows[1:]])),
    "other held-out prompts": ("data.heldout", rows("heldout.jsonl", lambda lines: lines[1:])),
    "digits permuted": ("tokenizer", permute_digits),
    "a chat template": ("tokenizer", lambda place: (place / "model" / "chat_template.jinja").write_text("{{ 1 }}")),
    "another model": ("model.path", change_weights("model")),
    "another configuration": ("model.path", lambda place: (place / "model/generation_config.json").write_text("{}")),
    "another reference": ("model.reference", change_weights("reference")),
    "other types": ("tokenizer", lambda place: (place / "run" / "inputs.json").write_text('{"tokenizer": [1]}')),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_input_that_differs_is_named_and_refused(name: str, world: World, place: Path) -> None:
    key, change = CHANGES[name]
    claim(settings(world, place))  # nothing has changed
    change(place)
    saved = (place / "run" / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=rf"began with other inputs: .*{re.escape(key)} \("):
        claim(settings(world, place))
    assert (place / "run" / "config.toml").read_bytes() == saved
    (place / "run" / "inputs.json").unlink()
    claim(settings(world, place))
    claim(settings(world, place))  # it is the run's own now
    rows("train.jsonl", lambda lines: lines[2:])(place)
    with pytest.raises(ConfigError, match=r"began with other inputs: data\.train"):
        claim(settings(world, place))


def test_the_same_content_elsewhere_goes_on_without_a_word(world: World, place: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    for name in ("model", "reference", "task"):
        shutil.copytree(place / name, moved / name)
        shutil.rmtree(place / name)
    claim(settings(world, moved))


def test_a_benchmark_may_come_but_not_change(world: World, place: Path) -> None:
    shown = place / "task" / "shown.jsonl"
    shutil.copyfile(place / "task" / "heldout.jsonl", shown)
    claim(settings(world, place))
    shown.write_text(shown.read_text().replace('"answer": "', '"answer": "9', 1))
    with pytest.raises(ConfigError, match=r"began with other inputs: eval\.sets\.shown"):
        claim(settings(world, place))
    shown.unlink()
    claim(settings(world, place))


def test_own_code_is_an_input(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "reward_of_mine.py"
    module.write_text("def judge(prompt, response, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = world.settings(reward__function="reward_of_mine:judge")
    before = folder.fingerprint_inputs(config)
    module.write_text("def judge(prompt, response, answer):\n    return 0.0\n")
    after = folder.fingerprint_inputs(config)
    assert [name for name in after if before[name] != after[name]] == ["reward.function"]


def test_large_weights_are_sampled(world: World, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header, the size, and every byte in a block; a byte between two blocks is not seen."""
    monkeypatch.setattr(folder, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(folder, "_BLOCK_BYTES", 256)
    config, file = settings(world, place), place / "model" / "model.safetensors"
    content, before = file.read_bytes(), folder.fingerprint_model(config)
    header = 8 + int.from_bytes(content[:8], "little")
    step = (len(content) - 256) / 63
    assert step > 512
    assert folder.fingerprint_model(config) == before
    for at in (header - 3, len(content) - 1, int(step * 31) + 100):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert folder.fingerprint_model(config) != before, at
    file.write_bytes(content + b"\0")
    assert folder.fingerprint_model(config) != before
    between = int(step * 31) + 400
    file.write_bytes(content[:between] + bytes([content[between] ^ 1]) + content[between + 1 :])
    assert folder.fingerprint_model(config) == before
