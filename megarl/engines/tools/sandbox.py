"""Start Python code in a bubblewrap sandbox.

In the sandbox the code has its own processes, network (only a loopback), host name and file tree. The code can read the
interpreter and the system's libraries, and write a small folder in memory, /tmp. The environment variables of this
process are not passed on. All processes of a call end with the first process, which watches the caller and ends after
the caller: bubblewrap's --die-with-parent misses a parent that ends during the start.

The limit of memory holds for each process (docs/environments.md).

A kernel filter limits the system calls to those of ``system_calls.toml``. Calls outside of the list would defeat the
bounds: kernel memory and host slots that no limit counts (file locks, asynchronous I/O, watches, keys, System V
objects, queues of abandoned sockets), networks outside of namespaces (vsock), and kernel subsystems that arithmetic
does not need and that have often been vulnerable.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import secrets
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError, RolloutError, refuse_if, reworded
from megarl.files.texts import read_table

BOOTSTRAP = Path(__file__).parent / "bootstrap.py"
MEMORY_EXIT = 86
"""Exit status of the bootstrap for a MemoryError."""
_MAX_OPEN_FILES = 256
_MAX_SIGNALS = 1024
"""Pending signals and timers."""
"""All variables of the code: no variable of this process; libraries use a single thread."""


_TABLE = read_table(__file__, "system_calls.toml")
_BUBBLEWRAP = {name: words.split() for name, words in _TABLE["bubblewrap"].items()}
_CLONE3 = 435
_FIRST_UNKNOWN = 470
"""Later calls fail as in a kernel without these calls, so that libc falls back to older calls."""
_X32_CALLS = 0x40000000
"""On x86_64 the calls have second numbers from here on; aarch64 has no calls in this range."""
_F_SETLK = 6

_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCHITECTURE, _OFFSET_ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a call; the configuration checks the values."""

    wall_s: float = 10.0
    """From the start to the end of the process; the start takes 0.1 to 0.2 s."""
    cpu_s: int = 10
    """Of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process; an interpreter with numpy needs about 200 MB."""
    num_processes: int = 8
    """Processes and threads beside the first process."""
    scratch_bytes: int = 64 << 20
    """All files in the scratch folder together."""
    scratch_files: int = 4096
    """Files, folders and links in the scratch folder."""
    output_bytes: int = 16 << 10
    """Standard output and error together; more output ends the call."""
    code_bytes: int = 64 << 10
    """Longer code is not run."""


@dataclass(slots=True)
class Child:
    """A started call. The receiver closes both descriptors."""

    process: subprocess.Popen[bytes]
    output_fd: int
    """Read end of standard output and error."""
    status_fd: int
    """Read end of a pipe with a line of JSON from bubblewrap, and "ready" once the code is about to run."""


class Sandbox:
    """Starts Python code under limits."""

    def __init__(self, limits: Limits, interpreter: str) -> None:
        """``interpreter``: Python for the code, which can import its packages. ConfigError if this host cannot contain
        code as asked."""
        self.limits = limits
        self.interpreter = os.path.abspath(shutil.which(interpreter) or interpreter)
        self.bwrap = shutil.which("bwrap") or ""
        refuse_if(not self.bwrap, ConfigError, "no_bubblewrap")
        self.readable = _find_prefixes(self.interpreter)
        """Folders of the interpreter, which bubblewrap shows besides /usr and the system's libraries."""

    def start(self, code: str) -> Child:
        """Start the code and return at once. RolloutError if the host cannot start a process."""
        fails = reworded(OSError, RolloutError, "the Python tool could not start a process: ")
        with fails, contextlib.ExitStack() as host, contextlib.ExitStack() as child:
            output_fd, output_end = _pipe(host, child)
            status_fd, write_end = _pipe(host, child)
            # Opened for reading too: otherwise, after the end of this process, bubblewrap would die of SIGPIPE, and
            # its child would wait for ever.
            status_end = _close_with(os.open(f"/proc/self/fd/{write_end}", os.O_RDWR | os.O_CLOEXEC), child)
            ready_end = _close_with(os.dup(status_end), child)  # bubblewrap closes its own descriptor
            owner_fd = _close_with(os.pidfd_open(os.getpid()), child)
            filter_fd = _close_with(_make_sealed_file(filter_program()), child)
            of_user = _BUBBLEWRAP["of_user" if os.geteuid() else "of_root"]
            wrapper = [self.bwrap, *_BUBBLEWRAP["namespaces"], *of_user, *self._files()]
            wrapper += ["--json-status-fd", str(status_end), "--seccomp", str(filter_fd), "--"]
            program = ["-I", "-u", "-c", BOOTSTRAP.read_text(), self._settings(ready_end, owner_fd)]
            code_fd = _close_with(_make_sealed_file(code.encode("utf-8", "replace")), child)
            argv, env = [*wrapper, self.interpreter, *program], _TABLE["environment"]
            fds = [status_end, ready_end, owner_fd, filter_fd]
            process = subprocess.Popen(
                argv, env=env, stdin=code_fd, stdout=output_end, stderr=output_end, pass_fds=fds, start_new_session=True
            )
            host.pop_all()
            return Child(process, output_fd, status_fd)

    def _files(self) -> list[str]:
        """Return the arguments for the file tree. /tmp comes first, because an interpreter may lie below /tmp."""
        args = ["--perms", "1777", "--size", str(self.limits.scratch_bytes), "--tmpfs", "/tmp"]
        args += ["--ro-bind", "/usr", "/usr"]
        for folder in ("/bin", "/sbin", "/lib", "/lib64"):
            is_link = os.path.islink(folder)
            args += ["--symlink", os.readlink(folder), folder] if is_link else ["--ro-bind-try", folder, folder]
        shown = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", *self.readable)
        parents = {str(parent) for path in shown for parent in Path(path).parents} - {"/", "/tmp"}
        for parent in sorted(parents):  # bubblewrap would make folders that only the owner can read
            args += ["--perms", "0755", "--dir", parent]
        for path in shown:
            args += ["--ro-bind-try", path, path]
        return args + _BUBBLEWRAP["after_files"]

    def _settings(self, ready_end: int, owner_fd: int) -> str:
        limits, unused_user = self.limits, os.geteuid() == 0
        # Counted per user and user namespace: an unused user has no init process.
        sizes = {"NPROC": (0 if unused_user else 1) + 1 + limits.num_processes, "NOFILE": _MAX_OPEN_FILES, "CORE": 0}
        sizes |= {"AS": limits.memory_bytes, "FSIZE": limits.scratch_bytes, "SIGPENDING": _MAX_SIGNALS}
        rlimits = {f"RLIMIT_{name}": (size, size) for name, size in sizes.items()}
        rlimits["RLIMIT_CPU"] = limits.cpu_s, limits.cpu_s + 1  # SIGXCPU, and SIGKILL for code that ignores it
        uid = _unused_uid() if unused_user else None
        settings = {"rlimits": rlimits, "uid": uid, "num_files": limits.scratch_files, "owner_fd": owner_fd}
        return json.dumps(settings | {"status_fd": ready_end, "memory_exit": MEMORY_EXIT})


def _unused_uid() -> int:
    """Return a user id without processes, within the range of this user namespace. ConfigError for a short range."""
    rows = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(rows, key=lambda row: row[2])
    refuse_if(count < 1 << 15, ConfigError, "few_user_ids", count=count)
    return first + count // 2 + secrets.randbelow(count // 2 - 2)


def _find_prefixes(interpreter: str) -> tuple[str, ...]:
    """Return the folders of an interpreter, of its base and of its packages, without folders below /usr."""
    packages = "*(path for path in sys.path if path.endswith('site-packages'))"  # a .pth file can name any folder
    code = f"import sys; print(sys.prefix, sys.base_prefix, {packages}, sep='\\n')"
    with reworded((OSError, subprocess.SubprocessError), ConfigError, f"interpreter {interpreter!r} does not run: "):
        done = subprocess.run([interpreter, "-I", "-c", code], capture_output=True, text=True, timeout=60.0, check=True)
    return tuple(dict.fromkeys(path for path in done.stdout.splitlines() if not f"{path}/".startswith("/usr/")))


def _pipe(host: contextlib.ExitStack, child: contextlib.ExitStack) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    return _close_with(read_end, host), _close_with(write_end, child)


def _close_with(fd: int, stack: contextlib.ExitStack) -> int:
    stack.callback(os.close, fd)
    return fd


def _make_sealed_file(data: bytes) -> int:
    """Return a descriptor of a read-only file in memory."""
    fd = os.memfd_create("megarl-tool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def filter_program() -> bytes:
    """Return the filter of system calls as struct sock_filter entries. ConfigError for an unknown machine."""
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
        lock = [_op(_LOAD, _OFFSET_ARGUMENTS + 8), _op(_IF_EQUAL, _F_SETLK, 0, 1), _op(_RETURN, _ERROR)]
        pretended = lock if name == "fcntl" else []
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


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
