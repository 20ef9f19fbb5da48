"""Attacks on the sandbox of the Python tool: each is a row of a table, with what must hold. They need bubblewrap.

Many rows run in one call, so that the file takes seconds. test_tools_python.py has the attacks that need their own call
(endless loops, fork bombs, floods of output), test_tools_isolation.py those on the host's files.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.engines.tools.protocol import ToolResult
from megarl.engines.tools.python_tool import PythonTool
from megarl.engines.tools.sandbox import BOOTSTRAP, Limits

pytestmark = pytest.mark.needs("bwrap")

LIMITS = Limits(wall_s=60.0, cpu_s=30, memory_bytes=600 << 20, scratch_bytes=8 << 20, scratch_files=1000)
PERM, AF, RO = errno.EPERM, errno.EAFNOSUPPORT, errno.EROFS
ABSENT, DENIED = errno.ENOENT, errno.EACCES

# name: numbers on x86_64 and aarch64 (None: not there), arguments, the error. Arguments are wrong where the call would
# harm the host if it were let through: the right is checked before them.
CALLS: dict[str, tuple[int | None, int, str, int]] = {
    # memory that no limit counts
    "setxattr": (188, 5, "b'/tmp', b'user.a', b'x', 1, 0", PERM),
    "lsetxattr": (189, 6, "b'/tmp', b'user.a', b'x', 1, 0", PERM),
    "fsetxattr": (190, 7, "2, b'user.a', b'x', 1, 0", PERM),
    "setxattrat": (463, 463, "-100, b'/tmp', 0, b'user.a', 0, 0", PERM),
    "semget": (64, 190, "0, 32000, 0o1600", PERM),
    "msgget": (68, 186, "0, 0o1600", PERM),
    "shmget": (29, 194, "0, 4096, 0o1600", PERM),
    "mq_open": (240, 180, "b'a', 0o102, 0o600, 0", PERM),
    "memfd_create": (319, 279, "b'a', 0", PERM),
    "memfd_secret": (447, 447, "0", PERM),
    "landlock_create_ruleset": (444, 444, "0, 0, 1", PERM),
    "inotify_init1": (294, 26, "0", PERM),
    "fanotify_init": (300, 262, "0, 0", PERM),
    "seccomp": (317, 277, "2, 0, 0", PERM),
    "prctl(PR_SET_SECCOMP)": (157, 167, "22, 2, 0", PERM),
    "vmsplice": (278, 75, "1, 0, 0, 0", PERM),
    "add_key": (248, 217, "b'user', b'a', b'b', 1, -3", PERM),
    "request_key": (249, 218, "b'user', b'a', 0, -3", PERM),
    "keyctl": (250, 219, "0, -3, 1", PERM),
    "io_uring_setup": (425, 425, "8, 0", PERM),
    "userfaultfd": (323, 282, "1", PERM),
    "fcntl(F_SETLKW)": (72, 25, "1, 7, 0", PERM),
    "fcntl(F_OFD_SETLK)": (72, 25, "1, 37, 0", PERM),
    "fcntl(F_OFD_SETLKW)": (72, 25, "1, 38, 0", PERM),
    "fcntl(F_SETLEASE)": (72, 25, "1, 1024, 1", PERM),
    "fcntl(F_NOTIFY)": (72, 25, "1, 1026, 1", PERM),
    "fcntl(F_SETPIPE_SZ)": (72, 25, "1, 1031, 1048576", PERM),
    "epoll_create1": (291, 20, "0", PERM),
    "listen": (50, 201, "0, 1", PERM),
    "splice": (275, 76, "0, 0, 1, 0, 0, 0", PERM),
    "tee": (276, 77, "0, 1, 0, 0", PERM),
    "sendfile": (40, 71, "1, 0, 0, 0", PERM),
    "mlock": (149, 228, "0, 0", PERM),
    "mbind": (237, 235, "0, 0, 0, 0, 0, 0", PERM),
    "remap_file_pages": (216, 234, "0, 0, 0, 0, 0", PERM),
    "prctl(PR_SET_VMA)": (157, 167, "0x53564d41, 0, 0, 0, 0", PERM),
    "madvise(MADV_MERGEABLE)": (28, 233, "0, 0, 12", errno.EINVAL),
    # what the host has a limited number of
    "io_setup": (206, 0, "1, 0", PERM),
    "mmap(MAP_HUGETLB)": (9, 222, "0, 2097152, 3, 0x40022, -1, 0", PERM),
    # other processes, and the host as a whole
    "process_vm_readv": (310, 270, "1, 0, 0, 0, 0, 0", PERM),
    "process_vm_writev": (311, 271, "1, 0, 0, 0, 0, 0", PERM),
    "process_madvise": (440, 440, "0, 0, 0, 0, 0", PERM),
    "pidfd_getfd": (438, 438, "0, 0, 0", PERM),
    "kcmp": (312, 272, "1, 1, 0, 0, 0", PERM),
    "name_to_handle_at": (303, 264, "-100, b'/tmp', 0, 0, 0", PERM),
    "open_by_handle_at": (304, 265, "-100, 0, 0", PERM),
    "ioctl(TIOCSTI)": (16, 29, "0, 0x5412, b'a'", errno.ENOTTY),
    "sched_setscheduler": (144, 119, "0, 3, b'0000'", PERM),
    "sched_setattr": (314, 274, "0, 0, 0", PERM),
    "ioprio_set": (251, 30, "1, 0, 0", PERM),
    "personality": (135, 92, "0xffffffff", PERM),
    "sync": (162, 81, "", PERM),
    # other namespaces and rights
    "unshare(user)": (272, 97, "0x10000000", PERM),
    "unshare(mount)": (272, 97, "0x20000", PERM),
    "setns": (308, 268, "0, 0", PERM),
    "clone(user)": (56, 220, "0x10000000 | 17, 0, 0, 0, 0", PERM),
    "clone3": (435, 435, "0, 0", errno.ENOSYS),
    "mount": (165, 40, "b'none', b'/tmp', b'tmpfs', 32, b'nr_inodes=0'", PERM),
    "umount": (166, 39, "b'/tmp', 0", PERM),
    "pivot_root": (155, 41, "b'/tmp', b'/tmp'", PERM),
    "fsopen": (430, 430, "b'tmpfs', 0", PERM),
    "open_tree(clone)": (428, 428, "-100, b'/tmp', 1", PERM),
    "chroot": (161, 51, "b'/tmp'", PERM),
    "ptrace": (101, 117, "0, 0, 0, 0", PERM),
    # the kernel
    "bpf": (321, 280, "0, 0, 0", PERM),
    "perf_event_open": (298, 241, "0, 0, -1, -1, 0", PERM),
    "reboot": (169, 142, "0, 0, 0, 0", PERM),
    "swapon": (167, 224, "b'/tmp/a', 0", PERM),
    "syslog": (103, 116, "3, 0, 0", PERM),
    "modify_ldt": (154, None, "0, 0, 0", PERM),  # type: ignore[dict-item]
    "sethostname": (170, 161, "0, -1", PERM),
    "quotactl": (179, 60, "0, 0, 0, 0", PERM),
    "init_module": (175, 105, "0, 0, 0", PERM),
    "kexec_load": (246, 104, "0, 0, 0, 0", PERM),
    "iopl": (172, None, "3", PERM),  # type: ignore[dict-item]
    "a call of later kernels": (500, 500, "", errno.ENOSYS),
    # networks
    "socket(inet)": (41, 198, "2, 1, 0", AF),
    "socket(inet6)": (41, 198, "10, 1, 0", AF),
    "socket(netlink)": (41, 198, "16, 3, 0", AF),
    "socket(packet)": (41, 198, "17, 3, 0", AF),
    "socket(alg)": (41, 198, "38, 5, 0", AF),
    "socket(vsock)": (41, 198, "40, 1, 0", AF),
    "socketpair(tipc)": (53, 199, "30, 1, 0, 0", AF),
    "socket(datagrams)": (41, 198, "1, 2, 0", AF),
    "socketpair(datagrams)": (53, 199, "1, 0x80802, 0, 0", AF),
    "setsockopt(SO_ATTACH_FILTER)": (54, 208, "2, 1, 26, b'aaaa', 4", PERM),
    "setsockopt(SOL_TCP)": (54, 208, "2, 6, 2, b'aaaa', 4", PERM),
    "setsockopt(SO_SNDBUF)": (54, 208, "2, 1, 7, b'aaaa', 4", PERM),
    "setsockopt(SO_RCVBUF)": (54, 208, "2, 1, 8, b'aaaa', 4", PERM),
}

# name: Python code, the errors that may stop it.
CODES: dict[str, tuple[str, tuple[int, ...]]] = {
    "become root": ("os.setresuid(12345, 12345, 12345)", (PERM, errno.EINVAL)),
    "change groups": ("os.setgroups([5])", (PERM,)),
    "more processes": ("resource.setrlimit(resource.RLIMIT_NPROC, (99999, 99999))", (PERM,)),
    "more memory": ("resource.prlimit(0, resource.RLIMIT_AS, (-1, -1))", (PERM,)),
    "higher priority": ("os.setpriority(os.PRIO_PROCESS, 0, -20)", (PERM, DENIED)),
    "real time": ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", (PERM,)),
    "a device": ("os.mknod('/tmp/sda', 0o60600, os.makedev(8, 0))", (PERM,)),
    "a disk of the host": ("open('/dev/vda', 'rb')", (ABSENT,)),
    "memory of the machine": ("open('/dev/mem', 'rb')", (ABSENT,)),
    "messages of the kernel": ("open('/dev/kmsg', 'rb')", (ABSENT,)),
    "core of the kernel": ("open('/proc/kcore', 'rb').read(1)", (ABSENT, DENIED, PERM)),
    "SysRq": ("open('/proc/sysrq-trigger', 'w')", (RO, DENIED, ABSENT)),
    "a core handler": ("open('/proc/sys/kernel/core_pattern', 'w')", (RO, DENIED)),
    "settings of the kernel": ("open('/proc/sys/kernel/panic', 'w')", (RO, DENIED)),
    "its place when memory is short": ("open('/proc/self/oom_score_adj', 'w')", (RO, DENIED)),
    "control groups": ("os.listdir('/sys/fs/cgroup')", (ABSENT,)),
    "the container's socket": ("os.stat('/var/run/docker.sock')", (ABSENT,)),
    "users of the host": ("open('/etc/passwd')", (ABSENT,)),
    "the first process's memory": ("open('/proc/1/mem', 'r+b').read(1)", (DENIED, PERM, RO, errno.EIO)),
    "the first process's files": ("os.listdir('/proc/1/root')", (DENIED, PERM)),
    "the interpreter itself": ("open(os.path.realpath('/proc/self/exe'), 'r+b')", (RO, DENIED, errno.ETXTBSY)),
    "shared memory": ("open('/dev/shm/a', 'wb')", (ABSENT,)),
    "a named semaphore": ("__import__('multiprocessing').Semaphore(1)", (ABSENT, errno.ENOSYS)),
    "a terminal": ("os.openpty()", (ABSENT,)),
    "a lock of part of a file": ("fcntl.lockf(open('/tmp/z', 'w'), fcntl.LOCK_EX)", (PERM,)),
    "a file outside": ("open('/usr/a', 'w')", (RO, DENIED)),
    "a file that is too large": ("os.truncate(os.open('/tmp/b', 65, 0o600), 1 << 40)", (errno.EFBIG, errno.EINVAL)),
    "space on the disk": ("[f.write(bytes(1 << 20)) for f in [open('/tmp/c', 'wb', 0)] for _ in range(9)]", (27, 28)),
}

# name: code that takes one more (n is how many it has), the most that it gets, the errors that may stop it.
COUNTS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "files": ("open(f'/tmp/f{n}', 'w').close()", 1000, (errno.ENOSPC,)),
    "links": ("os.symlink('x' * 4000, f'/tmp/l{n}')", 1000, (errno.ENOSPC,)),
    "deep folders": ("os.mkdir('d'); os.chdir('d')", 1000, (errno.ENOSPC,)),
    "open files": ("kept.append(os.open('/dev/null', 0))", 256, (errno.EMFILE,)),
    "pipes": ("kept.append(fill(*os.pipe()))", 128, (errno.EMFILE,)),
    "sockets": ("kept.append(fill(*socket.socketpair(), both=True))", 128, (errno.EMFILE,)),
    "sockets in flight": ("fly()", 600, (errno.ETOOMANYREFS, errno.EMFILE)),
    "locked files": ("kept.append(lock())", 256, (errno.EMFILE,)),
    "events": ("kept.append(os.eventfd(0))", 256, (errno.EMFILE,)),
    "timers": ("timer()", 1024, (errno.EAGAIN,)),
    "processes": ("os.fork() or os._exit(time.sleep(1000) or 0)", LIMITS.num_processes or 0, (errno.EAGAIN,)),
}

PRELUDE = """
import array, ctypes, fcntl, json, os, resource, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    if libc.syscall(*words) < 0:
        raise OSError(ctypes.get_errno(), "")
def fill(*ends, both=False):
    for end in ends if both else ends[1:]:
        os.set_blocking(end if isinstance(end, int) else end.fileno(), False)
        try:
            while end.send(bytes(1 << 16)) if both else os.write(end, bytes(1 << 16)):
                pass
        except BlockingIOError:
            pass
    return ends
def fly():
    ends = socket.socketpair()
    kept.append(ends[0])
    ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [ends[1].fileno()]))])
def lock():
    file = os.open("/dev/null", 0)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file
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
    calls = {name: (row[place], row[2]) for name, row in CALLS.items() if row[place] is not None}
    acts = [f"{name!r}: lambda: call({number}, {words})" for name, (number, words) in calls.items()]
    acts += [f"{name!r}: lambda: {code}" for name, (code, _) in CODES.items()]
    found = ask(
        tool, f"acts = {{{', '.join(acts)}}}\nprint(json.dumps({{name: outcome(act) for name, act in acts.items()}}))"
    )
    wrong = {name: found[name] for name in calls if found[name] != CALLS[name][3]}
    wrong |= {name: found[name] for name, (_, errors) in CODES.items() if found[name] not in errors}
    assert wrong == {}


def test_what_may_be_had_is_counted(tool: PythonTool) -> None:
    steps = [f"{name!r}: (lambda n: {code.replace('; ', ' or ')})" for name, (code, _, _) in COUNTS.items()]
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
        if entry[0] in "fl":
            os.unlink("/tmp/" + entry)
    while os.path.exists("/tmp/d"):  # one name at a time: the whole path is too long
        os.system("rm -rf /tmp/d")
print(json.dumps(counts))
""",
    )
    for name, (_, most, errors) in COUNTS.items():
        count, stopped = found[name]
        assert most // 3 <= count <= most, (name, found[name])
        assert stopped in errors, (name, found[name])


def test_ordinary_code_still_has_what_it_needs(tool: PythonTool) -> None:
    result = run(
        tool,
        """
import asyncio, concurrent.futures, multiprocessing, sqlite3, subprocess, tempfile
async def add():
    return await asyncio.to_thread(lambda: 1)
print(asyncio.run(add()))
with sqlite3.connect("/tmp/a.db") as base:
    print(base.execute("select 2").fetchall())
with tempfile.TemporaryDirectory() as folder:
    print(subprocess.run(["ls", "-d", folder], capture_output=True).returncode)
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=theirs.send, args=(3,))
process.start()
print(ours.recv())
process.join()
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(list(pool.map(abs, [-1, -2])))
""",
    )
    assert result == ToolResult("1\n[(2,)]\n0\n3\n[1, 2]\n", "ok")


def test_a_lock_of_sqlite_is_pretended_and_takes_no_memory(tool: PythonTool) -> None:
    code = """
import fcntl, os
file = open("/tmp/a", "w")
for start in range(3):
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * start)
print([line for line in open("/proc/locks") if line.split()[4] == str(os.getpid())])
fcntl.flock(file, fcntl.LOCK_EX)
print(len([line for line in open("/proc/locks") if line.split()[4] == str(os.getpid())]))
"""
    assert run(tool, code) == ToolResult("[]\n1\n", "ok")


HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_system_calls_are_those_of_the_kernel(machine: str) -> None:
    if not Path(HEADERS[machine]).exists():
        pytest.skip("the headers of the kernel are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", Path(HEADERS[machine]).read_text(), re.MULTILINE)
    known = {("newfstatat" if name == "fstatat" else name): int(number) for name, number in found}
    table = tomllib.loads(BOOTSTRAP.with_name("system_calls.toml").read_text())
    calls = table["allowed"] | {name: call["numbers"] for name, call in table["tested"].items()}
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


def test_code_that_stops_itself_ends_with_the_deadline() -> None:
    tool = PythonTool(Limits(wall_s=8.0))
    assert run(tool, "import os, signal\nprint(1)\nos.kill(os.getpid(), signal.SIGSTOP)") == ToolResult(
        "1\n", "timeout"
    )


def test_a_call_whose_host_is_killed_while_it_starts_ends(tmp_path: Path) -> None:
    """A start that takes a second makes sure that the host ends before bubblewrap has begun."""
    slow = tmp_path / "bwrap"
    real = subprocess.run(["which", "bwrap"], capture_output=True, text=True, check=True).stdout.strip()
    host = f"""
import asyncio, os
from pathlib import Path
from megarl.engines.tools.python_tool import PythonTool
slow = Path({str(slow)!r})
slow.symlink_to({real!r})
os.environ["PATH"] = f"{tmp_path}:{{os.environ['PATH']}}"
tool = PythonTool()
slow.unlink()
slow.write_text('#!/bin/sh\\necho $$ >{tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid\\n'
                'sleep 1\\nexec {real} "$@"\\n')
slow.chmod(0o755)
asyncio.run(tool("import time; time.sleep(1000)"))
"""
    with subprocess.Popen([sys.executable, "-c", host]) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    pid = int((tmp_path / "pid").read_text())  # bubblewrap ends after its last process
    deadline = time.monotonic() + 60.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_without_the_right_to_mount_the_number_of_files_is_not_limited_and_that_is_told(tmp_path: Path) -> None:
    """As where AppArmor takes all rights from what bubblewrap starts."""
    (tmp_path / "bwrap").write_text(
        '#!/bin/bash\nfor word in "$@"; do [ "$word" = CAP_SYS_ADMIN ] && word=CAP_CHOWN; words+=("$word"); done\n'
        'exec /usr/bin/env -u NO PATH=/usr/bin:/bin bwrap "${words[@]}"\n'
    )
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        tool = PythonTool(LIMITS)
    assert not tool.limits_files
    assert run(tool, "[open(str(n), 'w').close() for n in range(1500)]\nprint(1)") == ToolResult("1\n", "ok")
