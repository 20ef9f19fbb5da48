"""The system calls that code in the sandbox may not use, as a filter for the kernel.

Namespaces bound what code sees; resource limits bound what it takes. The calls here would undo either: memory that no
limit counts (a tmpfs in a namespace of its own, anonymous files, System V segments), and parts of the kernel that
arithmetic has no use for and that have often been its weak side.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Machine:
    """Numbers of one architecture (linux/audit.h, asm/unistd.h)."""

    audit: int
    clone: int
    denied: tuple[int, ...]


# unshare, setns, memfd_create, shmget, mq_open; ptrace, bpf, perf_event_open, userfaultfd, add_key, request_key, keyctl
_MACHINES = {
    "x86_64": _Machine(0xC000003E, 56, (272, 308, 319, 29, 240, 101, 321, 298, 323, 248, 249, 250)),
    "aarch64": _Machine(0xC00000B7, 220, (97, 268, 279, 194, 180, 117, 280, 241, 282, 217, 218, 219)),
}
_DENIED_EVERYWHERE = (425, 447)  # io_uring_setup, memfd_secret
_CLONE3 = 435
_X32_CALLS = 0x40000000
"""On x86_64 the same calls again under other numbers; aarch64 has none there."""
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def program() -> bytes:
    """Returns the filter for this machine as struct sock_filter entries; raises ConfigError where it is not known."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        known = f"no filter of system calls is known for {platform.machine()!r}, only for {' and '.join(_MACHINES)}"
        raise ConfigError(f"{known}: the sandboxed Python tool does not run here")
    code = [
        _op(_LOAD, _OFFSET_ARCHITECTURE),
        _op(_IF_EQUAL, machine.audit, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _OFFSET_NUMBER),
        _op(_IF_AT_LEAST, _X32_CALLS, 0, 1),
        _op(_RETURN, _KILL),
    ]
    for number in (*machine.denied, *_DENIED_EVERYWHERE):
        code += [_op(_IF_EQUAL, number, 0, 1), _op(_RETURN, _ERROR | errno.EPERM)]
    # The flags of clone3 lie in memory, where a filter cannot look: libc takes clone instead where clone3 is unknown.
    code += [_op(_IF_EQUAL, _CLONE3, 0, 1), _op(_RETURN, _ERROR | errno.ENOSYS)]
    code += [
        _op(_IF_EQUAL, machine.clone, 0, 3),
        _op(_LOAD, _OFFSET_FIRST_ARGUMENT),
        _op(_IF_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _op(_RETURN, _ERROR | errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
