"""The Python tool: each call runs in a new process, in the sandbox of ``megarl.engines.tools.sandbox``."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import psutil

from megarl.engines.tools.protocol import ToolExit, ToolResult
from megarl.engines.tools.sandbox import MEMORY_EXIT, Child, Limits, Sandbox, prepare
from megarl.errors import ConfigError, RolloutError

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
        self._sandbox = prepare(self.limits, interpreter or sys.executable)
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
        self._loop = asyncio.get_running_loop()
        self._process_fd = os.pidfd_open(child.process.pid)
        self._init_fd: int | None = None
        self._stopped: asyncio.Future[ToolExit | None] = self._loop.create_future()
        self._output = _Pipe(limits.output_bytes, on_data=lambda: self._output.more and self._stop("output_limit"))
        self._status = _Pipe(1 << 12, on_data=self._on_status)

    async def result(self) -> ToolResult:
        started = time.monotonic()
        try:
            await _finish(self._connect())
            exited = asyncio.ensure_future(_await_readable(self._process_fd))
            exited.add_done_callback(lambda _: self._stop(None))
            try:
                async with asyncio.timeout(self._limits.wall_s - (time.monotonic() - started)):
                    reason = await self._stopped
            except TimeoutError:
                reason = "timeout"
            finally:
                exited.cancel()
        finally:
            await _finish(self._end())
        return self._make_result(reason)

    async def _connect(self) -> None:
        for pipe, fd in ((self._status, self._child.status_fd), (self._output, self._child.output_fd)):
            await self._loop.connect_read_pipe(lambda pipe=pipe: pipe, os.fdopen(fd, "rb", 0))

    def _stop(self, reason: ToolExit | None) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)

    def _on_status(self) -> None:
        """Open the first process of the sandbox, whose end ends all processes."""
        line, complete, _ = bytes(self._status.data).partition(b"\n")
        if self._init_fd is not None or not complete or not line.startswith(b"{"):
            return
        pid = json.loads(line)["child-pid"]
        with (
            contextlib.suppress(OSError, psutil.Error),
            contextlib.ExitStack() as closing,
        ):  # the process may have ended
            fd = os.pidfd_open(pid)
            closing.callback(os.close, fd)
            # A different parent means that the process id was reused.
            if psutil.Process(pid).ppid() == self._child.process.pid:
                self._init_fd = fd
                closing.pop_all()

    async def _end(self) -> None:
        """Kill all processes, wait for the end, and remove the scratch folder."""
        try:
            await self._kill()
            async with asyncio.timeout(END_S):
                await _await_readable(self._process_fd)  # bubblewrap ends after the last process inside
                await self._output.ended.wait()
        except TimeoutError as error:
            raise RolloutError(f"a Python call could not be killed within {END_S:g} s: look at the host") from error
        finally:
            self._output.close()
            self._status.close()
            for fd in (self._process_fd, self._init_fd):
                if fd is not None:
                    os.close(fd)
            self._child.process.poll()

    async def _kill(self) -> None:
        # If killed during the setup of its child, bubblewrap would leave the child waiting.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._status.line.wait()
        # Kill the first process: bubblewrap reaps the process and ends. Killing bubblewrap would leave a zombie.
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if self._init_fd is None:
                for process in psutil.Process(self._child.process.pid).children():
                    process.kill()
            signal.pidfd_send_signal(self._process_fd if self._init_fd is None else self._init_fd, signal.SIGKILL)

    def _make_result(self, reason: ToolExit | None) -> ToolResult:
        status = self._child.process.returncode
        text = bytes(self._output.data).decode("utf-8", "replace")
        if b"ready" not in self._status.data:
            raise RolloutError(
                f"a Python call did not start ({reason or f'exit status {status}'}): {text.strip()[-500:]}"
            )
        if self._output.more:
            text += f"\n[cut after {self._limits.output_bytes} bytes]"
        if reason is None:
            reason = "output_limit" if self._output.more else _classify_exit(status)
        return ToolResult(text, reason)


class _Pipe(asyncio.Protocol):
    """Keeps the first bytes of a pipe, and stops reading at the limit."""

    def __init__(self, max_bytes: int, on_data: Callable[[], object]) -> None:
        self.data = bytearray()
        self.more = False
        self.line = asyncio.Event()
        """Set at the first complete line, or at the end."""
        self.ended = asyncio.Event()
        """Set after all writers have closed the pipe, or reading has stopped."""
        self._max_bytes, self._on_data = max_bytes, on_data
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        room = self._max_bytes - len(self.data)
        self.data += data[:room]
        self.more = self.more or len(data) > room
        self._on_data()
        if b"\n" in data:
            self.line.set()
        if self.more:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.line.set()
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _classify_exit(status: int) -> ToolExit:
    if status == 0:
        return "ok"
    if status == MEMORY_EXIT:
        return "memory"
    if status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return "timeout"
    return "killed" if status < 0 or 128 < status <= 192 else "error"  # bubblewrap reports a signal as 128 + number


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
    if text != "42\n":
        raise ConfigError(
            f"Python does not run in bubblewrap ({sandbox.bwrap}) on this host: {text.strip()[-500:]!r}. A container "
            "may need the right to make namespaces, or memory_bytes may be too small for the interpreter"
        )
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


async def _finish(work: Awaitable[None]) -> None:
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
    task.result()
    if cancelled is not None:
        raise cancelled
