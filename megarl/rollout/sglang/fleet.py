"""The servers of an engine: started, updated together, restarted when they die, and brought up to date.

- **start** starts the servers and waits until all answer.
- **update** sends new weights to all at once, and keeps a copy of them.
- **a watching thread** restarts a server that died, on its old port, and sends it the copy. A fresh server names its
  weights "default", which no rollout accepts, so it answers no request before that. Servers that somebody else runs
  are not restarted, but get the copy when they are back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from megarl.errors import ConfigError, RolloutError, WeightSyncError
from megarl.rollout.sglang.http import server_info
from megarl.rollout.sglang.member import Member
from megarl.rollout.sglang.server import Server
from megarl.rollout.sglang.spec import ServerSpec
from megarl.rollout.sglang.versions import check_server
from megarl.rollout.sglang.weights.buckets import Bucket, Stopwatch, split_into_buckets
from megarl.rollout.sglang.weights.folder import WeightFolder
from megarl.rollout.sglang.weights.sender import WeightSender
from megarl.rollout.weights import Named, WeightForm, checkpoint_shapes, require_each_once

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How long a fleet waits."""

    start_deadline_s: float = 300.0
    """Longest start of a server, weights included."""
    hang_s: float = 120.0
    """A server that fails its health checks for this long is killed and restarted."""
    max_restarts: int = 20
    """Restarts of one server before the fleet gives it up."""
    poll_s: float = 0.5
    """Time between two looks at the processes."""
    health_s: float = 10.0
    """Time between a passed health check and the next one; each generates a token."""


@dataclass
class Fleet:
    """Servers that are started here (``specs``), or that run already (``urls``)."""

    specs: Sequence[ServerSpec] = ()
    urls: Sequence[str] = ()
    tp: int = 1
    """Tensor-parallel size of each server."""
    api_key: str | None = None
    folder: Path | None = None
    """Weights go through a folder below this one, which all servers can read; None: over the network."""
    broadcast: bool = False
    """Over the network: through a process group with each server; False: as tensors over HTTP."""
    checksums: bool = False
    """Whether the servers' own checksums of their weights are compared after every update."""
    spare: Path | None = None
    """Folder for the copy of the weights that restarted servers get; None: in memory."""
    source: Path | None = None
    """Checkpoint folder with the model's config and tokenizer; None: that of the first of ``specs``."""
    served: Path | None = None
    """Folder whose config and tokenizer the servers read if it is another one: that of the FP8 model."""
    settings: FleetSettings = field(default_factory=FleetSettings)
    tell: Callable[[str], None] = print
    """Gets one line for each restart and warning."""

    def __post_init__(self) -> None:
        if self.source is None and self.specs:
            self.source = Path(self.specs[0].model_path)
        if self.source is None:
            raise ConfigError("a fleet of servers given by URL needs source, a checkpoint folder of their model")
        self._members = [Member(url, None, self.api_key, self.tell) for url in self.urls]
        self._members += [Member("", Server(spec), self.api_key, self.tell) for spec in self.specs]
        # The last complete update: None and nothing during an update, so that no server is sent half of one.
        self._version: int | None = None
        self._copy: list[Bucket] | Path = []
        self._checksums: list[dict[str, str]] | None = None
        self._resting: list[Member] = []
        self._lock = threading.RLock()  # held by an update, a rest, and a restart
        self._updating = threading.Event()
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, ended: threading.Event | None = None) -> list[str]:
        """Start the servers, wait until all answer, and return their URLs.

        RolloutError if one does not answer, or if another thread sets ``ended`` meanwhile.
        """
        started = [(member, member.process) for member in self._members if member.process is not None]
        try:
            for _, process in started:
                process.start()
            for member, process in started:
                process.wait_ready(self.settings.start_deadline_s, ended)
                member.url = process.url
            for member in self._members:
                member.sender = self._connect(member.url)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="sglang-fleet", daemon=True)
        self._watcher.start()
        return [member.url for member in self._members]

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> dict[str, float]:
        """Give all servers new weights in this form; returns the seconds spent on "gather", "quantise" and "send".

        WeightSyncError if a server refuses them, or if ``tensors`` are not those of the checkpoint. A server that dies
        during the update gets them when it is back.
        """
        gathering, converting = Stopwatch(), Stopwatch()
        with self._lock:
            self._updating.set()
            started = time.perf_counter()
            try:
                self._version, self._copy, self._checksums = None, [], None
                rested = self._each(self._resting, partial(WeightSender.take_memory, kind="weights"))
                served = self._each(self._members, WeightSender.begin)
                checked = require_each_once(gathering.over(tensors), self._shapes, version)
                buckets = split_into_buckets(converting.over(form.convert(checked)), BUCKET_BYTES)
                served = self._deliver(served, buckets, version)
                served = self._each(served, partial(WeightSender.finish, version=version))
                served = self._compare_checksums(served)
                self._each([m for m in served if m in rested], partial(WeightSender.take_memory, kind="kv_cache"))
                self._resting = []
                for member in self._members:
                    member.missed = member.process is None and member not in served
                self._each(served, WeightSender.resume)
                self._version = version
            finally:
                self._updating.clear()
        gather, quantise = gathering.seconds, converting.seconds - gathering.seconds
        return {"gather": gather, "quantise": quantise, "send": time.perf_counter() - started - gather - quantise}

    def rest(self) -> None:
        """Have all servers free their memory until the next update; one that dies meanwhile comes back with it."""
        with self._lock:
            self._updating.set()  # resting servers fail health checks, and there are no weights to send
            self._version, self._copy = None, []
            self._resting = self._each(self._members, WeightSender.release_memory)

    def close(self) -> None:
        """Stop the servers that were started here, and wait until their processes are gone."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join()
        for member in self._members:
            if member.sender is not None:
                member.sender.close()
            if member.process is not None:
                member.process.stop()

    # An update

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        assert self.source is not None
        return checkpoint_shapes(self.source)

    def _each(self, members: Sequence[Member], step: Callable[[WeightSender], None]) -> list[Member]:
        """Run a step on all at the same time; returns those that live. Raises the first error of one that lives."""
        with ThreadPoolExecutor(len(members) or 1) as threads:
            alive = list(threads.map(lambda member: member.attempt(step), members))
        return [member for member, lives in zip(members, alive, strict=True) if lives]

    def _deliver(self, served: list[Member], buckets: Iterable[Bucket], version: int) -> list[Member]:
        """Send every bucket to all, and keep a copy of it. Returns the members that took everything."""
        assert self.source is not None
        place = self.folder or self.spare
        folder = WeightFolder(place, self.served or self.source, version) if place else None
        send = WeightSender.broadcast if self.broadcast else WeightSender.send
        copies: list[Bucket] = []
        for bucket in buckets:
            if folder:
                folder.add(bucket)
            else:
                copies.append(bucket.cpu())
            if not self.folder:
                served = self._each(served, lambda sender, bucket=bucket: send(sender, bucket))
                bucket.forget_payload()
        self._copy = folder.finish().absolute() if folder else copies
        if self.folder:
            served = self._each(served, lambda sender: sender.load_from_disk(str(self._copy)))
        return served

    def _compare_checksums(self, served: list[Member]) -> list[Member]:
        """Returns the members that live; WeightSyncError if one holds other weights than the first of the update."""
        if not self.checksums:
            return served
        found: dict[str, list[dict[str, str]]] = {}
        served = self._each(served, lambda sender: found.update({sender.url: sender.checksums()}))
        for member in served:
            mine = found[member.url]
            self._checksums = self._checksums or mine
            if mine != self._checksums:
                ranks = zip(mine, self._checksums, strict=False)
                names = sorted({name for rank, expected in ranks for name, _ in rank.items() ^ expected.items()})
                raise WeightSyncError(
                    f"{member.url} holds other weights than the first server after one update: {len(names)} checksums "
                    f"differ, the first of {names[:1]}"
                )
        return served

    def _connect(self, url: str) -> WeightSender:
        release, warnings = check_server(server_info(url, self.api_key), self.tp)
        for warning in warnings:
            self.tell(f"warning: {warning}")
        return WeightSender(url, release, tp=self.tp, api_key=self.api_key)

    # The watching thread

    def _watch(self) -> None:
        while not self._ended.wait(self.settings.poll_s):
            for member in self._members:
                if member.process is None:
                    self._bring_up_to_date(member)
                elif self._needs_restart(member):
                    self._restart(member)

    def _needs_restart(self, member: Member) -> bool:
        dead = member.needs_restart(self._updating.is_set(), self.settings.health_s, self.settings.hang_s)
        return dead and member.restarts <= self.settings.max_restarts

    def _restart(self, member: Member) -> None:
        assert member.process is not None
        member.restarts += 1
        member.silent_since = None
        if member.restarts > self.settings.max_restarts:
            self.tell(f"{member.url} died {member.restarts} times and is given up")
            return
        self.tell(f"{member.url} is dead: starting it again (restart {member.restarts})")
        started = time.monotonic()
        with self._lock, self._telling_failure(member, "could not be started again"):
            member.process.start()
            member.process.wait_ready(self.settings.start_deadline_s, self._ended)
            self._send_copy(member)
            self.tell(f"{member.url} is back with weights {self._version} after {time.monotonic() - started:.1f} s")

    def _bring_up_to_date(self, member: Member) -> None:
        """Send somebody else's server the weights if it lacks them; asked less often than processes are looked at."""
        if self._updating.is_set() or time.monotonic() - member.checked_at < 4 * self.settings.poll_s:
            return
        member.checked_at = time.monotonic()
        with self._lock, self._telling_failure(member, "could not take weights"):
            if member.needs_weights(self._version):
                self.tell(f"{member.url} was started again: sending it weights {self._version}")
                self._send_copy(member)
                self.tell(f"{member.url} is back with weights {self._version}")

    @contextmanager
    def _telling_failure(self, member: Member, what: str) -> Iterator[None]:
        try:
            yield
        except (ConfigError, RolloutError, WeightSyncError, OSError) as error:  # OSError: of a full disk
            self.tell(f"{member.url} {what}: {error}")
            if member.process is not None:
                member.process.kill()

    def _send_copy(self, member: Member) -> None:
        """Connect anew, and send the weights of the last complete update."""
        sender = self._connect(member.url)
        if member.sender is not None:
            member.sender.close()
        member.sender = sender
        if self._version is None:
            return
        sender.begin()
        if isinstance(self._copy, Path):
            sender.load_from_disk(str(self._copy))
        else:
            for bucket in self._copy:
                sender.send(bucket)
        sender.finish(self._version)
        self._compare_checksums([member])
        sender.resume()
        member.missed = False
