"""Looks after the servers of a fleet, with a thread for every server: several servers come back in parallel.

A dead server is restarted on its old port; a server at a URL is awaited. Then the server gets the weights of the last
complete update. A fresh server calls its weights "default", which no rollout accepts. The server therefore answers no
request before the update. A new update does not wait: the keeper stops after the current bucket, and the update
includes the server, or the next look sends the new weights.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megarl.engines.sglang.member import Member, Update
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.transports.tensor import send_tensors
from megarl.errors import RolloutError, WeightSyncError

FRESH = "default"
"""SGLang's name for the weights of a server without an update."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How long a fleet waits."""

    start_deadline_s: float = 300.0
    """Longest start of a server."""
    hang_s: float = 120.0
    """Time of failed health checks until a server is killed and restarted."""
    max_restarts: int = 20
    """Most restarts of a server."""
    poll_s: float = 0.5
    """Time between two looks at the processes."""
    health_s: float = 10.0
    """Time between a passed check of the scheduler's state and the next check."""
    generate_s: float = 300.0
    """Time between two checks in which an idle server generates a token."""
    copies: Path | Literal["memory", "none"] = "memory"
    """Where the fleet keeps a copy of the weights for restarted servers: in memory, or in this folder. none: the next
    update brings these servers up to date."""
    checksums: bool = False
    """Whether the servers' own checksums of their weights are compared after every update, and in every proof."""


@dataclass
class FleetState:
    """State of a fleet, for the keepers."""

    settings: FleetSettings
    prompt: Callable[[], list[int]]
    """Of the proofs."""
    last: Update | None = None
    """The last complete update; None during an update: no server gets half of an update."""
    updating: threading.Event = field(default_factory=threading.Event)
    """Set while servers are paused, or have released their memory."""
    no_starts: threading.Event = field(default_factory=threading.Event)
    """The trainer needs the servers' memory, or the fleet is closed."""
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def kept(self) -> Update | None:
        """The last update, if a copy exists."""
        return self.last if self.last is not None and self.last.copy is not None else None


class Keeper(threading.Thread):
    """Looks after one server until the fleet has ended."""

    def __init__(self, member: Member, state: FleetState) -> None:
        super().__init__(name=f"keeper of {member.url}", daemon=True)
        self.member, self._state = member, state
        self.checked_at = -math.inf
        """Time of the server's last passed check; for a server at a URL, of the last question for its weights."""
        self._generated_at = -math.inf
        """Time of the last passed check with a generated token."""
        self._silent_since: float | None = None

    def run(self) -> None:
        while not self._state.ended.wait(self._state.settings.poll_s):
            with self._telling_failure("could not be looked after"):
                self.look()

    def look(self) -> None:
        """Check whether the server is alive and up to date, and repair the state."""
        if self.member.process is None:
            self._look_at_stranger()
        elif self._is_behind():
            with self.member.lock:
                if self._is_behind():  # else an update had the lock
                    self.send_copy()
        elif self.needs_restart() and not self._state.no_starts.is_set():
            self.restart()

    def needs_restart(self) -> bool:
        """Whether the process is dead and not given up; kills a process whose health checks fail for too long.

        A passed check is not repeated for a while. During an update the server is paused and would fail.
        """
        member, settings = self.member, self._state.settings
        assert member.process is not None
        dead = not member.process.alive
        if not dead and time.monotonic() - self.checked_at >= settings.health_s:
            if self._state.updating.is_set():
                self._silent_since = None
            elif self._passes_check(member.process):
                self._silent_since, self.checked_at = None, time.monotonic()
            else:
                self._silent_since = self._silent_since or time.monotonic()
                if dead := time.monotonic() - self._silent_since > settings.hang_s:
                    member.tell(f"{member.url} has not answered for {settings.hang_s:.0f} s: killed")
                    member.process.kill()
        return dead and member.restarts <= settings.max_restarts

    def _passes_check(self, process: Server) -> bool:
        """A stuck scheduler does not report its state. A scheduler that runs without output is found later."""
        if time.monotonic() - self._generated_at < self._state.settings.generate_s:
            return process.responds()
        is_healthy = process.healthy()
        if is_healthy:
            self._generated_at = time.monotonic()
        return is_healthy

    def restart(self) -> None:
        """Start the server again and send the weights; tell a failure."""
        member = self.member
        assert member.process is not None
        with member.lock:
            member.leave()
            member.restarts += 1
            self._silent_since = None
            if member.restarts > self._state.settings.max_restarts:
                return member.tell(f"{member.url} died {member.restarts} times and is given up")
            member.tell(f"{member.url} is dead: starting it again (restart {member.restarts})")
            with self._telling_failure("could not be started again"):
                member.process.start()
                member.process.wait_ready(self._state.settings.start_deadline_s, self._state.no_starts)
                self._rejoin()
        return None

    def send_copy(self) -> None:
        """Send the server the last complete update, unless a new update begins. The caller holds the member's lock.

        Tells a failure; a server with a process is then killed, and the next look restarts the server.
        """
        with self._telling_failure("could not take weights"):
            self._rejoin()

    def _rejoin(self) -> None:
        member, last = self.member, self._state.kept
        member.leave()
        member.connect()
        member.sender.begin()  # a hanging server fails here, and delays no update
        member.sender.name(FRESH)  # no rollout accepts the weights
        member.ready = True
        if last is None:
            return member.sender.resume()
        try:
            self._send(last)
        except WeightSyncError:
            if self._state.last is last:  # else the folder may be gone
                raise
        return None

    def _send(self, last: Update) -> None:
        member = self.member
        if isinstance(last.copy, Path):
            member.sender.load_from_disk(str(last.copy))
        else:
            for bucket in last.copy or ():
                if self._state.last is not last:
                    return
                send_tensors(member.sender, bucket)
        member.sender.finish(last.version)
        if last.checksums is not None:
            member.compare_checksums(member.sender.checksums(), last.checksums)
        if self._state.last is last:
            member.sender.resume()
            member.settle(last, self._state.prompt())

    def _is_behind(self) -> bool:
        """Whether the server lacks the kept weights, or was late in an update."""
        member, update = self.member, self._state.kept
        if not member.ready:
            return member.process is not None and member.process.alive and not self._state.updating.is_set()
        return update is not None and member.holds is not update

    def _look_at_stranger(self) -> None:
        """Send a server at a URL the weights if needed; asked less often than processes are checked.

        Weights under any other name were sent by foreign code, and stay.
        """
        member, last = self.member, self._state.kept
        if self._state.updating.is_set() or time.monotonic() - self.checked_at < 4 * self._state.settings.poll_s:
            return
        self.checked_at = time.monotonic()
        name = member.find_version() if member.connection is not None else FRESH
        if name is None:
            member.ready = False
        elif last is not None and member.holds is last and name != FRESH:
            member.ready = True
        elif last is not None or not member.ready:
            with member.lock:  # perhaps of an update or a proof, which has sent the weights
                sent = last is not None and member.holds is last and member.find_version() != FRESH
                if self._state.kept is last and not sent:
                    self.send_copy()

    @contextmanager
    def _telling_failure(self, action: str) -> Iterator[None]:
        member = self.member
        try:
            yield
        except Exception as error:  # a server may answer anything, and a disk may be full: the keeper stays
            member.leave()
            if member.process is not None:
                with suppress(RolloutError):  # surviving processes fail the next start, with a message
                    member.process.kill()
            if str(error) != member.last_failure and not self._state.no_starts.is_set():
                member.last_failure = str(error)
                member.tell(f"{member.url} {action}: {error}")
