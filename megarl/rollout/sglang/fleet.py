"""The SGLang servers of a run: started, kept alive, and given the weights that the trainer last sent.

A server that dies is started again on its port and gets a copy of the current weights from this machine's memory,
before any request can be answered with others: a fresh server names its weights "default", which no rollout accepts.
Servers that somebody else runs are not started again here, but get the weights when they are back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from megarl.errors import ConfigError, RolloutError, WeightSyncError
from megarl.rollout.sglang.http import server_info
from megarl.rollout.sglang.server import Server, ServerSpec
from megarl.rollout.sglang.versions import check_server
from megarl.rollout.sglang.weights.buckets import Bucket, Stopwatch, split_into_buckets
from megarl.rollout.sglang.weights.folder import WeightFolder
from megarl.rollout.sglang.weights.process_group import GroupError
from megarl.rollout.sglang.weights.sender import WeightSender
from megarl.rollout.weights import Named, WeightForm, checkpoint_shapes, require_each_once

BUCKET_BYTES = 256 << 20
FRESH = "default"
"""What a server calls its weights that has been given none."""
DEATH_WAIT_S = 10.0
"""A server whose scheduler was killed ends itself within seconds."""


@dataclass
class _Member:
    url: str
    process: Server | None
    """None: a server that somebody else runs."""
    sender: WeightSender | None = None
    restarts: int = 0
    heard_at: float = -math.inf
    silent_since: float | None = None
    missed: bool = False
    """The last update went past it, because it was gone."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How patient a fleet is."""

    start_deadline_s: float = 300.0
    """Longest start of a server, weights included."""
    hang_s: float = 120.0
    """A server that does not answer its health check for this long is killed and started again."""
    max_restarts: int = 20
    """Restarts of one server before the fleet gives it up."""
    poll_s: float = 0.5
    """Between two looks at whether the processes live."""
    health_s: float = 10.0
    """Between two health checks of a server that has answered the last one; each generates a token."""


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
    """The copy of the weights for servers that are started again is kept below this folder; None: in memory."""
    source: Path | None = None
    """Checkpoint folder with the model's config and tokenizer; None: that of the first of ``specs``."""
    served: Path | None = None
    """Folder whose config and tokenizer the servers read, if they read another one: that of the FP8 model."""
    settings: FleetSettings = field(default_factory=FleetSettings)
    tell: Callable[[str], None] = print
    """Gets one line for each restart and warning."""

    def __post_init__(self) -> None:
        if self.source is None and self.specs:
            self.source = Path(self.specs[0].model_path)
        if self.source is None:
            raise ConfigError("a fleet of servers given by URL needs source, a checkpoint folder of their model")
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._members = [_Member(url, None) for url in self.urls]
        self._members += [_Member("", Server(spec)) for spec in self.specs]
        self._copy: list[Bucket] | Path = []
        self._checksums: list[dict[str, str]] | None = None
        self._version: int | None = None
        self._resting: list[_Member] = []
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._updating = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, ended: threading.Event | None = None) -> list[str]:
        """Start what is to be started, wait until all answer; returns their URLs. RolloutError if one does not, or if
        another thread sets ``ended`` meanwhile."""
        own = [member for member in self._members if member.process is not None]
        try:
            for member in own:
                assert member.process is not None
                member.process.start()
            for member in self._members:
                if member.process is not None:
                    member.process.wait_ready(self.settings.start_deadline_s, ended)
                    member.url = member.process.url
                member.sender = self._connect(member.url)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="sglang-fleet", daemon=True)
        self._watcher.start()
        return [member.url for member in self._members]

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> dict[str, float]:
        """Give all servers new weights in this form; returns the seconds spent on "gather", "quantise" and "send".

        WeightSyncError if a server refuses; one that dies gets them when it is back. WeightSyncError too for tensors
        that are not those of the checkpoint, each once: servers do not look.
        """
        assert self.source is not None
        if self._shapes is None:
            self._shapes = checkpoint_shapes(self.source)
        gathering, forming = Stopwatch(), Stopwatch()
        with self._lock:
            self._updating.set()
            started = time.perf_counter()
            try:
                self._version, self._copy, self._checksums = None, [], None
                resting = self._each(self._resting, lambda sender: sender.take_memory("weights"))
                served = self._each(self._members, lambda sender: sender.begin())
                whole = require_each_once(gathering.over(tensors), self._shapes, version)
                parts = split_into_buckets(forming.over(form.convert(whole)), BUCKET_BYTES)
                served = self._delivered(served, parts, version)
                served = self._each(served, lambda sender: sender.finish(version))
                served = self._compare_checksums(served)
                self._each([m for m in served if any(m is one for one in resting)], _take_cache)
                self._resting = []
                for member in self._members:
                    member.missed = member.process is None and not any(member is one for one in served)
                self._each(served, lambda sender: sender.resume())
                self._version = version
            finally:
                self._updating.clear()
        gather, quantise = gathering.seconds, forming.seconds - gathering.seconds
        return {"gather": gather, "quantise": quantise, "send": time.perf_counter() - started - gather - quantise}

    def rest(self) -> None:
        """Have all servers give their memory back until the next update; those that die meanwhile come back with it."""
        with self._lock:
            self._updating.set()  # nobody answers a health check, or is given weights
            self._version, self._copy = None, []
            self._resting = self._each(self._members, lambda sender: sender.release_memory())

    def _each(self, members: Sequence[_Member], step: Callable[[WeightSender], None]) -> list[_Member]:
        """Do it on all at the same time; those that are not dead. Raises the first error of one that lives."""
        with ThreadPoolExecutor(len(members) or 1) as threads:
            done = list(threads.map(lambda member: self._tried(member, step), members))
        return [member for member, alive in zip(members, done, strict=True) if alive]

    def _delivered(self, served: list[_Member], parts: Iterable[Bucket], version: int) -> list[_Member]:
        """Bring every bucket to all, and keep a copy for servers that die. Returns those that took everything."""
        assert self.source is not None
        place = self.folder or self.spare
        folder = WeightFolder(place, self.served or self.source, version) if place else None
        send = WeightSender.broadcast if self.broadcast else WeightSender.send
        copies: list[Bucket] = []
        for bucket in parts:
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

    def _compare_checksums(self, served: list[_Member]) -> list[_Member]:
        """All servers must hold the same weights, and one that is back later those of the others.

        Returns those that live."""
        if not self.checksums:
            return served
        told: dict[str, list[dict[str, str]]] = {}
        served = self._each(served, lambda sender: told.update({sender.url: sender.checksums()}))
        for member in served:
            found = told[member.url]
            self._checksums = self._checksums or found
            if found != self._checksums:
                wrong = [
                    name
                    for mine, theirs in zip(found, self._checksums, strict=False)
                    for name in sorted(mine.keys() | theirs.keys())
                    if mine.get(name) != theirs.get(name)
                ]
                raise WeightSyncError(
                    f"{member.url} holds other weights than the first server after one update: {len(wrong)} checksums "
                    f"differ, the first of {wrong[:1]}"
                )
        return served

    @property
    def given_up(self) -> bool:
        """Whether a server has died too often to be started again."""
        return any(member.restarts > self.settings.max_restarts for member in self._members)

    def close(self) -> None:
        """Stop the servers that were started here, and wait for their processes to be gone."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join()
        for member in self._members:
            if member.sender is not None:
                member.sender.close()
            if member.process is not None:
                member.process.stop()

    def _connect(self, url: str) -> WeightSender:
        release, warnings = check_server(server_info(url, self.api_key), self.tp)
        for warning in warnings:
            self.tell(f"warning: {warning}")
        return WeightSender(url, release, tp=self.tp, api_key=self.api_key)

    def _tried(self, member: _Member, step: Callable[[WeightSender], None]) -> bool:
        """True if the step succeeded; False if the server is dead and will be revived; else raises."""
        assert member.sender is not None
        try:
            step(member.sender)
        except WeightSyncError as error:
            silent = isinstance(error, GroupError) or isinstance(error.__cause__, httpx.TimeoutException)
            if member.process is not None and silent:
                self.tell(f"{member.url} is dead or hangs in a weight update: killed")
                member.process.kill()
                return False
            until = time.monotonic() + DEATH_WAIT_S
            while (alive := self._lives(member)) and time.monotonic() < until:
                time.sleep(0.1)
            if alive:
                raise
            if member.process is None:
                self.tell(f"{member.url} is gone in a weight update; it gets the weights when it is back")
                member.missed = True
            return False
        return True

    def _lives(self, member: _Member) -> bool:
        """Whether its process runs; of somebody else's server, whether anything answers."""
        if member.process is not None:
            return member.process.alive
        try:
            server_info(member.url, self.api_key, timeout_s=5.0)
        except RolloutError as error:
            return not isinstance(error.__cause__, (httpx.ConnectError, httpx.ConnectTimeout))
        return True

    def _watch(self) -> None:
        while not self._ended.wait(self.settings.poll_s):
            for member in self._members:
                if member.process is None:
                    if self._is_asked_after(member):
                        self._bring_weights(member)
                elif self._needs_revival(member):
                    self._revive(member)

    def _is_asked_after(self, member: _Member) -> bool:
        """Whether it is time to look at somebody else's server."""
        if self._updating.is_set() or time.monotonic() - member.heard_at < 4 * self.settings.poll_s:
            return False
        member.heard_at = time.monotonic()
        return True

    def _lacks_weights(self, member: _Member) -> bool:
        """Whether somebody else's server has been started again, or has missed an update.

        Weights under any other name are of somebody else, and stay.
        """
        assert member.sender is not None
        try:
            told = member.sender.weight_version()
        except WeightSyncError:
            return False  # it is away
        return self._version is not None and (told == FRESH or (member.missed and told != str(self._version)))

    def _bring_weights(self, member: _Member) -> None:
        with self._lock:
            try:
                if not self._lacks_weights(member):
                    return
                self.tell(f"{member.url} was started again: sending it weights {self._version}")
                self._deliver_copy(member)
            except (ConfigError, RolloutError, WeightSyncError, OSError) as error:
                self.tell(f"{member.url} could not take weights: {error}")
                return
        self.tell(f"{member.url} is back with weights {self._version}")

    def _deliver_copy(self, member: _Member) -> None:
        """Connect anew, and send the last weights that all got."""
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

    def _needs_revival(self, member: _Member) -> bool:
        assert member.process is not None
        if not member.process.alive:
            return member.restarts <= self.settings.max_restarts
        if time.monotonic() - member.heard_at < self.settings.health_s:
            return False
        # A paused server answers no health check, and one that is hung answers 503.
        if self._updating.is_set():
            member.silent_since = None
        elif member.process.healthy():
            member.silent_since, member.heard_at = None, time.monotonic()
        else:
            member.silent_since = member.silent_since or time.monotonic()
            if time.monotonic() - member.silent_since > self.settings.hang_s:
                self.tell(f"{member.url} has not answered for {self.settings.hang_s:.0f} s: killed")
                member.process.kill()
                return True
        return False

    def _revive(self, member: _Member) -> None:
        assert member.process is not None
        member.restarts += 1
        member.silent_since = None
        if member.restarts > self.settings.max_restarts:
            self.tell(f"{member.url} died {member.restarts} times and is given up")
            return
        self.tell(f"{member.url} is dead: starting it again (restart {member.restarts})")
        started = time.monotonic()
        with self._lock:
            try:
                member.process.start()
                member.process.wait_ready(self.settings.start_deadline_s, self._ended)
                self._deliver_copy(member)
            except (ConfigError, RolloutError, WeightSyncError, OSError) as error:  # of a disk that is full, too
                self.tell(f"{member.url} could not be started again: {error}")
                member.process.kill()
                return
        self.tell(f"{member.url} is back with weights {self._version} after {time.monotonic() - started:.1f} s")


def _take_cache(sender: WeightSender) -> None:
    sender.take_memory("kv_cache")
