"""Every error that megarl raises on purpose, and the longer texts: files/refusals.toml.

Each class also derives from a built-in exception, so that ``except ValueError`` and the like keep working for
callers who do not know megarl. A message says what was found, what was expected, and what to do. The command line
prints it as one line and exits with code 2.
"""

import difflib
import re
import socket
import sysconfig
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MOST_NAMES = 8
"""Names that are listed beside a close name."""


class MegarlError(Exception):
    """Base of all errors below; the command line turns it into one line and exit code 2."""

    second_hand = False
    """Whether it only reports the failure of a rank that has the actual error."""


class ConfigError(MegarlError, ValueError):
    """A setting is wrong, unknown, or does not go with another one."""


class UnknownNameError(ConfigError, KeyError):
    """A table has no entry of this name; names the nearest ones."""

    __str__ = MegarlError.__str__  # KeyError shows the repr of its message


class DataError(MegarlError, ValueError):
    """A prompt file, a prompt or an answer cannot be used; names the file and the line."""


class RolloutError(MegarlError, RuntimeError):
    """The sampling engine failed or answered something that cannot be true."""


class RequestError(RolloutError):
    """No server takes this one request; the others go on."""


class RewardError(RolloutError):
    """The user's reward or environment gave no response a reward; a restart changes nothing."""


class TraceError(MegarlError, ValueError):
    """A routing trace does not fit its tokens or its model; names the sequence."""


class ReplayError(MegarlError, RuntimeError):
    """Routing replay was not exactly what was asked for; names layer, micro-batch and pass."""


class AgreementError(ReplayError):
    """Replayed experts agree too little with the routers' own choice."""

    micro_batches: tuple[int, ...] = ()
    """With too little agreement; empty if only layers disagree."""


class WeightSyncError(MegarlError, RuntimeError):
    """Weights did not arrive in the sampling engine as they left the trainer."""


class CheckpointError(MegarlError, RuntimeError):
    """A checkpoint is missing, incomplete, or of another model."""


class DamageError(CheckpointError):
    """A checkpoint is not as it was saved, and there is none to use instead; the command line exits with code 1."""


class SaveError(MegarlError, OSError):
    """A checkpoint could not be written."""

    on_all_ranks = False
    """Whether every rank knows of the failure and may go on."""


class NumericsError(MegarlError, FloatingPointError):
    """A value is not finite, or is a log-probability above 0; names the quantity and where it arose."""


class StopError(MegarlError, RuntimeError):
    """The run was asked to stop, by a signal; it has saved itself, and another start continues it."""


class PeerError(MegarlError, RuntimeError):
    """Another rank has died or did not come to a collective call; names the phase, and whom the others wait for."""

    second_hand = True


# Read at the start: an error may be that no file can be opened.
_TEXTS: dict[str, str] = tomllib.loads((Path(__file__).parent / "files" / "refusals.toml").read_text("utf-8"))


def refusal(name: str, /, **facts: object) -> str:
    """Return the text of this name in files/refusals.toml, with ``facts`` in it."""
    return _TEXTS[name].format(**facts)


def refuse_if(is_wrong: object, kind: Callable[[str], Exception], name: str, /, **facts: object) -> None:
    """Raise an error of ``kind`` with the text of this name, see ``refusal``, if ``is_wrong``."""
    if is_wrong:
        raise kind(refusal(name, **facts))


def printable(text: str) -> str:
    """Return text from a file, a model or a user's code without control characters: a terminal would obey them."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def describe_call(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return type and message of an error of the user's code as ``describe`` does, and its file and line if known.

    The line is the last one that is not of megarl or of an installed package; for an error without a
    line, as a wrong return value, the line of the function.
    """
    function = getattr(function, "__wrapped__", function)
    called = function if hasattr(function, "__code__") else type(function).__call__  # an object that can be called
    code = getattr(called, "__code__", None)
    places = [(code.co_filename, code.co_firstlineno)] if code else []
    places += [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    folders = sysconfig.get_path("stdlib"), Path(__file__).parent
    libraries = (*(f"{folder}/" for folder in folders), "/site-packages/", "/dist-packages/", "<frozen ")
    own = [f"{path}:{line}" for path, line in places if not any(part in path for part in libraries)]
    return describe(error) + (f" ({own[-1]})" if own else "")


def may_pass(error: BaseException) -> bool:
    """Whether the cause of an error of the user's code is outside of it, so that another try may succeed.

    That is a server that does not answer, or a time-out.
    """
    before = error.__cause__ or error.__context__
    is_outside = isinstance(error, ConnectionError | TimeoutError | socket.gaierror | RolloutError)
    return is_outside or (before is not None and may_pass(before))


def describe(error: BaseException) -> str:
    """Return type and message of an error of foreign code, in one line of at most 300 characters, without errno."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # a foreign exception may fail to print itself
        text = type(error).__name__
    return re.sub(r"\[Errno -?\d+\] ", "", " ".join(text.split()))[:300]


def reason_of(error: BaseException) -> str:
    """Return the message of an error; of an error of the system without its number and file."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def reworded(
    kinds: type[BaseException] | tuple[type[BaseException], ...],
    into: Callable[[str], Exception],
    prefix: str = "",
    suffix: str = "",
    tell: Callable[[Any], str] = str,
) -> Iterator[None]:
    """Turn an error of ``kinds`` inside the block into ``into``, with its text between ``prefix`` and ``suffix``."""
    try:
        yield
    except kinds as error:
        raise into(f"{prefix}{tell(error)}{suffix}") from error


def did_you_mean(name: str, known: Iterable[str], otherwise: str, most: int = 1) -> str:
    """Return "did you mean NAME?" with the known names that are closest; ``otherwise`` where none is close."""
    close = difflib.get_close_matches(name.lower(), known, n=most)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def one_of(name: str, known: Iterable[str]) -> str:
    """Return what was expected in the place of ``name``: the known names and the closest; of many, the closest only."""
    names = [*known]
    expected = f"expected {' or '.join(filter(None, (', '.join(names[:-1]), *names[-1:])))}"
    hint = did_you_mean(name, names, expected)
    return hint if hint == expected or len(names) > _MOST_NAMES else f"{expected}; {hint}"


def some(names: Iterable[str]) -> str:
    """Return the first three names of a list that may be long, sorted, and how many more there are."""
    known = sorted(set(names))
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")
