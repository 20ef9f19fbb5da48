"""What tests of failing servers share: work in the background, a kill, and the check that nothing was lost."""

from __future__ import annotations

from megarl.engines.sglang.server import Server


def kill_9(server: Server, named: str = "") -> None:
    """The server's processes with this in their command line, all by default, but not the reaper."""
    killed = [
        p for p in server.members() if p.pid != getattr(server._process, "pid", None) and named in " ".join(p.cmdline())
    ]
    assert killed
    for process in killed:
        process.kill()
