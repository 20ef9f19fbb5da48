"""Attacks on the sandbox of the Python tool, and on files, network and secrets of its host. They need bubblewrap.

Many rows run in one call, so that the file takes seconds. test_tools_python.py has the attacks that need their own call
(endless loops, fork bombs, floods of output).
"""

from __future__ import annotations

import ast
import asyncio
import errno
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

from megarl.engines.tools.protocol import ToolResult
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import BOOTSTRAP, Limits

pytestmark = pytest.mark.needs("bwrap")

LIMITS = Limits(wall_s=600.0, cpu_s=120, memory_bytes=600 << 20, scratch_bytes=8 << 20, scratch_files=1000)
PERM, AF, RO = errno.EPERM, errno.EAFNOSUPPORT, errno.EROFS
ABSENT, DENIED = errno.ENOENT, errno.EACCES

# name: numbers on x86_64 and aarch64, arguments, the error. Arguments are wrong where the call would harm the host: the
# right is checked before them.
CALLS: dict[str, tuple[int, int, str, int]] = {
    "setxattr": (188, 5, "b'/tmp', b'user.a', b'x', 1, 0", PERM),
    "seccomp": (317, 277, "2, 0, 0", PERM),
    "prctl(PR_SET_SECCOMP)": (157, 167, "22, 2, 0", PERM),
    "fcntl(F_SETLKW)": (72, 25, "1, 7, 0", PERM),
    "fcntl(F_OFD_SETLK)": (72, 25, "1, 37, 0", PERM),
    "fcntl(F_SETLEASE)": (72, 25, "1, 1024, 1", PERM),
    "fcntl(F_SETPIPE_SZ)": (72, 25, "1, 1031, 1048576", PERM),
    "madvise(MADV_MERGEABLE)": (28, 233, "0, 0, 12", errno.EINVAL),
    "mmap(MAP_HUGETLB)": (9, 222, "0, 2097152, 3, 0x40022, -1, 0", PERM),
    "ioctl(TIOCSTI)": (16, 29, "0, 0x5412, b'a'", errno.ENOTTY),
    "clone(user)": (56, 220, "0x10000000 | 17, 0, 0, 0, 0", PERM),
    "clone3": (435, 435, "0, 0", errno.ENOSYS),
    "mount": (165, 40, "b'none', b'/tmp', b'tmpfs', 32, b'nr_inodes=0'", PERM),
    "ptrace": (101, 117, "0, 0, 0, 0", PERM),
    "a call of later kernels": (500, 500, "", errno.ENOSYS),
    "socket(inet)": (41, 198, "2, 1, 0", AF),
    "socket(vsock)": (41, 198, "40, 1, 0", AF),
    "socketpair(tipc)": (53, 199, "30, 1, 0, 0", AF),
    "socket(datagrams)": (41, 198, "1, 2, 0", AF),
    "socketpair(datagrams)": (53, 199, "1, 0x80802, 0, 0", AF),
    "setsockopt(SO_ATTACH_FILTER)": (54, 208, "2, 1, 26, b'aaaa', 4", PERM),
    "setsockopt(SOL_TCP)": (54, 208, "2, 6, 2, b'aaaa', 4", PERM),
    "setsockopt(SO_SNDBUF)": (54, 208, "2, 1, 7, b'aaaa', 4", PERM),
}

# Not in the list of allowed calls, whatever their arguments. Some of them stand above for all.
REFUSED = """
add_key bpf chroot clone3 epoll_create1 fanotify_init fsetxattr fsopen init_module inotify_init1 io_setup
io_uring_setup iopl ioprio_set kcmp kexec_load keyctl landlock_create_ruleset listen lsetxattr mbind memfd_create
memfd_secret mlock modify_ldt mq_open msgget name_to_handle_at open_by_handle_at open_tree perf_event_open
personality pidfd_getfd pivot_root process_madvise process_vm_readv process_vm_writev ptrace quotactl reboot
remap_file_pages request_key sched_setattr sched_setscheduler seccomp semget sendfile sethostname setns setxattr
setxattrat shmget splice swapon sync syslog tee umount2 unshare userfaultfd vmsplice
"""

# name: Python code, the errors that may stop it.
CODES: dict[str, tuple[str, tuple[int, ...]]] = {
    "become root": ("os.setresuid(12345, 12345, 12345)", (PERM, errno.EINVAL)),
    "more processes": ("resource.setrlimit(resource.RLIMIT_NPROC, (99999, 99999))", (PERM,)),
    "more memory": ("resource.prlimit(0, resource.RLIMIT_AS, (-1, -1))", (PERM,)),
    "higher priority": ("os.setpriority(os.PRIO_PROCESS, 0, -20)", (PERM, DENIED)),
    "a device": ("os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0))", (PERM,)),
    "SysRq": ("open('/proc/sysrq-trigger', 'w')", (RO, DENIED, ABSENT)),
    "settings of the kernel": ("open('/proc/sys/kernel/panic', 'w')", (RO, DENIED)),
    "the container's socket": ("os.stat('/var/run/docker.sock')", (ABSENT,)),
    "the first process's files": ("os.listdir('/proc/1/root')", (DENIED, PERM)),
    "the interpreter itself": ("open(os.path.realpath('/proc/self/exe'), 'r+b')", (RO, DENIED, errno.ETXTBSY)),
    "a lock of part of a file": ("fcntl.lockf(open('/tmp/z', 'w'), fcntl.LOCK_EX)", (PERM,)),
    "a file outside": ("open('/usr/a', 'w')", (RO, DENIED)),
    "a file that is too large": ("os.truncate(os.open('/tmp/b', 65, 0o600), 1 << 40)", (errno.EFBIG, errno.EINVAL)),
    "space on the disk": ("[f.write(bytes(1 << 20)) for f in [open('/tmp/c', 'wb', 0)] for _ in range(9)]", (27, 28)),
}

# name: code that takes one more (n is how many it has), the most that it gets, the errors that may stop it.
COUNTS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "files": ("open(f'/tmp/f{n}', 'w').close()", 1000, (errno.ENOSPC,)),
    "open files": ("kept.append(os.open('/dev/null', 0))", 256, (errno.EMFILE,)),
    "pipes": ("kept.append(fill(*os.pipe()))", 128, (errno.EMFILE,)),
    "sockets in flight": ("fly()", 600, (errno.ETOOMANYREFS, errno.EMFILE)),
    "timers": ("timer()", 1024, (errno.EAGAIN,)),
    "processes": ("os.fork() or os._exit(time.sleep(1000) or 0)", LIMITS.num_processes or 0, (errno.EAGAIN,)),
}

PRELUDE = """
import array, ctypes, fcntl, json, os, resource, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    if libc.syscall(*words) < 0:
        raise OSError(ctypes.get_errno(), "")
def fill(*ends):
    os.set_blocking(ends[1], False)
    try:
        while os.write(ends[1], bytes(1 << 16)):
            pass
    except BlockingIOError:
        pass
    return ends
def fly():
    ends = socket.socketpair()
    kept.append(ends[0])
    ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ends[1].fileno()]))])
def timer():
    found = ctypes.c_void_p()
    if libc.timer_create(1, None, ctypes.byref(found)) < 0:
        raise OSError(ctypes.get_errno(), "")
def outcome(act):
    try:
        act()
    except OSError as error:
        return error.errno
    except ValueError as error:  # what setrlimit makes of EPERM
        return 1 if "not allowed" in str(error) else str(error)
    return None
"""


@pytest.fixture(scope="module")
def tool() -> PythonTool:
    return PythonTool(LIMITS)


def run(tool: PythonTool, code: str) -> ToolResult:
    return asyncio.run(tool(code))


def ask(tool: PythonTool, code: str) -> dict[str, Any]:
    result = run(tool, PRELUDE + code)
    assert result.exit == "ok", result
    return json.loads(result.output.splitlines()[-1])


def test_every_refused_call_and_file_is_refused(tool: PythonTool) -> None:
    place = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    calls = {name: (row[place], row[2]) for name, row in CALLS.items()}
    acts = [f"{name!r}: lambda: call({number}, {words})" for name, (number, words) in calls.items()]
    acts += [f"{name!r}: lambda: {code}" for name, (code, _) in CODES.items()]
    found = ask(
        tool, f"acts = {{{', '.join(acts)}}}\nprint(json.dumps({{name: outcome(act) for name, act in acts.items()}}))"
    )
    wrong = {name: found[name] for name in calls if found[name] != CALLS[name][3]}
    wrong |= {name: found[name] for name, (_, errors) in CODES.items() if found[name] not in errors}
    assert wrong == {}


def test_what_may_be_had_is_counted(tool: PythonTool) -> None:
    steps = [f"{name!r}: (lambda n: {code})" for name, (code, _, _) in COUNTS.items()]
    found = ask(
        tool,
        f"""
acts, counts = {{{", ".join(steps)}}}, {{}}
for name, act in acts.items():
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        kept, n, stopped = [], 0, None
        while n < 5000 and stopped is None:
            stopped = outcome(lambda: act(n))
            n += stopped is None
        os.write(write_end, json.dumps([n, stopped]).encode())
        os._exit(0)
    os.close(write_end)
    counts[name] = json.loads(os.read(read_end, 100))
    os.close(read_end)
    os.wait()
    for entry in os.listdir("/tmp"):
        if entry[0] == "f":
            os.unlink("/tmp/" + entry)
print(json.dumps(counts))
""",
    )
    for name, (_, most, errors) in COUNTS.items():
        count, stopped = found[name]
        assert most // 3 <= count <= most, (name, found[name])
        assert stopped in errors, (name, found[name])


def test_ordinary_code_still_has_what_it_needs(tool: PythonTool) -> None:
    """A lock of SQLite's is pretended, and takes no memory of the kernel."""
    result = run(
        tool,
        """
import asyncio, fcntl, multiprocessing, os, sqlite3, subprocess
async def add():
    return await asyncio.to_thread(lambda: 1)
print(asyncio.run(add()))
with sqlite3.connect("/tmp/a.db") as base:
    print(base.execute("select 2").fetchall())
print(subprocess.run(["ls", "-d", "/tmp"], capture_output=True).returncode)
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=theirs.send, args=(3,))
process.start()
print(ours.recv())
process.join()
def locks():
    return sum(line.split()[4] == str(os.getpid()) for line in open("/proc/locks"))
file = open("/tmp/a", "w")
for start in range(3):
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * start)
print(locks())
fcntl.flock(file, fcntl.LOCK_EX)
print(locks())
""",
    )
    assert result == ToolResult("1\n[(2,)]\n0\n3\n0\n1\n", "ok")


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_system_calls_are_those_of_the_kernel(machine: str) -> None:
    table = tomllib.loads(BOOTSTRAP.with_name("system_calls.toml").read_text())
    calls = table["allowed"] | {name: call["numbers"] for name, call in table["tested"].items()}
    assert not set(REFUSED.split()) & set(calls)
    if not Path(HEADERS[machine]).exists():
        pytest.skip("the headers of the kernel are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", Path(HEADERS[machine]).read_text(), re.MULTILINE)
    known = {("newfstatat" if name == "fstatat" else name): int(number) for name, number in found}
    mine = {name: numbers[table["machines"][machine]["place"]] for name, numbers in calls.items()}
    assert len({number for number in mine.values() if number >= 0}) == sum(number >= 0 for number in mine.values())
    wrong = {name: number for name, number in mine.items() if name in known and number not in (-1, known[name])}
    assert wrong == {}
    assert {name for name, number in mine.items() if number >= 0 and name not in known} <= {"fchmodat2"}


def test_the_first_process_cannot_be_ended_stopped_or_read(tool: PythonTool) -> None:
    code = """
import os, signal, time
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
print(open("/proc/1/stat").read().split()[2] != "T")
def held():
    return [line for line in open("/proc/1/status") if line.startswith(("CapEff", "CapPrm", "CapAmb", "CapInh"))
            and int(line.split()[1], 16)]
for _ in range(500):  # the first process drops them beside the start of this one
    if held():
        time.sleep(0.01)
print(held())
"""
    assert run(tool, code) == ToolResult("True\n[]\n", "ok")


def outside(code: str, folder: Path | None = None) -> str:
    """The output of the same code without the sandbox: what succeeds only here, the sandbox prevents."""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    return found.stdout


def test_files_of_the_host_are_neither_read_nor_written(tool: PythonTool, tmp_path: Path) -> None:
    """By their path, nor through a link in the scratch folder."""
    secret = tmp_path / "secret"
    code = f"""
import os
if not os.path.exists("link"):
    os.symlink({str(tmp_path)!r}, "link")
for path, mode in (({str(secret)!r}, "r"), ("link/secret", "r"), ("link/secret", "a"), ({str(secret)!r}, "a")):
    try:
        with open(path, mode) as file:
            print(file.read() if mode == "r" else file.write("!"))
    except OSError as error:
        print(type(error).__name__)
"""
    secret.write_text("hidden")
    assert run(tool, code).output == "FileNotFoundError\n" * 4
    assert secret.read_text() == "hidden"
    assert outside(code, tmp_path) == "hidden\nhidden\n1\n1\n"


def test_nothing_but_the_scratch_folder_can_be_written(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    for path in (tmp_path / "venv").rglob("*"):
        if not path.is_symlink():
            path.chmod(0o777)  # what keeps the interpreter from being changed is not that its files are someone else's
    tool = PythonTool(LIMITS, interpreter=str(tmp_path / "venv/bin/python"))
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
for name in (os.path.join(sys.prefix, "pyvenv.cfg"), os.__file__, "/proc/self/oom_score_adj", "/dev/shm/a"):
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
"""
        assert run(tool, code).output == "97\n111\n97\n"
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
