"""A kernel filter of the system calls that sandboxed code may use; ``system_calls.toml`` lists the calls.

Namespaces bound the view of code, resource limits bound the use of resources. Calls outside of the list would defeat
the bounds: kernel memory and host slots that no limit counts (file locks, asynchronous I/O, watches, keys, System V
objects, queues of abandoned sockets), networks outside of namespaces (vsock), and kernel subsystems that arithmetic
does not need and that have often been vulnerable.
"""

import errno
import platform
import struct
import tomllib
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import ConfigError

_TABLE = tomllib.loads(Path(__file__).with_name("system_calls.toml").read_text("utf-8"))
_CLONE3 = 435
_FIRST_UNKNOWN = 470
"""Later calls fail as in a kernel without these calls, so that libc falls back to older calls."""
_X32_CALLS = 0x40000000
"""On x86_64 the calls have second numbers from here on; aarch64 has no calls in this range."""
_F_SETLK = 6

_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def program() -> bytes:
    """Return the filter for this machine as struct sock_filter entries. ConfigError for an unknown machine."""
    machine = _TABLE["machines"].get(platform.machine())
    if machine is None:
        problem = f"no filter of system calls is known for {platform.machine()!r}, only for "
        raise ConfigError(f"{problem}{' and '.join(_TABLE['machines'])}: the sandboxed Python tool does not run here")
    place = machine["place"]
    code = [
        _op(_LOAD, _OFFSET_ARCHITECTURE),
        _op(_IF_EQUAL, machine["audit"], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _OFFSET_NUMBER),
        _op(_IF_AT_LEAST, _X32_CALLS, 0, 1),
        _op(_RETURN, _KILL),
    ]
    for numbers in _TABLE["allowed"].values():
        if numbers[place] >= 0:
            code += [_op(_IF_EQUAL, numbers[place], 0, 1), _op(_RETURN, _ALLOW)]
    for name, call in _TABLE["tested"].items():
        # SQLite locks files with fcntl. A pretended lock suffices: no other process has the files of a call. Real locks
        # would take memory that no limit counts.
        pretended = _pretend(_F_SETLK) if name == "fcntl" else []
        body = [*pretended, *(op for test in call["tests"] for op in _test(*test)), _op(_RETURN, _ALLOW)]
        code += [_op(_IF_EQUAL, call["numbers"][place], 0, len(body)), *body]
    # The flags of clone3 lie in memory, which a filter cannot read: without clone3, libc uses clone.
    code += [_op(_IF_EQUAL, _CLONE3, 1, 0), _op(_IF_AT_LEAST, _FIRST_UNKNOWN, 0, 1)]
    code += [_op(_RETURN, _ERROR | errno.ENOSYS), _op(_RETURN, _ERROR | errno.EPERM)]
    return b"".join(code)


def _test(argument: int, mask: int, values: Sequence[int], error: int) -> list[bytes]:
    """Continue behind these entries if the masked argument is among the values; otherwise return the error."""
    jumps = [_op(_IF_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [_op(_LOAD, _OFFSET_ARGUMENTS + 8 * argument), _op(_AND, mask), *jumps, _op(_RETURN, _ERROR | error)]


def _pretend(command: int) -> list[bytes]:
    """Return 0 for a command of fcntl without running the command."""
    return [_op(_LOAD, _OFFSET_ARGUMENTS + 8), _op(_IF_EQUAL, command, 0, 1), _op(_RETURN, _ERROR)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
