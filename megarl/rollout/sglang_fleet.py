"""The SGLang servers of a run: started, kept alive, and given the weights that the trainer last sent.

A server that dies is started again on its port and gets a copy of the current weights from this machine's memory,
before any request can be answered with others: a fresh server names its weights "default", which no rollout accepts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from megarl.errors import ConfigError, RolloutError, WeightSyncError
from megarl.rollout.checkpoint_views import checkpoint_shapes
from megarl.rollout.sglang_http import SERVER_INFO, authorization
from megarl.rollout.sglang_server import Server, ServerSpec
from megarl.rollout.sglang_sync import Named, WeightSender, buckets, each_exactly_once
from megarl.rollout.sglang_versions import check_version
from megarl.rollout.weight_folder import write_weights

BUCKET_BYTES = 256 << 20
DEATH_WAIT_S = 10.0
"""A server whose scheduler was killed ends itself within seconds."""


@dataclass
class _Member:
    url: str
    process: Server | None
    """None: a server that somebody else runs."""
    sender: WeightSender | None = None
    restarts: int = 0
    silent_since: float | None = None


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


@dataclass
class Fleet:
    """Servers that are started here (``specs``), or that run already (``urls``)."""

    specs: Sequence[ServerSpec] = ()
    urls: Sequence[str] = ()
    tp: int = 1
    """Tensor-parallel size of each server."""
    api_key: str | None = None
    folder: Path | None = None
    """Weights go through a folder below this one, which all servers can read; None: as tensors over HTTP."""
    source: Path | None = None
    """Checkpoint folder with the model's config and tokenizer; None: that of the first of ``specs``."""
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
        self._copy: list[list[Named]] | Path = []
        self._version: int | None = None
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._updating = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self) -> list[str]:
        """Start what is to be started, wait until all answer; returns their URLs. RolloutError if one does not."""
        own = [member for member in self._members if member.process is not None]
        try:
            for member in own:
                assert member.process is not None
                member.process.start()
            for member in self._members:
                if member.process is not None:
                    member.process.wait_ready(self.settings.start_deadline_s)
                    member.url = member.process.url
                member.sender = self._connect(member.url)
        except BaseException:
            self.close()
            raise
        if own:
            self._watcher = threading.Thread(target=self._watch, name="sglang-fleet", daemon=True)
            self._watcher.start()
        return [member.url for member in self._members]

    def update(self, tensors: Iterable[Named], version: int) -> None:
        """Give all servers new weights. WeightSyncError if one refuses; one that dies gets them when it is back.

        WeightSyncError too for tensors that are not those of the checkpoint, each once: servers do not look.
        """
        assert self.source is not None
        if self._shapes is None:
            self._shapes = checkpoint_shapes(self.source)
        with self._lock:
            self._updating.set()
            try:
                self._version, self._copy = None, []
                served = [member for member in self._members if self._tried(member, lambda s: s.begin())]
                parts = buckets(each_exactly_once(tensors, self._shapes, version), BUCKET_BYTES)
                served = self._from_folder(served, parts, version) if self.folder else self._as_tensors(served, parts)
                for member in served:
                    self._tried(member, lambda s: s.finish(version))
                self._version = version
            finally:
                self._updating.clear()

    def _as_tensors(self, served: list[_Member], parts: Iterable[list[Named]]) -> list[_Member]:
        """Send every bucket to all; keeps a copy for servers that die. Returns those that took everything."""
        keep = any(member.process is not None for member in self._members)
        copies: list[list[Named]] = []
        for bucket in parts:
            held = [(name, tensor.detach().to("cpu", copy=keep)) for name, tensor in bucket]
            if keep:
                copies.append(held)
            served = [member for member in served if self._tried(member, lambda s, b=held: s.send(b))]
        self._copy = copies
        return served

    def _from_folder(self, served: list[_Member], parts: Iterable[list[Named]], version: int) -> list[_Member]:
        assert self.folder is not None
        assert self.source is not None
        self._copy = path = write_weights(self.folder, self.source, parts, version)
        return [member for member in served if self._tried(member, lambda s: s.load_from_disk(str(path.absolute())))]

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
        headers = authorization(self.api_key)
        try:
            for path in SERVER_INFO:
                answer = httpx.get(f"{url}/{path}", headers=headers, timeout=60.0, trust_env=False)
                if answer.status_code != 404:
                    break
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise RolloutError(f"no SGLang server answers at {url} ({error}); start it, or correct the URL") from error
        release, warnings = check_version(str(answer.json().get("version")))
        for warning in warnings:
            self.tell(f"warning: {warning}")
        return WeightSender(url, release, tp=self.tp, api_key=self.api_key)

    def _tried(self, member: _Member, step: Callable[[WeightSender], None]) -> bool:
        """True if the step succeeded; False if the server is dead and will be revived; else raises."""
        assert member.sender is not None
        try:
            step(member.sender)
        except WeightSyncError:
            until = time.monotonic() + DEATH_WAIT_S
            while member.process is not None and member.process.alive and time.monotonic() < until:
                time.sleep(0.1)
            if member.process is None or member.process.alive:
                raise
            return False
        return True

    def _watch(self) -> None:
        while not self._ended.wait(self.settings.poll_s):
            for member in self._members:
                if member.process is not None and self._needs_revival(member):
                    self._revive(member)

    def _needs_revival(self, member: _Member) -> bool:
        assert member.process is not None
        if not member.process.alive:
            return member.restarts <= self.settings.max_restarts
        # A paused server answers no health check, and one that is hung answers 503.
        if self._updating.is_set() or member.process.healthy():
            member.silent_since = None
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
                if member.sender is not None:
                    member.sender.close()
                member.sender = self._connect(member.url)
                if self._version is not None:
                    member.sender.begin()
                    if isinstance(self._copy, Path):
                        member.sender.load_from_disk(str(self._copy.absolute()))
                    else:
                        for bucket in self._copy:
                            member.sender.send(bucket)
                    member.sender.finish(self._version)
            except (ConfigError, RolloutError, WeightSyncError) as error:
                self.tell(f"{member.url} could not be started again: {error}")
                member.process.kill()
                return
        self.tell(f"{member.url} is back with weights {self._version} after {time.monotonic() - started:.1f} s")
