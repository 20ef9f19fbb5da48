"""The Python tool runs code, and contains what is hostile. These need bubblewrap (apt-get install bubblewrap)."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megarl.engines.tools.protocol import ToolResult
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import Limits
from megarl.errors import ConfigError, RolloutError

pytestmark = pytest.mark.needs("bwrap")
MODEST = Limits(wall_s=600.0, cpu_s=60, memory_bytes=400 << 20, num_processes=4, scratch_bytes=4 << 20)


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    return PythonTool(MODEST)


def run(tool: PythonTool, code: str) -> ToolResult:
    return asyncio.run(tool(code))


def alive(argument: str) -> list[psutil.Process]:
    """Processes of this machine that have the argument; the dead that nobody has reaped yet are not counted."""
    found = []
    for process in psutil.process_iter():
        try:
            if argument in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def duration() -> Iterator[str]:
    """Seconds for `sleep` that no other process sleeps."""
    found = f"1000.{uuid.uuid4().int % 10**15:015d}"
    yield found
    for process in alive(found):
        process.kill()


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if a test leaves open files, children or scratch folders behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def held() -> tuple[int, int, list[str]]:
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        return len(os.listdir("/proc/self/fd")), len(children), os.listdir(tmp_path)

    gc.collect()
    files, children, folders = held()
    yield
    gc.collect()
    now = held()
    assert now[0] <= files  # what an earlier test held may go meanwhile
    assert now[1] <= children
    assert now[2] == folders


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("code", "exit_kind", "output"),
    [
        ("import sys\nprint('one')\nprint('two', file=sys.stderr)\nprint('three')", "ok", "one\ntwo\nthree\n"),
        ("import sys; sys.exit(3)", "error", ""),
        ("import os; os.kill(os.getpid(), 11)", "killed", ""),
        ("def f():\n    return __name__\nclass A: pass\nprint(f(), A)", "ok", "__main__ <class '__main__.A'>\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "ok", "\ufffd"),
        ("print('Grüße', '\ud800')", "ok", "Grüße ?\n"),
        ("print('a' in __import__('os').listdir('.'))\nopen('a', 'w').write('b')", "ok", "False\n"),
        ("import numpy, fractions\nprint(numpy.arange(4).sum(), fractions.Fraction(2, 4))", "ok", "6 1/2\n"),
    ],
)
def test_code_runs(tool: PythonTool, code: str, exit_kind: str, output: str) -> None:
    assert run(tool, code) == ToolResult(output, exit_kind)  # type: ignore[arg-type]


def test_an_error_shows_the_lines_of_the_code_and_none_of_the_tool(tool: PythonTool) -> None:
    result = run(tool, "def f(x):\n    return 1 / x\n\nf(0)\n")
    assert result.exit == "error"
    assert result.output.splitlines()[1:3] == ['  File "main.py", line 4, in <module>', "    f(0)"]
    assert result.output.endswith("ZeroDivisionError: division by zero\n")
    assert run(tool, "x = [").output.splitlines()[0].strip() == 'File "main.py", line 1'
    assert run(tool, "print(1)\0").exit == "error"
    assert "EOFError" in run(tool, "input()").output  # standard input is empty, and does not hang


def at_its_deadline(code: str, begun: Callable[[], bool]) -> ToolResult:
    """Run code whose deadline comes as soon as it has begun, on however busy a machine."""

    async def call() -> ToolResult:
        late = 0.0
        asyncio.get_running_loop().time = lambda: time.monotonic() + late  # type: ignore[method-assign]
        limits = Limits(wall_s=10_000.0, cpu_s=600, num_processes=4)
        result = asyncio.ensure_future(PythonTool(limits)(code))
        while not result.done() and not begun():
            await asyncio.sleep(0.02)
        late = 20_000.0
        return await result

    return asyncio.run(call())


@pytest.mark.usefixtures("nothing_left")
def test_time_ends(duration: str) -> None:
    """That of the processor, and the deadline: of code that waits, has closed its output, or has stopped itself."""
    for code in ("while True: pass", "import signal\nsignal.signal(24, signal.SIG_IGN)\nwhile True: pass"):
        result = run(PythonTool(Limits(wall_s=600.0, cpu_s=1)), "print('begun')\n" + code)
        assert result.output == "begun\n"
        assert result.exit == ("killed" if "signal" in code else "timeout")
    start = f"import os, subprocess, time\nprint('begun', flush=True)\nsubprocess.Popen(['sleep', '{duration}'])\n"
    for ending in (
        "time.sleep(300)",
        "os.close(1); os.close(2); time.sleep(300)",
        "os.kill(os.getpid(), 19)",
    ):
        assert at_its_deadline(start + ending, lambda: bool(alive(duration))) == ToolResult("begun\n", "timeout")
        assert alive(duration) == []


@pytest.mark.usefixtures("nothing_left")
def test_ten_gigabytes_are_not_given(tool: PythonTool) -> None:
    assert run(tool, "bytearray(10 << 30)") == ToolResult("MemoryError\n", "memory")
    assert run(tool, "import mmap\nmmap.mmap(-1, 10 << 30)").exit == "error"
    result = run(tool, "kept = []\nwhile True: kept.append(bytearray(1 << 12))")
    assert result == ToolResult("MemoryError\n", "memory")


@pytest.mark.usefixtures("nothing_left")
def test_a_print_of_a_gigabyte_is_cut(tool: PythonTool) -> None:
    result = run(tool, "for _ in range(1024): print('x' * (1 << 20))")
    assert result.exit == "output_limit"
    assert result.output == "x" * MODEST.output_bytes + f"\n[cut after {MODEST.output_bytes} bytes]"
    exact = run(tool, f"print('x' * {MODEST.output_bytes - 1})")
    assert (exact.exit, len(exact.output)) == ("ok", MODEST.output_bytes)


@pytest.mark.usefixtures("nothing_left")
def test_a_fork_bomb_stays_small_and_leaves_nothing(tool: PythonTool) -> None:
    threads = "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(1,)).start()"
    assert "can't start new thread" in run(tool, threads).output
    others = set(psutil.Process().children(recursive=True))  # such as multiprocessing's tracker
    counts: list[int] = []

    def has_exploded() -> bool:
        counts.append(len(set(psutil.Process().children(recursive=True)) - others))
        return max(counts) >= 7 and len(counts) > counts.index(max(counts)) + 20

    result = at_its_deadline("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", has_exploded)
    assert result.exit == "timeout"
    assert max(counts) == 7  # bubblewrap, its init, the code, four more


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("ending", ["", "import os; os._exit(0)"])
def test_a_child_does_not_outlive_its_parent(tool: PythonTool, duration: str, ending: str) -> None:
    """Also one that holds the output."""
    code = f"""
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(["sleep", "{duration}"])
    os._exit(0)
def words(pid):
    try:
        return open(f"/proc/{{pid}}/cmdline").read()
    except OSError:  # it has ended meanwhile
        return ""
while not any("{duration}" in words(pid) for pid in os.listdir("/proc") if pid.isdigit()):
    time.sleep(0.01)
print("begun", flush=True)
{ending}
"""
    assert run(tool, code).output == "begun\n"
    assert alive(duration) == []


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.01, 0.03, math.inf])
@pytest.mark.usefixtures("nothing_left")
def test_a_cancelled_call_leaves_nothing(tool: PythonTool, duration: str, delay_s: float | None) -> None:
    code = f"import subprocess\nopen('file', 'w')\nsubprocess.run(['sleep', '{duration}'], start_new_session=True)"

    async def cancelled() -> None:
        call = asyncio.ensure_future(tool(code))
        if delay_s == math.inf:
            while not alive(duration) and not call.done():
                await asyncio.sleep(0.02)
        elif delay_s is not None:
            await asyncio.sleep(delay_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert alive(duration) == []

    asyncio.run(cancelled())


def test_calls_die_with_a_killed_host(duration: str) -> None:
    host = f"""
import asyncio
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import Limits
asyncio.run(PythonTool(Limits(wall_s=600.0))("import os; os.execvp('sleep', ['sleep', '{duration}'])"))
"""
    deadline = time.monotonic() + 600.0
    with subprocess.Popen([sys.executable, "-c", host]) as process:
        while not alive(duration):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    while alive(duration):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("nothing_left")
def test_many_calls_at_once_keep_their_outputs_apart(tool: PythonTool) -> None:
    async def all_of_them() -> list[ToolResult]:
        codes = [
            f"open('name', 'x').write('{index:02d}' * 8000)\nprint(open('name').read(), end='')" for index in range(7)
        ]
        return await asyncio.gather(*(tool(code) for code in [*codes, "while True: print('x' * 1000)"]))

    *results, endless = asyncio.run(all_of_them())
    assert [result.output for result in results] == [f"{index:02d}" * 8000 for index in range(7)]
    assert endless.exit == "output_limit"


def test_the_length_of_the_code_is_limited() -> None:
    tool = PythonTool(Limits(wall_s=600.0, code_bytes=20))
    assert run(tool, "print(1)        #####").exit == "error"
    assert run(tool, "print(1)        ####").output == "1\n"


def test_without_bubblewrap_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"found no bubblewrap.*apt-get install bubblewrap"):
        PythonTool()
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match=r"does not run in bubblewrap.*No permissions to create new namespace"):
        PythonTool()
    with pytest.raises(ConfigError, match=r"does not run: "):
        PythonTool(interpreter=str(tmp_path / "python"))


def test_a_sandbox_that_breaks_later_is_an_error_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text('#!/bin/sh\nPATH=${0%/*}/real exec bwrap "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    real = tmp_path / "real"
    real.mkdir()
    found = subprocess.run(["which", "bwrap"], capture_output=True, text=True, check=True).stdout.strip()
    (real / "bwrap").symlink_to(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        tool = PythonTool(MODEST)
    assert run(tool, "print(1)").output == "1\n"
    (real / "bwrap").unlink()
    with pytest.raises(RolloutError, match="did not start"):
        run(tool, "print(1)")
