"""A command of ``megarl`` is a record that ``megarl.cli`` fills from the words of the command line.

The docstrings of a record and of its fields are the help texts. ``run`` imports heavy packages only after the check of
the configuration. ``megarl.commands`` lists all commands; most live beside their subject.
"""

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, dataclass_transform

import pydantic

from megarl.config import Config, process_environment
from megarl.config import file as config_file
from megarl.errors import printable

Overrides = Mapping[str, Any]
"""Dotted key -> value, which win over the configuration file."""

POSITIONAL = "positional"
"""Marks an argument that is given without a flag."""
_T = TypeVar("_T")
Positional = Annotated[_T, POSITIONAL]


class Command(Protocol):
    """A command with its arguments."""

    def run(self, overrides: Overrides) -> int | None:
        """Run the command; return the exit code, None for 0."""
        ...


@dataclass_transform(frozen_default=True)
def command(cls: type[_T]) -> type[_T]:
    """Make a pydantic record with a description for each field, inherited from the parent class if needed."""
    config = pydantic.ConfigDict(use_attribute_docstrings=True)
    record: Any = pydantic.dataclasses.dataclass(frozen=True, config=config)(cls)
    for parent in cls.__mro__[1:-1]:
        for name, field in getattr(parent, "__pydantic_fields__", {}).items():
            field_info = record.__pydantic_fields__[name]
            field_info.description = field_info.description or field.description
    return record


@command
class OnConfiguration:
    """A command with a configuration; only such commands accept overrides."""

    config: Positional[Path]
    """The configuration, a TOML file."""
    trust: bool = False
    """Let a file that other users could have written run code and send data: docs/trust.md."""

    def load(self, overrides: Overrides) -> Config:
        """The configuration."""
        return config_file.load(self.config, overrides, trust=self.trust)

    def load_for_ranks(self, overrides: Overrides) -> Config:
        """Return the configuration, checked for the ranks of torchrun, and set the environment variables of the
        ranks."""
        config = self.load(overrides)
        config.check_world_size(world_size(), self.launch_line(overrides))
        process_environment.apply(config)
        return config

    def words(self, overrides: Overrides) -> list[str]:
        """The words of the command line after the command's name."""
        words = [str(self.config)]
        for name, field in vars(type(self))["__pydantic_fields__"].items():
            if name != "config" and (value := getattr(self, name)) != field.default:
                values = value if isinstance(value, tuple) else () if value is True else (value,)
                words += [f"--{name}", *map(str, values)]
        return words + [word for key, value in overrides.items() for word in (f"--{key}", config_file.as_flag(value))]

    def launch_line(self, overrides: Overrides) -> str:
        """The command line that starts this command on all ranks of [launch]."""
        stage = type(self).__name__.lower()
        return shlex.join(["megarl", "launch", *([] if stage == "train" else [stage]), *self.words(overrides)])


def show(text: str, facts: Mapping[str, Any], as_json: bool) -> None:
    """Print a result as text for people, or its facts as JSON for programs."""
    print(json.dumps(facts, indent=2, default=str) if as_json else printable(text))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
