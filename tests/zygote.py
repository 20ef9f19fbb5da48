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
import ctypes
import gc
import io
import json
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

MAX_ORDER_BYTES = 200_000
PYTHONS = {sys.executable}
"""What a command line has as its first word if it starts this interpreter."""
_spawn = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_execv = os.execv
_register = atexit.register
_this_module = sys.modules[__name__]
"""Its functions are needed after another program has become ``__main__``."""
BASE_PATH: list[str] = []
"""``sys.path`` without script and PYTHONPATH."""
HANDLERS: dict[str, tuple[logging.Handler, ...]] = {}
"""Of the loggers, by name."""


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


def note_imported() -> None:
    """Remember what imports alone have made."""
    HANDLERS.update({name: tuple(logger.handlers) for name, logger in _loggers().items()})


def note_path() -> None:
    """Remember what belongs to the interpreter itself, and not to PYTHONPATH."""
    words = [sys.executable, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"]
    BASE_PATH[:] = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)


def run_python(words: Sequence[str], environment: dict[str, str], cwd: str | None) -> NoReturn:
    """End this process as ``python WORDS`` would, in a fresh process."""
    code = 1
    try:
        _forget_parent()
        os.environ.clear()
        os.environ.update(environment)
        if cwd is not None:
            os.chdir(cwd)
        multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        _write_command_line([sys.executable, *words])
        code = _main_program(list(words))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _main_program(words: list[str]) -> int:
    """Run the program; the exit code of the interpreter."""
    isolated, unbuffered = False, bool(os.environ.get("PYTHONUNBUFFERED"))
    while words and words[0] in ("-u", "-I", "-B", "-W"):
        flag = words.pop(0)
        isolated, unbuffered = isolated or flag == "-I", unbuffered or flag == "-u"
        if flag == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
    _open_streams(unbuffered)
    path = [] if isolated else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = list(dict.fromkeys([*(entry for entry in path if entry), *BASE_PATH]))
    code: object = 0
    try:
        _run(words)
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:
        traceback.print_exception(error)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return int(code or 0) & 0xFF


def _run(words: list[str]) -> None:
    first, *rest = words
    is_safe = bool(os.environ.get("PYTHONSAFEPATH"))
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = [] if is_safe else [""]
        exec(compile(rest[0], "<string>", "exec"), _main_module().__dict__)
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path[:0] = [] if is_safe else [os.getcwd()]
        sys.modules.pop(rest[0], None)  # a fresh interpreter would not have it
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:0] = [] if is_safe else [os.path.dirname(os.path.realpath(first))]
        with open(first, "rb") as file:
            exec(compile(file.read(), first, "exec"), _main_module(__file__=first).__dict__)


def _main_module(**names: str) -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __spec__=None, **names)
    return main


def _open_streams(unbuffered: bool) -> None:
    def opened(number: int, mode: str, line_buffering: bool, errors: str = "strict") -> io.TextIOWrapper:
        buffering = 0 if unbuffered and mode == "wb" else -1
        buffered: Any = open(number, mode, buffering=buffering, closefd=False)  # noqa: SIM115
        return io.TextIOWrapper(
            buffered, encoding="utf-8", errors=errors, line_buffering=line_buffering, write_through=unbuffered
        )

    sys.stdin = sys.__stdin__ = opened(0, "rb", line_buffering=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = opened(1, "wb", line_buffering=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = opened(2, "wb", line_buffering=True, errors="backslashreplace")  # type: ignore[misc]
    for name, logger in _loggers().items():  # handlers of a parent write to files that are closed here
        logger.handlers = list(HANDLERS.get(name, ()))
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr


def _loggers() -> dict[str, logging.Logger]:
    named = logging.root.manager.loggerDict.items()
    return {"": logging.root} | {name: logger for name, logger in named if isinstance(logger, logging.Logger)}


def _forget_parent() -> None:
    """What a new program does not inherit: signal handlers, ends of pipes, what is to happen at exit, randomness."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    subprocess._active.clear()  # type: ignore[attr-defined]
    tracker = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    gc.enable()


def _write_command_line(words: Sequence[str]) -> None:
    """Let /proc/PID/cmdline show these words: the kernel reads them from the memory that held those of the zygote."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def main() -> None:
    with contextlib.suppress(ImportError):  # finds its memory only while command line and environment are as they were
        __import__("setproctitle").getproctitle()
    gc.disable()  # the collector takes a third of the time of an import
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]  # PYTHONSAFEPATH leaves it out
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
