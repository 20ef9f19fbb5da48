"""One server of a fleet: process, weights, and a thread for both.

The thread of a server is its keeper, so that several servers come back in parallel. A dead server is restarted on its
old port; a server at a URL is awaited. Then the server gets the weights of the last complete update. A fresh server
calls its weights "default", which no rollout accepts. The server therefore answers no request before the update. A new
update does not wait: the keeper stops after the current bucket, and the update includes the server, or the next look
sends the new weights.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from megarl.config.tables.rollout import SGLangConfig
from megarl.engines.sglang.http import server_info
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.transports.protocol import send_tensors
from megarl.engines.sglang.transports.sender import Checksums, GoneError, WeightSender, deadline, in_thread
from megarl.engines.sglang.versions import check_server
from megarl.engines.weights import Bucket
from megarl.errors import RolloutError, WeightSyncError, refusal

FRESH = "default"
"""SGLang's name for the weights of a server without an update."""


def find_changes(checksums: Checksums, expected: Checksums) -> list[str]:
    """Return the names of tensors whose checksums differ on a rank."""
    ranks = zip(checksums, expected, strict=False)
    return sorted({name for tensors, other in ranks for name, _ in tensors.items() ^ other.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A complete weight update, kept for servers that come back."""

    version: int
    copy: Sequence[Bucket] | Path | None
    """None: without a copy, the next update brings these servers up to date."""
    checksums: Checksums | None = None
    """Checksums of every server; None if not compared, or without a server."""


@dataclass(kw_only=True)
class FleetState:
    """What the servers of a fleet have in common."""

    settings: SGLangConfig = field(default_factory=SGLangConfig)
    """Of these: tp, checksums, start_deadline_s and max_restarts."""
    api_key: str | None = None
    routes: bool = True
    """Whether the servers must return routes."""
    nucleus: bool = False
    """Whether ``top_p`` is below 1."""
    source: Path | None = None
    """Checkpoint folder with the model's config and tokenizer; None: the model folder of the first of ``specs``."""
    copies: Path | Literal["memory", "none"] = "memory"
    """Where the fleet keeps a copy of the weights for restarted servers: in memory, or in this folder. none: the next
    update brings these servers up to date."""
    hang_s: float = 120.0
    """Time of failed health checks until a server is killed and restarted."""
    poll_s: float = 0.5
    """Time between two looks at the processes."""
    health_s: float = 10.0
    """Time between a passed health check, in which an idle server generates a token, and the next check."""
    tell: Callable[[str], None] = print
    """Gets a line for every restart and warning."""
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


@dataclass(eq=False)
class Member:
    """A server; its keeper restarts a server with a ``process``."""

    url: str
    process: Server | None
    """None: the server runs elsewhere."""
    fleet: FleetState
    connection: WeightSender | None = None
    """None before the first ``connect``."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during talks about weights: by an update, or by the keeper."""
    ready: bool = False
    """True if the server answers; updates include only ready servers."""
    holds: Update | None = None
    """The update whose weights the server has; None: no weights, or half of an update."""
    away_since: float | None = None
    restarts: int = 0
    last_failure: str = ""
    """The last failure that was told."""
    checked_at: float = -math.inf
    """Time of the server's last passed check; for a server at a URL, of the last question for its weights."""
    _silent_since: float | None = None

    def __post_init__(self) -> None:
        self.keeper = threading.Thread(target=self._keep, name=f"keeper of {self.url}", daemon=True)

    @property
    def sender(self) -> WeightSender:
        assert self.connection is not None, "a server that is updated has been connected to"
        return self.connection

    def leave(self) -> None:
        """Note the loss of the server, or of its weights."""
        self.ready, self.holds = False, None
        self.away_since = self.away_since or time.monotonic()

    def compare_checksums(self, checksums: Checksums, expected: Checksums) -> None:
        """WeightSyncError unless the checksums equal the expected checksums."""
        if names := find_changes(checksums, expected):
            raise WeightSyncError(refusal("checksums_differ", url=self.url, num=len(names), first=names[:1]))

    def settle(self, update: Update) -> None:
        """Note that the server has an update."""
        self.holds = update
        if self.away_since is not None:
            away_s = time.monotonic() - self.away_since
            self.fleet.tell(f"{self.url} is back with weights {update.version} after {away_s:.1f} s")
            self.away_since, self.last_failure = None, ""

    def leave_update(self, error: WeightSyncError) -> None:
        """Let an update continue without a server that hangs, or has gone. The keeper takes over.

        Kills the process, and releases the lock.
        """
        state = "has gone" if isinstance(error, GoneError) else "hangs"
        self.fleet.tell(refusal("left_update", url=self.url, state=state, error=error))
        self.leave()
        in_thread(self._let_go)

    def _let_go(self) -> None:
        try:
            if self.process is not None:  # the kill may take seconds; surviving processes fail the next start
                self.process.kill()
        finally:
            self.lock.release()

    def connect(self) -> None:
        """Make a new sender; RolloutError without an answer, ConfigError if megarl cannot use the server."""
        fleet, settings = self.fleet, self.fleet.settings
        info = server_info(self.url, fleet.api_key, deadline()) | {"checksums": settings.checksums}
        release, warnings = check_server(info, settings.tp, fleet.routes, fleet.nucleus, fleet.source, settings.fp8)
        if self.connection is not None:
            self.connection.leave_group()  # not closed: a keeper may use the connection
        for warning in warnings if self.connection is None else ():
            self.fleet.tell(f"warning: {warning}")
        gpus = (self.process and self.process.spec.gpus) or ()
        self.connection = WeightSender(self.url, release, tp=settings.tp, api_key=fleet.api_key, gpus=gpus)
        self.connection.takes_deltas = None if settings.deltas else False

    def begin(self) -> None:
        """Pause the server for new weights; tell if a new connection takes no deltas."""
        is_unknown = self.sender.takes_deltas is None
        self.sender.begin()
        if is_unknown and not self.sender.takes_deltas:
            self.fleet.tell(refusal("no_deltas", url=self.url))

    def find_version(self) -> str | None:
        """Return the server's name for its weights, empty if unknown; None without an answer."""
        try:
            return self.sender.weight_version(timeout_s=5.0)
        except WeightSyncError as error:
            gone = isinstance(error, GoneError) or isinstance(error.__cause__, httpx.ConnectTimeout)
            return None if gone else ""

    # The keeper

    def _keep(self) -> None:
        while not self.fleet.ended.wait(self.fleet.poll_s):
            with self._telling_failure("could not be looked after"):
                self.look()

    def look(self) -> None:
        """Check whether the server is alive and up to date, and repair the state."""
        if self.process is None:
            self._look_at_stranger()
        elif self._is_behind():
            with self.lock:
                if self._is_behind():  # else an update had the lock
                    self.send_copy()
        elif self.needs_restart() and not self.fleet.no_starts.is_set():
            self.restart()

    def needs_restart(self) -> bool:
        """Whether the process is dead and not given up; kills a process whose health checks fail for too long.

        A passed check is not repeated for a while. During an update the server is paused and would fail.
        """
        fleet, process = self.fleet, self.process
        assert process is not None
        dead = not process.alive
        if not dead and time.monotonic() - self.checked_at >= fleet.health_s:
            if fleet.updating.is_set():
                self._silent_since = None
            elif process.healthy():
                self._silent_since, self.checked_at = None, time.monotonic()
            else:
                self._silent_since = self._silent_since or time.monotonic()
                if dead := time.monotonic() - self._silent_since > fleet.hang_s:
                    fleet.tell(f"{self.url} has not answered for {fleet.hang_s:.0f} s: killed")
                    process.kill()
        return dead and self.restarts <= fleet.settings.max_restarts

    def restart(self) -> None:
        """Start the server again and send the weights; tell a failure."""
        assert self.process is not None
        with self.lock:
            self.leave()
            self.restarts += 1
            self._silent_since = None
            if self.restarts > self.fleet.settings.max_restarts:
                return self.fleet.tell(f"{self.url} died {self.restarts} times and is given up")
            self.fleet.tell(f"{self.url} is dead: starting it again (restart {self.restarts})")
            with self._telling_failure("could not be started again"):
                self.process.start()
                self.process.wait_ready(self.fleet.settings.start_deadline_s, self.fleet.no_starts)
                self._rejoin()
        return None

    def send_copy(self) -> None:
        """Send the server the last complete update, unless a new update begins. The caller holds the lock.

        Tells a failure; a server with a process is then killed, and the next look restarts the server.
        """
        with self._telling_failure("could not take weights"):
            self._rejoin()

    def _rejoin(self) -> None:
        last = self.fleet.kept
        self.leave()
        self.connect()
        self.begin()  # a hanging server fails here, and delays no update
        self.sender.name(FRESH)  # no rollout accepts the weights
        self.ready = True
        if last is None:
            return self.sender.resume()
        try:
            self._send(last)
        except WeightSyncError:
            if self.fleet.last is last:  # else the folder may be gone
                raise
        return None

    def _send(self, last: Update) -> None:
        if isinstance(last.copy, Path):
            self.sender.load_from_disk(str(last.copy))
        else:
            for bucket in last.copy or ():
                if self.fleet.last is not last:
                    return
                send_tensors(self.sender, bucket)
        self.sender.finish(last.version)
        if last.checksums is not None:
            self.compare_checksums(self.sender.checksums(), last.checksums)
        if self.fleet.last is last:
            self.sender.resume()
            self.settle(last)

    def _is_behind(self) -> bool:
        """Whether the server lacks the kept weights, or was late in an update."""
        update = self.fleet.kept
        if not self.ready:
            return self.process is not None and self.process.alive and not self.fleet.updating.is_set()
        return update is not None and self.holds is not update

    def _look_at_stranger(self) -> None:
        """Send a server at a URL the weights if needed; asked less often than processes are checked.

        Weights under any other name were sent by foreign code, and stay.
        """
        last = self.fleet.kept
        if self.fleet.updating.is_set() or time.monotonic() - self.checked_at < 4 * self.fleet.poll_s:
            return
        self.checked_at = time.monotonic()
        name = self.find_version() if self.connection is not None else FRESH
        if name is None:
            self.ready = False
        elif last is not None and self.holds is last and name != FRESH:
            self.ready = True
        elif last is not None or not self.ready:
            with self.lock:  # perhaps of an update or a proof, which has sent the weights
                sent = last is not None and self.holds is last and self.find_version() != FRESH
                if self.fleet.kept is last and not sent:
                    self.send_copy()

    @contextmanager
    def _telling_failure(self, action: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a server may answer anything, and a disk may be full: the keeper stays
            self.leave()
            if self.process is not None:
                with suppress(RolloutError):  # surviving processes fail the next start, with a message
                    self.process.kill()
            if str(error) != self.last_failure and not self.fleet.no_starts.is_set():
                self.last_failure = str(error)
                self.fleet.tell(f"{self.url} {action}: {error}")
