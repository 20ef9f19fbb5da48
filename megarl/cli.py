"""The command line: ``megarl train | launch | plan | status | report`` and more, see ``megarl --help``.

Every key of the configuration is also a flag, ``--rollout.temperature 0.7``; defaults < file < flags. A mistake of the
user gives one line on stderr and exit code 2, before torch is imported. The commands are in ``megarl.commands``.
"""

import argparse
import difflib
import errno
import json
import os
import sys
import tempfile
import time
import traceback
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
from megarl.config.key_help import describe_tables
from megarl.errors import ConfigError, DamageError, MegarlError, StopError, describe, printable
from megarl.files.disk import describe_room
from megarl.run.signals import drop_lost_outputs, say_what_ends
from megarl.run.status import write_failure

DAMAGED = 1
UNEXPECTED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""As of a program that SIGPIPE has ended: whoever read the output has gone."""
STOPPED = 75
"""The run was asked to stop and has saved itself (EX_TEMPFAIL): start it again to continue."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_PATH_ERRORS = (*_DISK_ERRORS, errno.EROFS, errno.EACCES, errno.EPERM)
_PATH_ERRORS += (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_DESCRIPTION = "Stable reinforcement learning of Mixture-of-Experts language models on Megatron-Core."
_FIRST_RANK_SPEAKS_S = 3.0
_NEWEST = "steps since the newest checkpoint are lost, and the next start continues from there"
_KEPT = {
    "train": _NEWEST,
    "launch": f"the ranks are told so, and save if they can; else {_NEWEST}",
    **dict.fromkeys(("convert", "quantize"), "files that are complete stay, and the command goes on when given again"),
}
"""What a command that a signal has ended leaves, if it leaves anything."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (something is missing or lost), 2 (an error), 75 (asked to stop)."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    try:
        with say_what_ends(name, _KEPT.get(name, "nothing is saved")):
            return _run(words)
    except StopError as error:
        _complain(str(error), on_every_rank=False)
        return STOPPED
    except MegarlError as error:
        write_failure(error)
        distributed = sys.modules.get("torch.distributed")
        # All ranks find a wrong configuration before they join. Afterwards, an error may be of one rank.
        have_joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
        _complain(str(error), on_every_rank=have_joined or not isinstance(error, ConfigError))
        return DAMAGED if isinstance(error, DamageError) else USAGE_ERROR
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "megarl"):
            return _fail_unexpectedly(error, words)
        missing = f"needs the package {package}, which is not installed: pip install 'megarl-moe[train]'"
        return _fail(f"megarl {words[0]} {missing}", on_every_rank=False)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and drop_lost_outputs():
            return BROKEN_PIPE
        if error.errno not in _PATH_ERRORS:
            return _fail_unexpectedly(error, words)
        where = error.filename or "a file of the run"
        room = f" ({describe_room(Path(error.filename))})" if error.filename and error.errno in _DISK_ERRORS else ""
        said = f"{where} cannot be read or written: {error.strerror}{room}; mend that and start again"
        return _fail(said, on_every_rank=True)
    except KeyboardInterrupt:
        _complain("interrupted", on_every_rank=False)
        return INTERRUPTED
    except Exception as error:
        return _fail_unexpectedly(error, words)


def _run(words: list[str]) -> int:
    arguments, overrides = config_file.split_overrides(words)
    command = _parse_command(arguments)
    if overrides and getattr(command, "config", None) is None and not getattr(command, "takes_keys", False):
        raise ConfigError(f"megarl {arguments[0]} reads no configuration: remove --{next(iter(overrides))}")
    code = command.run(overrides) or 0
    sys.stdout.flush()  # here, where a reader that has gone is no traceback
    return code


def _fail_unexpectedly(error: Exception, words: list[str]) -> int:
    """One line for an error that nobody foresaw; its traceback goes into a file, and the line says where."""
    text = f"megarl {__version__}: {words}\n{''.join(traceback.format_exception(error))}"
    rank = int(os.environ.get("RANK", "0"))
    try:
        folder = _run_folder(words)
        if folder is None:
            number, name = tempfile.mkstemp(prefix="megarl-", suffix=".error.txt")
            path = Path(name)
            os.close(number)
        else:
            path = folder / "ranks" / f"{rank:05d}.error.txt"
            path.parent.mkdir(exist_ok=True)
        path.write_text(text, errors="backslashreplace")
        where = f"the traceback is in {path}"
    except OSError as full:
        print(text, file=sys.stderr)
        where = f"its traceback could not be written ({full.strerror})"
    _complain(f"unexpected {describe(error)}; {where}, please report it with the command", on_every_rank=True)
    return UNEXPECTED


def _run_folder(words: list[str]) -> Path | None:
    """The folder of the run that the command was about, if there is one."""
    with suppress(Exception):
        arguments, overrides = config_file.split_overrides(words)
        command = _parse_command(arguments)
        folder = command.load(overrides).run_dir if isinstance(command, OnConfiguration) else None
        return folder if folder and folder.is_dir() else None
    return None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def _parse_command(arguments: list[str]) -> Command:
    parser = _Parser(prog="megarl", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"megarl {__version__}", help="show the version and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        what = " ".join((command.__doc__ or "").split())
        options = {"help": what, "description": what, "allow_abbrev": False}
        _add_arguments(commands.add_parser(name, argument_default=argparse.SUPPRESS, **options), command)
    first = arguments[0] if arguments else ""
    if first not in COMMANDS and not first.startswith("-"):
        close = difflib.get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(COMMANDS)}"
        raise ConfigError(f"found {f'the command {first!r}' if first else 'no command'}; {hint}")
    reads_keys = issubclass(COMMANDS.get(first, object), OnConfiguration)
    try:
        parsed, unknown = parser.parse_known_args(arguments)
    except SystemExit:
        if reads_keys:
            print(describe_tables())
        raise
    if unknown:  # argparse itself would not name the command
        prog, flag = f"megarl {first}" if first in COMMANDS else "megarl", unknown[0].partition("=")[0]
        known = config_file.keys() if reads_keys else ()
        meant = [f"--{key}" for key in known if f"--{key.rpartition('.')[2]}" == flag]
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
            many = "+" if is_sequence else None if field.is_required() else "?"
            if choices and many:
                options["default"] = field.default  # argparse compares it with the choices
            parser.add_argument(name, metavar=None if choices else name.upper(), nargs=many, **options)
            continue
        if field.annotation is bool:
            options["action"] = "store_true"
        else:
            options["metavar"] = None if choices else name.upper()
            options["nargs"] = "*" if is_sequence else None
        if field.default is not False and field.default not in (None, ()):
            options["help"] += f" [default {field.default}]"
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **options)


def _fail(message: str, *, on_every_rank: bool) -> int:
    """Write and print an error that Python raised; return the exit code."""
    write_failure(MegarlError(message))
    _complain(message, on_every_rank=on_every_rank)
    return USAGE_ERROR


def _complain(message: str, *, on_every_rank: bool) -> None:
    """Print one line on stderr. An error that all ranks find is printed by the first one only."""
    rank = os.environ.get("RANK", "0")  # set by torchrun
    line = " ".join(filter(None, map(str.strip, message.splitlines())))  # spaces inside may be what it is about
    where = f" (rank {rank})" if "RANK" in os.environ and on_every_rank else ""
    said = f"megarl: error{where}: {printable(line)}"
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun ends its own forty lines with what it finds there
        with suppress(OSError):
            record = {"message": said, "timestamp": int(time.time())}
            Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
    if rank != "0" and not on_every_rank:
        time.sleep(_FIRST_RANK_SPEAKS_S)  # torchrun ends all ranks when one ends: let the first one print
        return
    drop_lost_outputs()
    print(said, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
