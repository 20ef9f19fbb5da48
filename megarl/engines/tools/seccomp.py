"""The system calls that code in the sandbox may use, as a filter for the kernel; ``system_calls.toml`` lists them.

Namespaces bound what code sees; resource limits bound what it takes. Calls outside of the list would undo either:
memory of the kernel and slots of the host that no limit counts (file locks, asynchronous I/O, watches, keys, System V
objects, queues of sockets that nobody holds), networks that no namespace holds (vsock), and parts of the kernel that
arithmetic has no use for and that have often been its weak side.
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
"""Later calls look as in a kernel that does not have them, so that libc goes back to older ones."""
_X32_CALLS = 0x40000000
"""On x86_64 the same calls again under other numbers; aarch64 has none there."""
_F_SETLK = 6

_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def program() -> bytes:
    """Returns the filter for this machine as struct sock_filter entries; raises ConfigError where it is not known."""
    machine = _TABLE["machines"].get(platform.machine())
    if machine is None:
        known = f"no filter of system calls is known for {platform.machine()!r}, only for "
        raise ConfigError(f"{known}{' and '.join(_TABLE['machines'])}: the sandboxed Python tool does not run here")
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
        # SQLite locks its files so, and goes on as if it had them: nobody but this call has its files. The locks
        # themselves would take memory that no limit counts.
        pretended = _pretend(_F_SETLK) if name == "fcntl" else []
        body = [*pretended, *(op for test in call["tests"] for op in _test(*test)), _op(_RETURN, _ALLOW)]
        code += [_op(_IF_EQUAL, call["numbers"][place], 0, len(body)), *body]
    # The flags of clone3 lie in memory, where a filter cannot look: libc takes clone instead where clone3 is unknown.
    code += [_op(_IF_EQUAL, _CLONE3, 1, 0), _op(_IF_AT_LEAST, _FIRST_UNKNOWN, 0, 1)]
    code += [_op(_RETURN, _ERROR | errno.ENOSYS), _op(_RETURN, _ERROR | errno.EPERM)]
    return b"".join(code)


def _test(argument: int, mask: int, values: Sequence[int], error: int) -> list[bytes]:
    """Goes on behind these entries if the masked argument is one of the values, else returns the error."""
    jumps = [_op(_IF_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)]
    return [_op(_LOAD, _OFFSET_ARGUMENTS + 8 * argument), _op(_AND, mask), *jumps, _op(_RETURN, _ERROR | error)]


def _pretend(command: int) -> list[bytes]:
    """Returns 0 for a command of fcntl without running it."""
    return [_op(_LOAD, _OFFSET_ARGUMENTS + 8), _op(_IF_EQUAL, command, 0, 1), _op(_RETURN, _ERROR)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
