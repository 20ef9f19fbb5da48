"""A port for a server that another process will start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Below the ports that the kernel gives away by itself, so that nobody takes it before the server listens."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)  # forks share the state of ``random``
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def has_ipv6_loopback() -> bool:
    """Whether this machine can bind ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
