"""The servers of an engine: joint start, updates, and proof of the weights in use.

- **start** starts the servers and waits until every server answers or has failed.
- **update** sends new weights to all servers that answer, at once, and keeps a copy.
- **prove** asks all servers whether they still have the weights of the update.
- **a keeper** per server restarts a dead server, and sends the copy.

An absent server delays nothing: an update includes only the servers that answer.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from megarl.engines.buckets import Bucket, Intake
from megarl.engines.sglang.keeper import FleetSettings, FleetState, Keeper
from megarl.engines.sglang.member import Member, Update
from megarl.engines.sglang.participants import Participants
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.folder import WeightFolder
from megarl.engines.sglang.transports.proof import Checksums, make_prompt
from megarl.engines.sglang.transports.protocol import Buckets, Delivery, Transport
from megarl.engines.sglang.transports.tensor import Tensors
from megarl.engines.sglang.transports.threads import Line
from megarl.engines.weights import Named, WeightForm, checkpoint_shapes
from megarl.errors import ConfigError, MegarlError
from megarl.models.hf_folder import read_json

YIELD_S = 5.0
"""How long an update waits for a keeper that sends a bucket of the copy; then the update continues without the
server."""
CLOSE_S = 10.0
"""How long ``close`` waits for a keeper that talks to a server at a URL."""


@dataclass
class Fleet:
    """Servers with a process here (``specs``), or running elsewhere (``urls``)."""

    specs: Sequence[ServerSpec] = ()
    urls: Sequence[str] = ()
    tp: int = 1
    """Tensor-parallel size of each server."""
    api_key: str | None = None
    routes: bool = True
    """Whether the servers must return routes."""
    nucleus: bool = False
    """Whether ``top_p`` is below 1."""
    source: Path | None = None
    """Checkpoint folder with the model's config and tokenizer; None: the model folder of the first of ``specs``."""
    served: Path | None = None
    """Model folder given to the servers when it differs from ``source`` (the FP8 copy)."""
    transport: Transport = field(default_factory=Tensors)
    """How the weights reach the servers."""
    settings: FleetSettings = field(default_factory=FleetSettings)
    tell: Callable[[str], None] = print
    """Gets a line for every restart and warning."""

    def __post_init__(self) -> None:
        if self.source is None and self.specs:
            self.source = Path(self.specs[0].model_path)
        if self.source is None:
            raise ConfigError("a fleet of servers given by URL needs source, a checkpoint folder of their model")
        servers = [(url, None) for url in self.urls] + [(server.url, server) for server in map(Server, self.specs)]
        needs = self.tp, self.api_key, self.routes, self.nucleus, self.source
        self.members = [Member(url, server, *needs, self.tell) for url, server in servers]
        self.state = FleetState(self.settings, lambda: self._prompt)
        self.keepers = [Keeper(member, self.state) for member in self.members]
        self._participants = Participants(self.members, self.transport.shares_gpu, self.tell)
        self.failure: Exception | None = None
        """Why no server answered at the start."""

    def start(self, *, is_only: bool = True) -> list[str]:
        """Start the servers, wait until each server answers or has failed, and return all URLs; keepers await the
        failed.

        ConfigError if megarl cannot use a server; RolloutError if another thread calls ``close``, or if no server
        answers. is_only: False if the run has further servers; the last error is then in ``failure`` instead.
        """
        threads = ThreadPoolExecutor(len(self.members))
        try:
            failures = list(threads.map(self._start_member, self.members))
            self.failure = failures[0] if all(failures) else None
            for failure in filter(None, failures):
                if isinstance(failure, ConfigError) or self.state.ended.is_set() or (self.failure and is_only):
                    raise failure
        except BaseException:
            self.close()
            raise
        finally:
            threads.shutdown()
        for member, failure in zip(self.members, failures, strict=True):
            if failure is not None:
                member.last_failure = str(failure)
                self.tell(f"warning: the run begins without {member.url}, and takes it in when it answers: {failure}")
        for keeper in self.keepers:
            keeper.start()
        return [member.url for member in self.members]

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> dict[str, float]:
        """Give all servers new weights in this form. Sending a bucket overlaps with making the next bucket.

        Returns the seconds of the phases "gather", "quantise" and "send", and the "hidden" seconds of sending.
        WeightSyncError if a server refuses the weights, or if ``tensors`` are not the checkpoint's. An absent or lost
        server gets the weights when it is back.
        """
        started, line = time.perf_counter(), Line()
        intake, participants = Intake.for_servers(self._shapes, version, form), self._participants
        delivery = Delivery(participants, line)
        buckets = self.transport.stream(intake, tensors, delivery)
        self.state.no_starts.clear()
        try:
            with self._pause_keepers():
                participants.each_member(lambda member: member.sender.take_memory("weights"), participants.resting)
                participants.each(lambda sender: sender.begin())
                delivery.folder = self._new_folder(version)
                copy = self._deliver(buckets, delivery)
                sums = intake.sums()
                participants.each(lambda sender: sender.finish(version))
                last = Update(version, copy, self._compare_checksums(), sums)
                participants.each_member(lambda member: member.sender.take_memory("kv_cache"), participants.resting)
                participants.resting = ()
                participants.each(lambda sender: sender.resume())
                participants.each_member(lambda member: member.settle(last, self._prompt))
                participants.raise_refusals()
                self.state.last = last
        except MegarlError as error:
            with suppress(MegarlError):
                buckets.throw(error)  # tells ranks with shared memory of the failure
            raise
        finally:
            self.state.updating.clear()
        gather, making = intake.gathering.seconds, intake.making.seconds
        send = time.perf_counter() - started - making
        return {"gather": gather, "quantise": making - gather, "send": send, "hidden": line.busy_s - line.awaited_s}

    def prove(self) -> bool:
        """Ask all servers whether they have the weights of the last update; no rank may sample meanwhile.

        Returns whether foreign code has changed the weights of a server. All servers then have the right weights again,
        but responses since the update are wrong.
        """
        last, changed = self.state.last, list[Keeper]()

        def ask(member: Member) -> None:
            if member.proof is not None and (change := member.proof.find_change(member.sender)) is not None:
                self.tell(
                    f"{member.url} does not compute with the weights that it was sent: {change}. Somebody else has "
                    "changed them: what it has sampled since is dropped, and it gets the weights again. Give the "
                    "servers an API key that only this run knows (sglang.api_key_env)"
                )
                changed.append(self.keepers[self.members.index(member)])

        with self._participants.take(lambda member: member.ready and member.holds is last is not None):
            self._participants.each_member(ask)
            self._participants.raise_refusals()
            with ThreadPoolExecutor(len(changed) or 1) as threads:
                list(threads.map(Keeper.send_copy, changed))
        return bool(changed)

    def rest(self) -> None:
        """Have all servers free their memory until the next update; servers that start or die come back after the
        update."""
        self.state.no_starts.set()
        with self._pause_keepers():  # until the update: resting servers fail health checks, and have no weights
            self._participants.each(lambda sender: sender.release_memory())
            self._participants.raise_refusals()
            self._participants.resting = [*self._participants.present]
            for member in self.members:
                if member.process is not None and member not in self._participants.resting:
                    member.process.kill()

    def close(self) -> None:
        """Stop the servers with a process here, and wait until the processes are gone."""
        self.state.last = None
        self.state.ended.set()
        self.state.no_starts.set()
        self._stop()  # unblocks the keepers
        for keeper in filter(Keeper.is_alive, self.keepers):
            keeper.join(None if keeper.member.process is not None else CLOSE_S)
        self._stop()  # servers that keepers have started meanwhile
        for member in self.members:
            if member.connection is not None:
                member.connection.close()

    def _start_member(self, member: Member) -> MegarlError | OSError | None:
        """Return why the server does not answer; None: the server answers."""
        try:
            if member.process is not None:
                member.process.start()
                member.process.wait_ready(self.settings.start_deadline_s, self.state.no_starts)
            member.connect()
        except (MegarlError, OSError) as error:
            member.leave()
            if member.process is not None:
                member.process.kill()
            return error
        member.ready = True
        return None

    def _stop(self) -> None:
        for member in self.members:
            if member.process is not None:
                member.process.stop()

    # An update

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        assert self.source is not None
        return checkpoint_shapes(self.source)

    @cached_property
    def _prompt(self) -> list[int]:
        assert self.source is not None
        return make_prompt(read_json(self.source / "config.json"))

    @contextmanager
    def _pause_keepers(self) -> Iterator[None]:
        """Take all servers that answer from the keepers; without weights to send, keepers stop soon."""
        last, self.state.last = self.state.last, None
        loads_folder = last is not None and isinstance(last.copy, Path)
        del last  # the next copy needs the memory
        self.state.updating.set()
        with self._participants.take(lambda member: member.ready, 0.0 if loads_folder else YIELD_S):
            for member in self.members:
                member.holds = None
            yield

    def _new_folder(self, version: int) -> WeightFolder | None:
        """Return the folder for the copy of an update, if the copy is kept on disk."""
        place = self.settings.copies
        assert self.source is not None
        return WeightFolder(place, self.served or self.source, version) if isinstance(place, Path) else None

    def _deliver(self, buckets: Buckets, delivery: Delivery) -> list[Bucket] | Path | None:
        """Send every bucket to all servers; return the kept copy of the weights."""
        folder, copies = delivery.folder, list[Bucket]()

        def pass_on(bucket: Bucket) -> None:
            if folder is not None:
                folder.add(bucket)
            elif self.settings.copies == "memory":
                copies.append(bucket.spare())
            self.transport.send(bucket, delivery)

        with delivery.line:
            for bucket in buckets:
                if bucket is not None:
                    delivery.line.put(partial(pass_on, bucket))
            delivery.line.wait()
        if folder is not None:
            return folder.finish()
        return copies if self.settings.copies == "memory" else None

    def _compare_checksums(self) -> Checksums | None:
        """Return the checksums of all servers, None unless compared; WeightSyncError if two servers differ."""
        by_url: dict[str, Checksums] = {}
        if self.settings.checksums:
            self._participants.each(lambda sender: by_url.update({sender.url: sender.checksums()}))
        present = self._participants.present if by_url else ()
        first = next((by_url[member.url] for member in present), None)
        for member in present if first else ():
            member.compare_checksums(by_url[member.url], first or [])
        return first
