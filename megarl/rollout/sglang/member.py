"""One server of a fleet: its process, the sender of its weights, and whether it is alive and up to date."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from megarl.errors import WeightSyncError
from megarl.rollout.buckets import Bucket
from megarl.rollout.sglang.http import server_info
from megarl.rollout.sglang.server import Server
from megarl.rollout.sglang.versions import check_server
from megarl.rollout.sglang.weights.ipc import CPU
from megarl.rollout.sglang.weights.process_group import GroupError
from megarl.rollout.sglang.weights.proof import Checksums, Proof, differing
from megarl.rollout.sglang.weights.sender import WeightSender

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
    checked_at: float = -math.inf
    """When the server last passed a check; somebody else's server: when it was last asked for its weights."""
    generated_at: float = -math.inf
    """When it last passed a check that generates."""
    silent_since: float | None = None
    said: str = ""
    """The last failure that was told."""

    @property
    def gpus(self) -> Sequence[int]:
        """Of its tensor-parallel ranks."""
        return (self.process and self.process.spec.gpus) or (CPU,) * self.tp

    @property
    def sender(self) -> WeightSender:
        assert self.connection is not None, "a server that is updated has been connected to"
        return self.connection

    def leave(self) -> None:
        """Note that the server is gone, or that its weights are."""
        self.ready, self.holds = False, None
        self.away_since = self.away_since or time.monotonic()

    def compare_checksums(self, found: Checksums, expected: Checksums) -> None:
        """Raises WeightSyncError unless they are those of the other servers."""
        if names := differing(found, expected):
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
            self.away_since, self.said = None, ""

    def attempt(self, step: "Callable[[Member], object]") -> bool:
        """Runs one step of an update: True if it succeeded, False if the server is dead, else WeightSyncError."""
        try:
            step(self)
        except WeightSyncError as error:
            if isinstance(error, GroupError) or isinstance(error.__cause__, httpx.TimeoutException):
                if self.process is not None:
                    self.tell(f"{self.url} is dead or hangs in a weight update: killed")
                    self.process.kill()
                else:
                    self.tell(f"{self.url} hangs in a weight update ({error}); it gets the weights when it answers")
            else:
                self._await_death(error)
            self.leave()
            return False
        return True

    def _await_death(self, error: WeightSyncError) -> None:
        """A dying server fails the request before its process is gone; raises the error of one that lives."""
        until = time.monotonic() + DEATH_WAIT_S
        while self.process.alive if self.process is not None else self.find_version() is not None:
            if time.monotonic() > until:
                raise error
            time.sleep(0.1)
        if self.process is None:
            self.tell(f"{self.url} is gone in a weight update; it gets the weights when it is back")

    def connect(self) -> None:
        """Make a new sender; RolloutError if nothing answers, ConfigError if megarl cannot use what answers."""
        info = server_info(self.url, self.api_key)
        release, warnings = check_server(info, self.tp, self.routes, self.nucleus, self.source)
        if self.connection is not None:
            self.connection.leave_group()  # not closed: a keeper may be asking through it. It keeps no connection
        for warning in warnings if self.connection is None else ():
            self.tell(f"warning: {warning}")
        self.connection = WeightSender(self.url, release, tp=self.tp, api_key=self.api_key)

    def find_version(self) -> str | None:
        """Returns the server's name for its weights, empty if it does not say; None if nothing answers."""
        try:
            return self.sender.weight_version(timeout_s=5.0)
        except WeightSyncError as error:
            return None if isinstance(error.__cause__, (httpx.ConnectError, httpx.ConnectTimeout)) else ""
