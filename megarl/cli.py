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
from megarl.errors import ConfigError, did_you_mean, refusal
from megarl.ops.exits import run_to_exit

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
    options: dict[str, Any] = {"action": "version", "version": f"megarl {__version__}"}
    parser.add_argument("--version", **options, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = " ".join((command.__doc__ or "").split())
        options = {"help": about, "description": about, "allow_abbrev": False}
        options |= {"epilog": _KEYS} if issubclass(command, OnConfiguration) else {}
        _add_arguments(commands.add_parser(name, argument_default=argparse.SUPPRESS, **options), command)
    first = arguments[0] if arguments else ""
    if first not in COMMANDS and not first.startswith("-"):
        hint = did_you_mean(first, COMMANDS, f"expected one of {', '.join(COMMANDS)}")
        raise ConfigError(f"found {f'the command {first!r}' if first else 'no command'}; {hint}")
    reads_keys = issubclass(COMMANDS.get(first, object), OnConfiguration)
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse itself would not name the command
        prog, flag = f"megarl {first}" if first in COMMANDS else "megarl", unknown[0].partition("=")[0]
        if first == "launch" and not flag.startswith("-"):
            raise ConfigError(refusal("launch_of", word=next(w for w in arguments[1:] if not w.startswith("-"))))
        keys = config_file.keys() if reads_keys else ()
        meant = [f"--{key}" for key in keys if f"--{key.rpartition('.')[2]}" == flag]
        hint = f"did you mean {' or '.join(meant)}?" if meant else f"see {prog} --help"
        raise ConfigError(f"{prog}: unrecognized arguments: {' '.join(unknown)}; {hint}")
    values = vars(parsed)
    command = COMMANDS[values.pop("command")]
    try:
        return command(**values)
    except ValidationError as error:
        wrong = error.errors()[0]
        flag = f"--{wrong['loc'][0]}".replace("_", "-")
        raise ConfigError(f"megarl {first}: {flag}: found {wrong['input']!r}: {wrong['msg']}") from None


def _add_arguments(parser: argparse.ArgumentParser, command: type[Any]) -> None:
    """Words are only sorted here; the record converts and checks them."""
    fields: dict[str, FieldInfo] = command.__pydantic_fields__
    for name, field in fields.items():
        options: dict[str, Any] = {"help": " ".join((field.description or "").split()).replace("%", "%%")}
        kind = get_origin(field.annotation)
        is_sequence, choices = kind is tuple, get_args(field.annotation) if kind is Literal else ()
        if choices:
            options["choices"] = choices
        if POSITIONAL in field.metadata:
            nargs = ("+" if is_sequence else None) if field.is_required() else "*" if is_sequence else "?"
            if choices and nargs:
                options["default"] = field.default  # argparse compares it with the choices
            parser.add_argument(name, metavar=None if choices else name.upper(), nargs=nargs, **options)
            continue
        if field.annotation is bool:
            options["action"] = "store_true"
        else:
            options["metavar"] = None if choices else name.upper()
            options["nargs"] = "*" if is_sequence else None
        if field.default is not False and field.default not in (None, ()):
            options["help"] += f" [default {field.default}]"
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **options)


if __name__ == "__main__":
    sys.exit(main())
