"""The command line: ``megarl train | launch | plan | status | report`` and more, see ``megarl --help``.

Every key of the configuration is also a flag, ``--rollout.temperature 0.7``; defaults < file < flags. A mistake of the
user gives one line on stderr and exit code 2, before torch is imported. The commands are in ``megarl.commands``.
"""

import contextlib
import errno
import io
import os
import sys
import time
from collections.abc import Sequence

import tyro

from megarl.commands import COMMANDS, Command, OnConfiguration
from megarl.config import file as config_file
from megarl.errors import ConfigError, DamageError, MegarlError, StopError, printable
from megarl.run.status import write_failure

DAMAGED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
STOPPED = 75
"""The run was asked to stop and has saved itself (EX_TEMPFAIL): start it again to continue."""
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_DESCRIPTION = "Stable reinforcement learning of Mixture-of-Experts language models on Megatron-Core."
_FIRST_RANK_SPEAKS_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 (something is missing or lost), 2 (an error), 75 (asked to stop)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments, overrides = config_file.split_overrides(words)
        command = _parse_command(arguments)
        if overrides and getattr(command, "config", None) is None:
            raise ConfigError(f"megarl {arguments[0]} reads no configuration: remove --{next(iter(overrides))}")
        return command.run(overrides) or 0
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
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        where = error.filename or "a file of the run"
        failure = MegarlError(f"{where} cannot be read or written: {error.strerror}; mend that and start again")
        write_failure(failure)
        _complain(str(failure), on_every_rank=True)
        return USAGE_ERROR
    except KeyboardInterrupt:
        _complain("interrupted", on_every_rank=False)
        return INTERRUPTED


def _parse_command(arguments: list[str]) -> Command:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(
                dict(COMMANDS), prog="megarl", description=_DESCRIPTION, args=arguments
            )
    except SystemExit as stop:
        if stop.code:
            raise ConfigError(_one_line(complaint.getvalue())) from None
        if issubclass(COMMANDS.get(arguments[0], object), OnConfiguration):
            _print_keys()
        raise


def _one_line(box: str) -> str:
    """tyro's complaint, which is a titled box of several lines, as one line."""
    lines = [line.strip(" |\u2502\u256d\u256e\u2570\u256f\u2500-") for line in box.splitlines()]
    title, *body = [line for line in lines if line]
    return " ".join("; ".join(body or [title]).replace(":;", ":").replace(".;", ";").replace(",;", ",").split())


def _print_keys() -> None:
    """Every key with its default and meaning, below tyro's help."""
    print("\nAny key of the configuration file is a flag too, and wins over the file (none for no value):\n")
    for key, info in config_file.keys().items():
        default = "needed" if info.is_required() else f"default {info.default}" if info.default is not None else ""
        note = f" [{default}]" if default and not key.endswith("*") else ""
        print(f"  --{key}{note}\n      {info.description or ''}")


def _complain(message: str, *, on_every_rank: bool) -> None:
    """Print one line on stderr. An error that all ranks find is printed by the first one only."""
    rank = os.environ.get("RANK", "0")  # set by torchrun
    if rank != "0" and not on_every_rank:
        time.sleep(_FIRST_RANK_SPEAKS_S)  # torchrun ends all ranks when one ends: let the first one print
        return
    where = f" (rank {rank})" if "RANK" in os.environ and on_every_rank else ""
    print(f"megarl: error{where}: {printable(' '.join(message.split()))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
