"""Starts Python programs by a fork of a process that has imported their heavy packages already.

``python zygote.py FD MODULES WAY PADDING`` imports the modules (names with commas) and then answers orders on a socket:
for each it forks a process that does what ``python ARGUMENTS`` would do in a fresh interpreter. When such a process
starts Python itself, by ``subprocess``, ``os.execv`` or ``multiprocessing``, that is a fork too. A launch of two ranks
under torchrun then costs a fork of each process instead of ten seconds of imports. Everything else is as it would be:
parents, sessions, signals, standard streams, environment and /proc/PID/cmdline. The other end is preloaded.py.

``python zygote.py - MODULES WAY PADDING ARGUMENTS`` is such a process itself: it imports once for itself and for all
that it starts. WAY is ``fork`` if ``multiprocessing`` shall fork where the program asks it to spawn.

Standard library only: SGLang's environment runs it too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [HERE, *(entry for entry in sys.path if entry != HERE)]  # PYTHONSAFEPATH leaves it out

from interpreter import note_imported, note_path, run_python  # noqa: E402

MAX_ORDER_BYTES = 200_000
PYTHONS = {sys.executable}
"""What a command line has as its first word if it starts this interpreter."""
_spawn = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_execv = os.execv
_register = atexit.register
_this_module = sys.modules[__name__]
"""Its functions are needed after another program has become ``__main__``."""


def _register_here(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    """``atexit.register`` for this process alone, not for its forks."""
    owner = os.getpid()

    def at_exit() -> None:
        if os.getpid() == owner:
            function(*arguments, **options)

    _register(at_exit)
    return function


def _fork_instead(process: subprocess.Popen[Any], words: Any, executable: Any, *settings: Any) -> None:
    """``Popen._execute_child``: a fork where the command starts this interpreter."""
    if isinstance(words, (str, bytes, os.PathLike)) or os.fspath(next(iter(words))) not in PYTHONS or executable:
        _spawn(process, words, executable, *settings)
        return
    (preexec_fn, close_fds, pass_fds, cwd, env, _, _, _, in_read, in_write, out_read, out_write) = settings[:12]
    err_read, err_write, _, _, _, _, _, start_new_session, process_group = settings[12:]
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(
            [os.fspath(word) for word in list(words)[1:]],
            dict(os.environ if env is None else env),
            None if cwd is None else os.fspath(cwd),
            streams=(in_read, out_write, err_write),
            keep=pass_fds if close_fds else range(3, 1 << 16),
            session=start_new_session,
            group=process_group,
            before=preexec_fn,
        )
    process.pid = pid
    process._child_created = True  # type: ignore[attr-defined]
    process._close_pipe_fds(in_read, in_write, out_read, out_write, err_read, err_write)  # type: ignore[attr-defined]


def _become(
    words: list[str],
    env: dict[str, str],
    cwd: str | None,
    *,
    streams: Sequence[int],
    keep: Sequence[int] = (),
    session: bool = False,
    group: int = -1,
    before: Callable[[], Any] | None = None,
) -> NoReturn:
    """The forked child: descriptors and groups as ``subprocess`` sets them, then the program."""
    try:
        copies = [number if stream < 0 else os.dup(stream) for number, stream in enumerate(streams)]
        for number, copy in enumerate(copies):
            os.dup2(copy, number)
        _close_all_but(keep)
        if session:
            os.setsid()
        elif group is not None and group >= 0:
            os.setpgid(0, group)
        if before is not None:
            before()
        run_python(words, env, cwd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(255)


def _close_all_but(keep: Sequence[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _become_instead(path: Any, words: Sequence[str]) -> None:
    """``os.execv``: the same process goes on as another program."""
    if os.fspath(path) not in PYTHONS:
        _execv(path, words)
    _close_all_but(())
    run_python(list(words)[1:], dict(os.environ), None)


def serve(orders: socket.socket) -> None:
    """Fork what is asked for. A forked process becomes the child of whoever asks, see preloaded.py."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 32)
        if not message:
            return
        order = json.loads(message)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                while os.getppid() != order["parent"]:
                    time.sleep(0.001)
                kept = dict(zip(order["keep"], descriptors[3:], strict=True))
                for wanted, descriptor in kept.items():
                    os.dup2(descriptor, wanted)
                _become(
                    order["words"],
                    order["env"],
                    order["cwd"],
                    streams=descriptors[:3],
                    keep=[*kept],
                    session=order["session"],
                )
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        pid_text = os.read(read, 32)
        for descriptor in (read, write, *descriptors):
            os.close(descriptor)
        orders.send(pid_text)


def main() -> None:
    with contextlib.suppress(ImportError):  # finds its memory only while command line and environment are as they were
        __import__("setproctitle").getproctitle()
    gc.disable()  # the collector takes a third of the time of an import
    sys.path.remove(HERE)
    note_path()
    PYTHONS.add(os.environ.pop("ZYGOTE_PYTHON", sys.executable))
    descriptor, modules, way, _, *words = sys.argv[1:]
    if any(module.startswith("megarl.") for module in modules.split(",")):
        __import__("megarl").enable_cpu()  # before Megatron is imported
    for module in modules.split(","):
        __import__(module)
    subprocess.Popen._execute_child = _fork_instead  # type: ignore[attr-defined]
    os.execv = _become_instead  # type: ignore[assignment]
    atexit.register = _register_here  # type: ignore[assignment]
    if way == "fork":
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    note_imported()
    gc.freeze()
    if descriptor == "-":
        run_python(words, dict(os.environ), None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(descriptor)) as orders:
        orders.send(b"ready")
        with contextlib.suppress(ConnectionError):
            serve(orders)


if __name__ == "__main__":
    main()
