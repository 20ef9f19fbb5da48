"""The Python tool: each call runs in a new process, in the sandbox of ``megarl.engines.tools.sandbox``."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import psutil

from megarl.engines.tools.protocol import ToolExit, ToolResult
from megarl.engines.tools.sandbox import MEMORY_EXIT, Child, Limits, Sandbox
from megarl.errors import ConfigError, RolloutError, refuse_if

T = TypeVar("T")
START_S = 5.0
"""Time for bubblewrap to name its child process; afterwards bubblewrap is killed without the name."""
END_S = 30.0
"""Time limit for the kernel to remove killed processes."""
TRY_S = 60.0
"""Time for a line of code in the trial of the sandbox."""


class PythonTool:
    """Runs the code of a model; calls share no files and no variables.

    The constructor tries the sandbox, which blocks for under a second. ConfigError without bubblewrap, or if the host
    prevents the sandbox.

    Calls may overlap; the caller bounds the number. A cancelled call leaves no process and no file behind. The calls of
    a killed process end within seconds.
    """

    name = "python"

    def __init__(self, limits: Limits | None = None, *, interpreter: str | None = None) -> None:
        self.limits = limits or Limits()
        self._sandbox = Sandbox(self.limits, interpreter or sys.executable)
        self.limits_files = _try(self._sandbox)
        """Whether ``Limits.scratch_files`` holds: not if the host takes all rights from the sandbox."""

    def describe_limits(self) -> str:
        """Return the limits of a call on this host, in words."""
        files = "number of files" if self.limits_files else "not the number of files, for want of CAP_SYS_ADMIN"
        return f"limits processes, time, memory of each process, bytes on disk, {files}"

    async def __call__(self, argument: str) -> ToolResult:
        """Run the code. RolloutError if the process did not start or could not be ended."""
        num_bytes = len(argument.encode("utf-8", "replace"))
        if num_bytes > self.limits.code_bytes:
            return ToolResult(f"the code has {num_bytes} bytes, at most {self.limits.code_bytes} are run", "error")
        return await _Call(self._sandbox.start(argument), self.limits).result()


class _Call:
    def __init__(self, child: Child, limits: Limits) -> None:
        self._child, self._limits = child, limits
        self._process_fd = os.pidfd_open(child.process.pid)
        self._init_fd: int | None = None
        self._output, self._status = asyncio.StreamReader(), asyncio.StreamReader()
        self._pipes: list[asyncio.BaseTransport] = []
        self._text = bytearray()
        """Of the code, at most a byte more than the limit."""
        self._named = asyncio.ensure_future(self._open_init())

    async def result(self) -> ToolResult:
        started, reason = time.monotonic(), None
        try:
            await _finish(self._connect())
            async with asyncio.timeout(self._limits.wall_s - (time.monotonic() - started)):
                await self._collect()
        except TimeoutError:
            reason = "timeout"
        finally:
            status = await _finish(self._end())
        return self._make_result(reason, status)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        for reader, fd in ((self._status, self._child.status_fd), (self._output, self._child.output_fd)):
            protocol = partial(asyncio.StreamReaderProtocol, reader)
            self._pipes.append((await loop.connect_read_pipe(protocol, os.fdopen(fd, "rb", 0)))[0])

    async def _collect(self) -> None:
        """Return at the end of the process, or at the limit of its output."""
        room = self._limits.output_bytes + 1
        while len(self._text) < room and (data := await self._output.read(room - len(self._text))):
            self._text += data
        if len(self._text) < room:
            await _await_readable(self._process_fd)

    async def _open_init(self) -> None:
        """Open the first process of the sandbox, whose end ends all processes."""
        if not (line := await self._status.readline()).startswith(b"{"):
            return
        pid = json.loads(line)["child-pid"]
        # Suppressed: the process may have ended.
        with contextlib.suppress(OSError, psutil.Error), contextlib.ExitStack() as closing:
            fd = os.pidfd_open(pid)
            closing.callback(os.close, fd)
            # A different parent means that the process id was reused.
            if psutil.Process(pid).ppid() == self._child.process.pid:
                self._init_fd = fd
                closing.pop_all()

    async def _end(self) -> bytes:
        """Kill all processes, wait for the end, and remove the scratch folder. Return the rest of the status."""
        try:
            await self._kill()
            async with asyncio.timeout(END_S):
                await _await_readable(self._process_fd)  # bubblewrap ends after the last process inside
                return await self._status.read()
        except TimeoutError as error:
            raise RolloutError(f"a Python call could not be killed within {END_S:g} s: look at the host") from error
        finally:
            for pipe in self._pipes:
                pipe.close()
            for fd in (self._process_fd, self._init_fd):
                if fd is not None:
                    os.close(fd)
            self._child.process.poll()

    async def _kill(self) -> None:
        # If killed during the setup of its child, bubblewrap would leave the child waiting.
        await asyncio.wait([self._named], timeout=START_S)
        # Kill the first process: bubblewrap reaps the process and ends. Killing bubblewrap would leave a zombie.
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if self._init_fd is None:
                for process in psutil.Process(self._child.process.pid).children():
                    process.kill()
            signal.pidfd_send_signal(self._process_fd if self._init_fd is None else self._init_fd, signal.SIGKILL)

    def _make_result(self, reason: ToolExit | None, status: bytes) -> ToolResult:
        code, limit = self._child.process.returncode, self._limits.output_bytes
        text = bytes(self._text[:limit]).decode("utf-8", "replace")
        if b"ready" not in status:
            raise RolloutError(f"a Python call did not start ({reason or f'status {code}'}): {text.strip()[-500:]}")
        if len(self._text) > limit:
            text, reason = f"{text}\n[cut after {limit} bytes]", reason or "output_limit"
        return ToolResult(text, reason or _classify_exit(code))


def _classify_exit(status: int) -> ToolExit:
    exits: dict[int, ToolExit] = {0: "ok", MEMORY_EXIT: "memory"}
    exits |= dict.fromkeys((-signal.SIGXCPU, 128 + signal.SIGXCPU), "timeout")
    is_killed = status < 0 or 128 < status <= 192  # bubblewrap reports a signal as 128 + number
    return exits.get(status, "killed" if is_killed else "error")


def _try(sandbox: Sandbox) -> bool:
    """Run a line of code; return whether the number of files is limited. ConfigError for a wrong output."""
    child = sandbox.start("bytearray(1 << 20); print(6 * 7)")  # more than the interpreter may have left by chance
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(TRY_S)
    finally:
        child.process.kill()
        child.process.wait()
        with open(child.status_fd, "rb") as status:
            limits_files = b"ready files" in status.read()
        with open(child.output_fd, "rb") as output:
            text = output.read().decode("utf-8", "replace")
    refuse_if(text != "42\n", ConfigError, "bubblewrap_fails", sandbox=sandbox, text=text.strip()[-500:])
    return limits_files


async def _await_readable(fd: int) -> None:
    """Wait until a descriptor is readable; a process descriptor is readable after the end of the process."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(fd)


async def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must not be interrupted; a cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
