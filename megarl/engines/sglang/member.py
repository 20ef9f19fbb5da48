"""A server of a fleet: process, sender of weights, and state."""

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
"""A server whose scheduler was killed ends within seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A complete weight update, kept for servers that come back."""

    version: int
    copy: Sequence[Bucket] | Path | None
    """None: without a copy, the next update brings these servers up to date."""
    checksums: Checksums | None = None
    """Checksums of every server; None if not compared, or without a server."""
    sums: Sequence[int] = ()
    """Sums of the bits of each tensor."""


@dataclass(eq=False)
class Member:
    """A server; the fleet restarts a server with a ``process``."""

    url: str
    process: Server | None
    """None: the server runs elsewhere."""
    tp: int
    """Tensor-parallel size."""
    api_key: str | None
    routes: bool
    """Whether the server must return routes."""
    nucleus: bool
    """Whether top_p is below 1."""
    source: Path
    """Checkpoint folder with the model's config."""
    tell: Callable[[str], None]
    connection: WeightSender | None = None
    """None before the first ``connect``."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during talks about weights: by an update, or by the keeper."""
    ready: bool = False
    """True if the server answers; updates include only ready servers."""
    holds: Update | None = None
    """The update whose weights the server has; None: no weights, or half of an update."""
    proof: Proof | None = None
    away_since: float | None = None
    restarts: int = 0
    leniency: int = 1
    """Factor on the server's time in a step of an update; doubled after every late step."""
    last_failure: str = ""
    """The last failure that was told."""

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
        if names := differing(checksums, expected):
            raise WeightSyncError(
                f"{self.url} holds other weights than the first server after one update: {len(names)} checksums "
                f"differ, the first of {names[:1]}"
            )

    def settle(self, update: Update, prompt: Sequence[int]) -> None:
        """Note that the server has an update, with a new proof; WeightSyncError if the update was not made."""
        proof = Proof(self.sender, prompt, update.checksums, update.sums)
        if self.proof is not None and proof.is_unmade(self.proof):  # the old proof stays for the next attempt
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
        """Let an update continue without a server that is late (error None), hangs, or has gone. The keeper takes over.

        Releases the lock. A hanging or stopping process is killed; must_end: a late process, too.
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
            if kills and self.process is not None:  # the kill may take seconds; surviving processes fail the next start
                self.process.kill()
        finally:
            self.lock.release()

    def await_death(self, error: WeightSyncError, refused_at: float, restarts: int) -> None:
        """Wait for the end of a dying server, which may refuse a step first; raises ``error`` if the server lives.

        restarts: number of restarts at the refusal.
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
        """Make a new sender; RolloutError without an answer, ConfigError if megarl cannot use the server."""
        info = server_info(self.url, self.api_key, deadline())
        release, warnings = check_server(info, self.tp, self.routes, self.nucleus, self.source)
        if self.connection is not None:
            self.connection.leave_group()  # not closed: a keeper may use the connection
        for warning in warnings if self.connection is None else ():
            self.tell(f"warning: {warning}")
        gpus = (self.process and self.process.spec.gpus) or ()
        self.connection = WeightSender(self.url, release, tp=self.tp, api_key=self.api_key, gpus=gpus)

    def find_version(self) -> str | None:
        """Return the server's name for its weights, empty if unknown; None without an answer."""
        try:
            return self.sender.weight_version(timeout_s=5.0)
        except WeightSyncError as error:
            gone = isinstance(error, GoneError) or isinstance(error.__cause__, httpx.ConnectTimeout)
            return None if gone else ""
