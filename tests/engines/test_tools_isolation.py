"""Code in the sandbox sees and changes nothing of the host: files, network, secrets, kernel. These need bubblewrap."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from megarl.engines.tools.protocol import ToolResult
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import Limits

pytestmark = pytest.mark.needs("bwrap")


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    return PythonTool(Limits(wall_s=120.0, scratch_bytes=4 << 20))


def run(tool: PythonTool, code: str) -> ToolResult:
    return asyncio.run(tool(code))


def outside(code: str) -> str:
    """The output of the same code without the sandbox: what succeeds only here, the sandbox prevents."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_files_of_the_host_are_neither_read_nor_written(tool: PythonTool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    code = f"""
for mode in "ra":
    try:
        with open({str(secret)!r}, mode) as file:
            print(file.read() if mode == "r" else file.write("!"))
    except OSError as error:
        print(type(error).__name__)
"""
    secret.write_text("hidden")
    assert run(tool, code).output == "FileNotFoundError\nFileNotFoundError\n"
    assert secret.read_text() == "hidden"
    assert outside(code) == "hidden\n1\n"


def test_nothing_but_the_scratch_folder_can_be_written(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    for path in (tmp_path / "venv").rglob("*"):
        if not path.is_symlink():
            path.chmod(0o777)  # what keeps the interpreter from being changed is not that its files are someone else's
    tool = PythonTool(Limits(wall_s=120.0, cpu_s=60), interpreter=str(tmp_path / "venv/bin/python"))
    result = run(
        tool,
        """
import os, stat, sys
written = []
for folder, folders, files in os.walk("/"):
    if folder.count("/") > 3 or folder.startswith("/proc/") and folder != "/proc/sys":
        folders.clear()
    for path in [folder, *(os.path.join(folder, name) for name in files)]:
        try:
            if os.path.isdir(path):
                with open(os.path.join(path, "new"), "w") as file:
                    written.append(path)
            elif stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "a") as file:
                    written.append(path)
        except OSError:
            pass
own = [os.path.join(sys.prefix, name) for name in ("pyvenv.cfg", "bin/activate")]
for name in (*own, os.__file__, "/proc/sys/kernel/hostname", "/proc/self/oom_score_adj", "/dev/shm/a"):
    try:
        with open(name, "a"):
            written.append(name)
    except OSError:
        pass
for act in (lambda: os.unlink("/bin"), lambda: os.rename("/usr", "/tmp/usr"), lambda: os.chmod("/", 0o777)):
    try:
        act()
        written.append("changed")
    except OSError:
        pass
print(written)
""",
    )
    assert result.exit == "ok", result.output
    written = set(ast.literal_eval(result.output))
    assert "/tmp" in written
    # An interpreter below /tmp has its parents in the scratch folder.
    assert written <= {
        "/tmp",
        *(str(parent) for parent in tmp_path.parents if parent.is_relative_to("/tmp")),
        str(tmp_path),
    }


def test_a_link_in_scratch_leads_nowhere(tool: PythonTool, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "file").write_text("hidden")
    code = f"""
import os
os.symlink({str(folder)!r}, "link")
os.makedirs("locked/below")
os.chmod("locked", 0)
try:
    open("link/file", "a").write("!")
    print(open("link/file").read())
except OSError as error:
    print(type(error).__name__)
"""
    assert run(tool, code).output == "FileNotFoundError\n"
    assert (folder / "file").read_text() == "hidden"


def test_there_is_no_network(tool: PythonTool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0megarl-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_UNIX, {name!r})):
    try:
        socket.socket(family).connect(address)
        print("connected")
    except OSError as error:
        print(error.errno)
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"a", ("192.0.2.1", 53))
except OSError as error:
    print(error.errno)
try:
    print([name for _, name in socket.if_nameindex()])
except OSError:
    print([])
"""
        assert run(tool, code).output == "97\n111\n97\n[]\n"
        assert outside(code).startswith("connected\nconnected\n")


def test_secrets_in_environments_are_not_seen(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_TEST_TOKEN", "hunter2")
    code = """
import os, glob
print(any("hunter2" in value for value in os.environ.values()))
found = False
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/task/*/environ"):
    try:
        found = found or b"hunter2" in open(path, "rb").read()
    except OSError:
        pass
print(found)
print(len(glob.glob("/proc/[0-9]*")))
"""
    with subprocess.Popen(["sleep", "1000"]) as other:  # has the secret in its environment
        try:
            assert run(tool, code).output == "False\nFalse\n2\n"
            assert outside(code).startswith("True\nTrue\n")
        finally:
            other.kill()


def test_the_code_has_no_rights_and_is_not_root(tool: PythonTool) -> None:
    result = run(
        tool,
        """
import os
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(*(int(lines[name], 16) for name in ("CapEff", "CapPrm", "CapAmb", "NoNewPrivs", "Seccomp")))
print(os.getuid() != 0, os.getgroups() in ([], [os.getgid()], [65534]), sorted(map(int, os.listdir("/proc/self/fd"))))
""",
    )
    rights, identity = result.output.splitlines()
    assert rights == "0 0 0 1 2"
    if os.geteuid() == 0:
        assert identity == "True True [0, 1, 2, 3]"  # 3 is the listing itself
    else:
        assert identity.endswith("[0, 1, 2, 3]")
