"""What ``python ARGUMENTS`` does in a fresh process, in a fork of one that has imported much already: see zygote.py."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import logging
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

BASE_PATH: list[str] = []
"""``sys.path`` without script and PYTHONPATH."""
HANDLERS: dict[str, tuple[logging.Handler, ...]] = {}
"""Of the loggers, by name."""


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
