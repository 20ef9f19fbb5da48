"""One server of a fleet: its process, the sender of its weights, and whether it is alive and up to date."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from megarl.errors import RolloutError, WeightSyncError
from megarl.rollout.sglang.http import server_info
from megarl.rollout.sglang.server import Server
from megarl.rollout.sglang.weights.process_group import GroupError
from megarl.rollout.sglang.weights.sender import WeightSender

FRESH = "default"
"""SGLang's name for the weights of a server that has not been given any."""
DEATH_WAIT_S = 10.0
"""A server whose scheduler was killed ends itself within seconds."""


@dataclass(eq=False)
class Member:
    """One server; the fleet starts it again if it has a ``process``."""

    url: str
    process: Server | None
    """None: somebody else runs the server."""
    api_key: str | None
    tell: Callable[[str], None]
    sender: WeightSender | None = None
    restarts: int = 0
    checked_at: float = -math.inf
    """When the server last passed a health check; somebody else's server: when it was last asked for its weights."""
    silent_since: float | None = None
    missed: bool = False
    """Whether the server was away during the last update."""

    def attempt(self, step: Callable[[WeightSender], None]) -> bool:
        """Runs one step of an update: True if it succeeded, False if the server is dead, else WeightSyncError."""
        assert self.sender is not None
        try:
            step(self.sender)
        except WeightSyncError as error:
            hangs = isinstance(error, GroupError) or isinstance(error.__cause__, httpx.TimeoutException)
            if self.process is not None and hangs:
                self.tell(f"{self.url} is dead or hangs in a weight update: killed")
                self.process.kill()
                return False
            # A dying server fails the request before its process is gone.
            until = time.monotonic() + DEATH_WAIT_S
            while self._is_alive():
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            if self.process is None:
                self.tell(f"{self.url} is gone in a weight update; it gets the weights when it is back")
                self.missed = True
            return False
        return True

    def needs_restart(self, updating: bool, health_s: float, hang_s: float) -> bool:
        """Whether the process is dead; kills one that has failed its health checks for ``hang_s`` seconds.

        A server that passed is not checked again for ``health_s``. One that is ``updating`` is paused and would fail.
        """
        assert self.process is not None
        if not self.process.alive:
            return True
        if time.monotonic() - self.checked_at < health_s:
            return False
        if updating:
            self.silent_since = None
        elif self.process.healthy():
            self.silent_since, self.checked_at = None, time.monotonic()
        else:
            self.silent_since = self.silent_since or time.monotonic()
            if time.monotonic() - self.silent_since > hang_s:
                self.tell(f"{self.url} has not answered for {hang_s:.0f} s: killed")
                self.process.kill()
                return True
        return False

    def needs_weights(self, version: int | None) -> bool:
        """Whether somebody else's server was started again, or missed the update to ``version``.

        Weights under any other name were sent by somebody else, and stay.
        """
        assert self.sender is not None
        try:
            found = self.sender.weight_version()
        except WeightSyncError:
            return False  # still away
        return version is not None and (found == FRESH or (self.missed and found != str(version)))

    def _is_alive(self) -> bool:
        """Whether the process runs; for somebody else's server, whether anything answers."""
        if self.process is not None:
            return self.process.alive
        try:
            server_info(self.url, self.api_key, timeout_s=5.0)
        except RolloutError as error:
            return not isinstance(error.__cause__, (httpx.ConnectError, httpx.ConnectTimeout))
        return True
