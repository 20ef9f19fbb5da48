"""The system calls that code in the sandbox may not use, as a filter for the kernel.

Namespaces bound what code sees; resource limits bound what it takes. The calls here would undo either: memory that no
limit counts (a tmpfs in a namespace of its own, anonymous files, System V objects, extended attributes, rules and
filters in the kernel, pages that a pipe keeps), networks that no namespace holds (vsock), and parts of the kernel that
arithmetic has no use for and that have often been its weak side.
"""

import errno
import platform
import struct
import tomllib
from pathlib import Path

from megarl.errors import ConfigError

_MACHINES = tomllib.loads(Path(__file__).with_name("system_calls.toml").read_text("utf-8"))
_DENIED_EVERYWHERE = (425, 444, 447, 463)  # io_uring_setup, landlock_create_ruleset, memfd_secret, setxattrat
_CLONE3 = 435
_X32_CALLS = 0x40000000
"""On x86_64 the same calls again under other numbers; aarch64 has none there."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_AF_UNIX, _PR_SET_SECCOMP = 1, 22
_BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE."""

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def program() -> bytes:
    """Returns the filter for this machine as struct sock_filter entries; raises ConfigError where it is not known."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        known = f"no filter of system calls is known for {platform.machine()!r}, only for {' and '.join(_MACHINES)}"
        raise ConfigError(f"{known}: the sandboxed Python tool does not run here")
    code = [
        _op(_LOAD, _OFFSET_ARCHITECTURE),
        _op(_IF_EQUAL, machine["audit"], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _OFFSET_NUMBER),
        _op(_IF_AT_LEAST, _X32_CALLS, 0, 1),
        _op(_RETURN, _KILL),
    ]
    for number in (*machine["denied"].values(), *machine["uncounted"].values(), *_DENIED_EVERYWHERE):
        code += [_op(_IF_EQUAL, number, 0, 1), _op(_RETURN, _ERROR | errno.EPERM)]
    # The flags of clone3 lie in memory, where a filter cannot look: libc takes clone instead where clone3 is unknown.
    code += [_op(_IF_EQUAL, _CLONE3, 0, 1), _op(_RETURN, _ERROR | errno.ENOSYS)]
    # A TCP buffer has megabytes, and vsock reaches the host of a virtual machine.
    for number in machine["sockets"].values():
        code += _refuse(number, _IF_EQUAL, _AF_UNIX, errno.EAFNOSUPPORT, unless=True)
    for option in _BUFFER_SIZES:
        code += _refuse(machine["setsockopt"], _IF_EQUAL, option, errno.EPERM, argument=2)
    code += _refuse(machine["prctl"], _IF_EQUAL, _PR_SET_SECCOMP, errno.EPERM)
    code += _refuse(machine["clone"], _IF_ANY_BIT, _NEW_NAMESPACES, errno.EPERM)
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _refuse(call: int, test: int, value: int, error: int, *, argument: int = 0, unless: bool = False) -> list[bytes]:
    """Refuses a call if the test of an argument holds, or ``unless`` it does. The number is loaded before and after."""
    return [
        _op(_IF_EQUAL, call, 0, 4),
        _op(_LOAD, _OFFSET_ARGUMENTS + 8 * argument),
        _op(test, value, *((1, 0) if unless else (0, 1))),
        _op(_RETURN, _ERROR | error),
        _op(_LOAD, _OFFSET_NUMBER),
    ]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
