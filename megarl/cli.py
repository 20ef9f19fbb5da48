"""The command line: ``megarl train | launch | plan | status | report`` and more, see ``megarl --help``.

Every key of the configuration is also a flag, ``--rollout.temperature 0.7``; defaults < file < flags. A mistake of the
user gives one line on stderr and exit code 2, before torch is imported. The commands are in ``megarl.commands``.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from megarl import __version__
from megarl.commands import COMMANDS
from megarl.config import file as config_file
from megarl.config.command import POSITIONAL, Command, OnConfiguration
from megarl.errors import ConfigError, did_you_mean, one_of, refusal, reworded
from megarl.files.texts import read_table
from megarl.ops.exits import run_to_exit

_INSTEAD: dict[str, str] = read_table(__file__)["instead"]
_KEYS = "Any key of docs/config.md is a flag too, and wins over the file: --rollout.temperature 0.7."
_DESCRIPTION = "Stable reinforcement learning of Mixture-of-Experts language models on Megatron-Core."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (something is missing or lost), 2 (an error), 75 (asked to stop)."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_to_exit(words, lambda: _run(words), lambda: _run_folder(words))


def _run(words: list[str]) -> int:
    arguments, overrides = config_file.split_overrides(words)
    command = parse_command(arguments)
    if overrides and getattr(command, "config", None) is None and not getattr(command, "takes_keys", False):
        raise ConfigError(f"megarl {arguments[0]} reads no configuration: remove --{next(iter(overrides))}")
    code = command.run(overrides) or 0
    sys.stdout.flush()  # here, where a reader that has gone is no traceback
    return code


def _run_folder(words: list[str]) -> Path | None:
    """The folder of the command's run, if present."""
    with suppress(Exception):
        arguments, overrides = config_file.split_overrides(words)
        command = parse_command(arguments)
        folder = command.load(overrides).run_dir if isinstance(command, OnConfiguration) else None
        return folder if folder and folder.is_dir() else None
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def parse_command(arguments: list[str]) -> Command:
    """The command with its arguments; ConfigError for words that no command takes."""
    if (two := " ".join(arguments[:2]).replace("launch train", "launch")) in COMMANDS:
        arguments = [two, *arguments[2:]]
    parser = _Parser(prog="megarl", description=_DESCRIPTION, allow_abbrev=False)
    version = f"megarl {__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = " ".join((command.__doc__ or "").split())
        options: dict[str, Any] = {"help": about, "description": about, "allow_abbrev": False}
        options |= {"epilog": _KEYS} if issubclass(command, OnConfiguration) else {}
        _add_arguments(commands.add_parser(name, argument_default=argparse.SUPPRESS, **options), command)
    first = arguments[0] if arguments else ""
    if first not in COMMANDS and not first.startswith("-"):
        hint = _INSTEAD.get(first) or one_of(first, COMMANDS)
        raise ConfigError(f"found {f'the command {first!r}' if first else 'no command'}; {hint}")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse itself would not name the command
        prog, flag = f"megarl {first}" if first in COMMANDS else "megarl", unknown[0].partition("=")[0]
        if first == "launch" and not flag.startswith("-"):
            raise ConfigError(refusal("launch_of", word=next(w for w in arguments[1:] if not w.startswith("-"))))
        keys = config_file.keys() if issubclass(COMMANDS.get(first, object), OnConfiguration) else ()
        meant = [f"--{key}" for key in keys if f"--{key.rpartition('.')[2]}" == flag]
        fields = getattr(COMMANDS.get(first), "__pydantic_fields__", {})
        flags = [_flag(name) for name, field in fields.items() if POSITIONAL not in field.metadata]
        hint = f"did you mean {' or '.join(meant)}?" if meant else did_you_mean(flag, flags, f"see {prog} --help")
        raise ConfigError(f"{prog}: unrecognized arguments: {' '.join(unknown)}; {hint}")
    values = vars(parsed)
    command = COMMANDS[values.pop("command")]
    with reworded(ValidationError, ConfigError, f"megarl {first}: ", tell=lambda e: _describe_problem(e, command)):
        return command(**values)


def _describe_problem(error: ValidationError, command: type[Any]) -> str:
    """What is wrong with a word of the command line."""
    wrong: Any = error.errors()[0]
    name = wrong["loc"][0]
    field: FieldInfo = command.__pydantic_fields__[name]
    flag = name.upper() if POSITIONAL in field.metadata else _flag(name)
    if wrong["type"] in ("missing", "too_long"):  # of an argument with several values
        values, num = " ".join(wrong["input"]), len(get_args(field.annotation))
        return f"{flag}: found {values!r}, expected {num} values, such as {_words(field.default)}"
    return f"{flag}: found {wrong['input']!r}, {config_file.expectation(wrong)}"


def _words(default: Any) -> str:
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _add_arguments(parser: argparse.ArgumentParser, command: type[Any]) -> None:
    """Words are only sorted here; the record converts and checks them."""
    fields: dict[str, FieldInfo] = command.__pydantic_fields__
    for name, field in fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        is_sequence = get_origin(field.annotation) is tuple
        choices = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
        text = " ".join((field.description or "").split())
        if not field.is_required() and field.default is not False and field.default not in (None, ()):
            text += f" [default {_words(field.default)}]"
        options: dict[str, Any] = {"help": text.replace("%", "%%")}
        options["metavar"] = f"{{{','.join(choices)}}}" if choices else name.upper()
        if POSITIONAL in field.metadata:
            nargs = ("+" if is_sequence else None) if field.is_required() else "*" if is_sequence else "?"
            parser.add_argument(name, nargs=nargs, **options)
        elif field.annotation is bool:
            parser.add_argument(_flag(name), dest=name, action="store_true", help=options["help"])
        else:
            parser.add_argument(_flag(name), dest=name, nargs="+" if is_sequence else None, **options)


def _flag(name: str) -> str:
    return f"--{name}".replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
