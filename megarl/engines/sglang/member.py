"""One server of a fleet: its process, the sender of its weights, and whether it is alive and up to date."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from megarl.engines.buckets import Bucket
from megarl.engines.sglang.http import server_info
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.transports.deadlines import MOST_LENIENT, GoneError, deadline
from megarl.engines.sglang.transports.proof import Checksums, Proof, differing
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.sglang.transports.threads import in_thread
from megarl.engines.sglang.versions import check_server
from megarl.errors import WeightSyncError

DEATH_WAIT_S = 10.0
"""A server whose scheduler was killed ends itself within seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A complete weight update, kept for servers that come back."""

    version: int
    copy: Sequence[Bucket] | Path | None
    """None: none is kept, and the next update brings them up to date."""
    checksums: Checksums | None = None
    """Of every server; None if they are not compared, or no server was there."""
    sums: Sequence[int] = ()
    """Of the bits of each tensor."""


@dataclass(eq=False)
class Member:
    """One server; the fleet starts it again if it has a ``process``."""

    url: str
    process: Server | None
    """None: somebody else runs the server."""
    tp: int
    """Tensor-parallel size."""
    api_key: str | None
    routes: bool
    """Whether it must return routes."""
    nucleus: bool
    """Whether top_p is below 1."""
    source: Path
    """Checkpoint folder with the model's config."""
    tell: Callable[[str], None]
    connection: WeightSender | None = None
    """None before the first ``connect``."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by who talks to the server about weights: an update, or the keeper."""
    ready: bool = False
    """Whether it answers, so that an update takes it along."""
    holds: Update | None = None
    """Whose weights it has; None while it has none, or only some."""
    proof: Proof | None = None
    away_since: float | None = None
    restarts: int = 0
    leniency: int = 1
    """How many times as long as others it may take in a step of an update; doubled each time that it is late."""
    last_failure: str = ""
    """The last failure that was told."""

    @property
    def sender(self) -> WeightSender:
        assert self.connection is not None, "a server that is updated has been connected to"
        return self.connection

    def leave(self) -> None:
        """Note that the server is gone, or that its weights are."""
        self.ready, self.holds = False, None
        self.away_since = self.away_since or time.monotonic()

    def compare_checksums(self, checksums: Checksums, expected: Checksums) -> None:
        """Raises WeightSyncError unless they are those of the other servers."""
        if names := differing(checksums, expected):
            raise WeightSyncError(
                f"{self.url} holds other weights than the first server after one update: {len(names)} checksums "
                f"differ, the first of {names[:1]}"
            )

    def settle(self, update: Update, prompt: Sequence[int]) -> None:
        """Note that the server has an update, and what it says of its weights; WeightSyncError if it made none."""
        proof = Proof(self.sender, prompt, update.checksums, update.sums)
        if self.proof is not None and proof.is_unmade(self.proof):  # which stays, for the next attempt
            raise WeightSyncError(
                f"{self.url} confirmed the update to weights {update.version} and did not make it: most tensors are "
                "others, but its log-probabilities of a fixed prompt are the same to the last bit. Look at its log"
            )
        self.proof, self.holds = proof, update
        if self.away_since is not None:
            self.tell(
                f"{self.url} is back with weights {update.version} after {time.monotonic() - self.away_since:.1f} s"
            )
            self.away_since, self.last_failure = None, ""

    def leave_update(self, error: WeightSyncError | None, *, must_end: bool) -> None:
        """Let an update go on without the server, which is late (None), hangs, or has gone; its keeper looks after it.

        Releases the lock. A process that hangs or stops is killed; ``must_end``: one that is late, too.
        """
        self.leniency = min(MOST_LENIENT, 2 * self.leniency) if error is None else self.leniency
        state = "is late" if error is None else "stops or has gone" if isinstance(error, GoneError) else "hangs"
        cause = "" if error is None else f" ({error})"
        self.tell(f"{self.url} {state} in a weight update, which goes on without it{cause}; it gets the weights later")
        self.sender.abandon()
        self.leave()
        in_thread(partial(self._let_go, error is not None or must_end))

    def _let_go(self, kills: bool) -> None:
        try:
            if kills and self.process is not None:  # which may take seconds; what is left fails the next start
                self.process.kill()
        finally:
            self.lock.release()

    def await_death(self, error: WeightSyncError, refused_at: float, restarts: int) -> None:
        """Wait for the end of a dying server, which may refuse a step before it; raises ``error`` of one that lives.

        ``restarts``: how many it had then.
        """
        while self.restarts == restarts and (
            self.process.alive if self.process is not None else self.find_version() is not None
        ):
            if time.monotonic() > refused_at + DEATH_WAIT_S:
                raise error
            time.sleep(0.1)
        self.tell(f"{self.url} has gone in a weight update ({error}); it gets the weights when it is back")
        if self.process is None:
            self.leave()

    def connect(self) -> None:
        """Make a new sender; RolloutError if nothing answers, ConfigError if megarl cannot use what answers."""
        info = server_info(self.url, self.api_key, deadline())
        release, warnings = check_server(info, self.tp, self.routes, self.nucleus, self.source)
        if self.connection is not None:
            self.connection.leave_group()  # not closed: a keeper may be asking through it. It keeps no connection
        for warning in warnings if self.connection is None else ():
            self.tell(f"warning: {warning}")
        gpus = (self.process and self.process.spec.gpus) or ()
        self.connection = WeightSender(self.url, release, tp=self.tp, api_key=self.api_key, gpus=gpus)

    def find_version(self) -> str | None:
        """Returns the server's name for its weights, empty if it does not say; None if nothing answers."""
        try:
            return self.sender.weight_version(timeout_s=5.0)
        except WeightSyncError as error:
            gone = isinstance(error, GoneError) or isinstance(error.__cause__, httpx.ConnectTimeout)
            return None if gone else ""
