"""The end of a command for the user: an exit code and, for an error, one line on stderr."""

import errno
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl import __version__
from megarl.errors import ConfigError, DamageError, MegarlError, StopError, describe, printable
from megarl.files.writing import describe_room
from megarl.run.signals import drop_lost_outputs
from megarl.run.status import write_failure

DAMAGED = UNEXPECTED = 1
USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
"""As of a program that SIGPIPE has ended: whoever read the output has gone."""
STOPPED = 75
"""The run was asked to stop and has saved itself (EX_TEMPFAIL): start it again to continue."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_PATH_ERRORS = (*_DISK_ERRORS, errno.EROFS, errno.EACCES, errno.EPERM)
_PATH_ERRORS += (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_FIRST_RANK_SPEAKS_S = 3.0


def run_to_exit(
    words: Sequence[str], work: Callable[[], int | None], run_folder: Callable[[], Path | None] = lambda: None
) -> int:
    """Run the work of a command and return the exit code: 0, 1 (missing or lost), 2 (an error), 75 (asked to stop).

    words: the command line after ``megarl``. run_folder: finds the run folder for an unexpected error.
    """
    try:
        return work() or 0
    except StopError as error:
        _complain(str(error), on_every_rank=False)
        return STOPPED
    except MegarlError as error:
        write_failure(error)
        distributed = sys.modules.get("torch.distributed")
        # All ranks find a wrong configuration before joining. Later errors may be of one rank.
        have_joined = distributed is not None and distributed.is_available() and distributed.is_initialized()
        _complain(str(error), on_every_rank=have_joined or not isinstance(error, ConfigError))
        return DAMAGED if isinstance(error, DamageError) else USAGE_ERROR
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "megarl"):
            return _fail_unexpectedly(error, words, run_folder)
        extra = "data" if words[0] == "data" else "train"
        missing = f"needs the package {package}, which is not installed: pip install 'megarl-moe[{extra}]'"
        return _fail(f"megarl {words[0]} {missing}", on_every_rank=False)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and drop_lost_outputs():
            return BROKEN_PIPE
        if error.errno not in _PATH_ERRORS:
            return _fail_unexpectedly(error, words, run_folder)
        path = error.filename or "a file of the run"
        room = f" ({describe_room(Path(error.filename))})" if error.filename and error.errno in _DISK_ERRORS else ""
        message = f"{path} cannot be read or written: {error.strerror}{room}; mend that and start again"
        return _fail(message, on_every_rank=True)
    except KeyboardInterrupt:
        _complain("interrupted", on_every_rank=False)
        return INTERRUPTED
    except Exception as error:
        return _fail_unexpectedly(error, words, run_folder)


def _fail_unexpectedly(error: Exception, words: Sequence[str], run_folder: Callable[[], Path | None]) -> int:
    """Write the traceback of an unexpected error into a file, and print one line with the place of the file."""
    text = f"megarl {__version__}: {[*words]}\n{''.join(traceback.format_exception(error))}"
    rank = int(os.environ.get("RANK", "0"))
    try:
        folder = run_folder()
        place = folder / "ranks" if folder else Path(tempfile.mkdtemp(prefix="megarl-"))
        place.mkdir(exist_ok=True)
        path = place / f"{rank:05d}.error.txt"
        path.write_text(text, errors="backslashreplace")
        traceback_text = f"the traceback is in {path}"
    except OSError as full:
        print(text, file=sys.stderr)
        traceback_text = f"its traceback could not be written ({full.strerror})"
    _complain(f"unexpected {describe(error)}; {traceback_text}, please report it with the command", on_every_rank=True)
    return UNEXPECTED


def _fail(message: str, *, on_every_rank: bool) -> int:
    """Write and print an error that Python raised; return the exit code."""
    write_failure(MegarlError(message))
    _complain(message, on_every_rank=on_every_rank)
    return USAGE_ERROR


def _complain(message: str, *, on_every_rank: bool) -> None:
    """Print one line on stderr. For an error of all ranks, only the first rank prints."""
    rank = os.environ.get("RANK", "0")  # set by torchrun
    line = " ".join(filter(None, map(str.strip, message.splitlines())))  # keep spaces inside lines
    place = f" (rank {rank})" if "RANK" in os.environ and on_every_rank else ""
    if rank != "0" and not on_every_rank:
        time.sleep(_FIRST_RANK_SPEAKS_S)  # torchrun ends all ranks after the first end: let the first rank print
        return
    drop_lost_outputs()
    print(f"megarl: error{place}: {printable(line)}", file=sys.stderr)
