"""The smallest configuration of a run: as a table, checked, as the text of a file, and in a folder that could train."""

from __future__ import annotations

import copy
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from megarl.config import Config
from megarl.config.file import parse
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.errors import ConfigError
from megarl.run.metrics_log import Record, read_metrics

SMALLEST: Mapping[str, Mapping[str, Any]] = {
    "run": {"steps": 3},
    "model": {"path": "models/tiny"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_response_tokens": 10},
    "optim": {"lr": 1e-4},
}


def parsed(**overrides: Any) -> Config:
    """Return the configuration with overrides, such as ``rollout__top_p=0.9``."""
    return parse(SMALLEST, {key.replace("__", "."): value for key, value in overrides.items()})


def refusal(**overrides: Any) -> str:
    """Return the line that refuses these overrides."""
    with pytest.raises(ConfigError) as caught:
        parsed(**overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_text(**overrides: Any) -> str:
    """Return the configuration with overrides as TOML, unchecked."""
    tables: Any = copy.deepcopy(dict(SMALLEST))
    for key, value in overrides.items():
        table, _, name = key.partition("__")
        if name:
            tables.setdefault(table, {})[name] = value
        else:
            tables[table] = value
    return tomli_w.dumps(tables)


def read_rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (words, parts of a message) of lines ``words | part | part``; a line that begins with blanks continues."""
    for row in text.strip().replace("\n    |", " |").splitlines():
        words, *parts = row.split(" | ")
        yield words, parts


def read_words(words: str) -> dict[str, Any]:
    """Return dotted key -> value of ``key=value`` words; a value that is no TOML is text."""
    overrides: dict[str, Any] = {}
    for word in shlex.split(words):
        key, _, text = word.partition("=")
        overrides[key] = text
        with suppress(tomllib.TOMLDecodeError):
            overrides[key] = tomllib.loads(f"value = {text}")["value"]
    return overrides


TRAINABLE = run_text(
    run__dir="run", model__path="model", data__train="task/train.jsonl",
    sft={"data": "task/demonstrations.jsonl", "steps": 2, "batch_size": 4, "lr": 1e-3},
)  # fmt: skip


@pytest.fixture(scope="session")
def trainable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its task and the configuration of a run on them."""
    folder = tmp_path_factory.mktemp("trainable")
    write_tiny_model(folder / "model", hidden_size=16, num_layers=1, num_experts=4, expert_width=8)
    write_sort_task(folder / "task", num_train=8, num_heldout=4, num_demonstrations=8)
    (folder / "run.toml").write_text(TRAINABLE)
    return folder


@pytest.fixture
def here(trainable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, a copy of it."""
    folder = shutil.copytree(trainable, tmp_path / "here")
    monkeypatch.chdir(folder)
    return folder


def records_of(folder: Path) -> list[Record]:
    """Return the records of a run without clock-dependent values: equal for two equal computations."""
    records, timing = read_metrics(folder / "metrics.jsonl"), ("wall_s", "time/", "speed/")
    return [{name: x for name, x in record.items() if not name.startswith(timing)} for record in records]
