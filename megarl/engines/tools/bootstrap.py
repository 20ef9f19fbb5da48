"""The first code inside a sandbox: gives up rights, sets limits, then runs the code from standard input.

An interpreter gets this file as text (``python -c``). The file imports nothing of megarl, which the sandbox lacks.
"""

import ctypes
import json
import linecache
import os
import resource
import select
import signal
import sys
import traceback
import types

MS_NOSUID, MS_NODEV, MS_REMOUNT, PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 2, 4, 32, 1, 4
CAPABILITY_VERSION_3 = 0x20080522


def read_code() -> str:
    """Return the code from standard input, and replace standard input by an empty file."""
    with open(0, "rb", closefd=False) as stdin:
        code = stdin.read()
    empty_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty_fd, 0)
    os.close(empty_fd)
    return code.decode()


def limit_files(num_files: int) -> bool:
    """Limit the number of files in /tmp, and thereby kernel memory; return False without the right to mount."""
    options = f"nr_inodes={num_files}".encode()
    return ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", MS_REMOUNT | MS_NOSUID | MS_NODEV, options) == 0


def drop_capabilities() -> None:
    """Give up all capabilities for good: bubblewrap prevents that a program gets more rights. OSError of capset."""
    header, empty = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, empty) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def take_limits(settings: dict) -> None:
    """Set the resource limits, at most the host's limits, and become the unused user."""
    for name, (soft, hard) in settings["rlimits"].items():
        kind = getattr(resource, name)
        host_limit = resource.getrlimit(kind)[1]
        if host_limit != resource.RLIM_INFINITY:
            soft, hard = min(soft, host_limit), min(hard, host_limit)
        resource.setrlimit(kind, (soft, hard))
    # The kernel exempts root from the limit of processes: root becomes an unused user.
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    drop_capabilities()


def be_init(owner_fd: int) -> None:
    """Continue in a child. This process waits, and ends with the child's status, or when the owner has ended.

    All processes of the sandbox end with this process. The first process of a sandbox ignores signals without a
    handler, such as the signal of the CPU limit, so that user code must not run in the first process. The first process
    keeps the user who started it, so that bubblewrap may signal it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    main = os.fork()
    if main == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(owner_fd)
        return
    drop_capabilities()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_DUMPABLE, 0)  # the code may have the same user id, and must not read this process
    os.dup2(owner_fd, 3)
    os.closerange(4, 1 << 16)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while not select.select([3], [], [], 0)[0]:
        pid, status = os.waitpid(-1, os.WNOHANG)  # reaps orphans too
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if pid == 0:
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)
    os._exit(128 + signal.SIGKILL)


def run(code: str, memory_exit: int) -> int:
    """Run the code as ``__main__``; return the exit status."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    linecache.cache["main.py"] = (len(code), None, code.splitlines(True), "main.py")  # lines for tracebacks
    try:
        exec(compile(code, "main.py", "exec"), vars(main))
    except SystemExit:
        raise
    except MemoryError:
        vars(main).clear()
        os.write(2, b"MemoryError\n")
        os._exit(memory_exit)
    except BaseException as error:
        inside = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, inside)
        return 1
    return 0


def start() -> None:
    """Set up the process by the settings in the arguments, and run the code."""
    settings = json.loads(sys.argv[1])
    code = read_code()
    files = limit_files(settings["num_files"])
    be_init(settings["owner_fd"])
    take_limits(settings)
    os.write(settings["status_fd"], b"ready files\n" if files else b"ready\n")
    os.close(settings["status_fd"])
    sys.exit(run(code, settings["memory_exit"]))


if __name__ == "__main__":
    start()
