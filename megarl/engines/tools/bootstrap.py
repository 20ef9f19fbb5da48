"""The first thing that runs inside: gives up rights, takes on the limits, then runs the code from standard input.

It is handed to an interpreter as text (``python -c``) and imports nothing of megarl, which does not exist in there.
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
    with open(0, "rb", closefd=False) as stdin:
        code = stdin.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return code.decode()


def limit_files(num_files: int) -> bool:
    """Limits the files in /tmp, which takes their kernel memory; False where this process has no right to mount."""
    options = f"nr_inodes={num_files}".encode()
    return ctypes.CDLL(None).mount(b"none", b"/tmp", b"tmpfs", MS_REMOUNT | MS_NOSUID | MS_NODEV, options) == 0


def drop_capabilities() -> None:
    """Gives up all of them for good: bubblewrap has seen to it that no program gets more than its caller has."""
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def take_limits(settings: dict) -> None:
    for name, (soft, hard) in settings["rlimits"].items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]  # what this host allows may be less
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))
    # The kernel exempts root from the limit of processes, so root becomes a user that nobody else is.
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    if settings["num_files"] is not None:
        drop_capabilities()


def be_init(owner_fd: int) -> None:
    """Goes on in a child; this process waits for it and ends as it did, or once its owner has ended.

    In a sandbox all other processes end with this one; without, those of its session. The first process of a sandbox
    ignores signals that it has no handler for, its own limit of CPU time among them: code would not behave in it as
    elsewhere. It also stays the user that started it, whom bubblewrap may still signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    main = os.fork()
    if main == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(owner_fd)
        return
    if os.getpid() == 1:
        drop_capabilities()
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_DUMPABLE, 0)  # the code may have the same user id: it cannot look in here
    os.dup2(owner_fd, 3)
    os.closerange(4, 1 << 16)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while not select.select([3], [], [], 0)[0]:
        pid, status = os.waitpid(-1, os.WNOHANG)  # orphans come here too
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if pid == 0:
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)
    if os.getpid() != 1:
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


def run(code: str, memory_exit: int) -> int:
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
    settings = json.loads(sys.argv[1])
    code = read_code()
    files = settings["num_files"] is not None and limit_files(settings["num_files"])
    be_init(settings["owner_fd"])
    take_limits(settings)
    os.write(settings["status_fd"], b"ready files\n" if files else b"ready\n")
    os.close(settings["status_fd"])
    sys.exit(run(code, settings["memory_exit"]))


if __name__ == "__main__":
    start()
