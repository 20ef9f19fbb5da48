"""The servers of an engine: started, updated together, and proved to compute with the weights that they were sent.

- **start** starts the servers and waits until each one answers or has failed.
- **update** sends new weights to all that answer, at once, and keeps a copy of them.
- **prove** asks all whether they still have these weights.
- **a keeper** for each server restarts it when it dies, and sends it the copy.

A server that is away keeps no other one waiting: an update takes along those that answer.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from megarl.engines.buckets import Bucket, Intake, Staging
from megarl.engines.sglang.keeper import FleetSettings, FleetState, Keeper
from megarl.engines.sglang.member import Member, Update
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.deadlines import GoneError, HangError, await_most
from megarl.engines.sglang.transports.folder import WeightFolder
from megarl.engines.sglang.transports.ipc import CPU, Exchange, empty_shared
from megarl.engines.sglang.transports.line import Line
from megarl.engines.sglang.transports.payload import Handle, payload_of
from megarl.engines.sglang.transports.process_group import in_thread
from megarl.engines.sglang.transports.proof import Checksums, make_prompt
from megarl.engines.sglang.transports.sources import OtherSources, Sent, Target, Turn, broadcast_to
from megarl.engines.weights import Named, WeightForm, checkpoint_shapes
from megarl.errors import ConfigError, MegarlError, WeightSyncError
from megarl.models.hf_files import bucket_bytes
from megarl.models.hf_folder import read_json

BUCKET_BYTES = 256 << 20
YIELD_S = 5.0
"""How long an update waits for a keeper that sends a bucket of the copy; then it goes on without that server."""
CLOSE_S = 10.0
"""How long ``close`` waits for a keeper that talks to a server of somebody else."""


@dataclass
class Fleet:
    """Servers that are started here (``specs``), or that run already (``urls``)."""

    specs: Sequence[ServerSpec] = ()
    urls: Sequence[str] = ()
    tp: int = 1
    """Tensor-parallel size of each server."""
    api_key: str | None = None
    routes: bool = True
    """Whether the servers must return routes."""
    nucleus: bool = False
    """Whether they are to draw with top_p below 1."""
    folder: Path | None = None
    """Weights go through a folder below this one, which all servers can read; None: over the network."""
    broadcast: bool = False
    """Over the network: through process groups with the servers; False: as tensors over HTTP."""
    others: OtherSources = field(default_factory=OtherSources)
    """Sources of broadcasts beside this rank, each of a part of the weights. No copy is kept then."""
    exchange: Exchange | None = None
    """Through memory of this machine that the servers open, instead."""
    checksums: bool = False
    """Whether the servers' own checksums of their weights are compared after every update, and in every proof."""
    keeps_copy: bool = True
    """Whether restarted servers get a copy of the weights; else the next update takes them along."""
    spare: Path | None = None
    """Folder for this copy; None: in memory."""
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
        servers = [(url, None) for url in self.urls] + [(server.url, server) for server in map(Server, self.specs)]
        needs = self.tp, self.api_key, self.routes, self.nucleus, self.source
        self._members = [Member(url, server, *needs, self.tell) for url, server in servers]
        self._state = FleetState(self.settings, lambda: self._prompt)
        self._keepers = [Keeper(member, self._state) for member in self._members]
        self._taken: list[Member] = []
        """The members whose locks this fleet holds: those of the update in progress."""
        self._resting: list[Member] = []
        self._refusals: list[Callable[[], None]] = []
        """Of the update in progress: each waits for the end of a server that refused a step, or raises the refusal."""
        self._apart = False
        """Whether each server gets the rest of the update through a group of its own."""
        self.failure: Exception | None = None
        """Why no server answered at the start."""

    def start(self, *, alone: bool = True) -> list[str]:
        """Start the servers, wait until each one answers or has failed, and return all URLs; keepers await the failed.

        ConfigError if megarl cannot use one; RolloutError if another thread calls ``close``, or if none answers. The
        last is raised without other servers than these (``alone``), else it is in ``failure``.
        """
        threads = ThreadPoolExecutor(len(self._members))
        try:
            failures = list(threads.map(self._start_member, self._members))
            self.failure = failures[0] if all(failures) else None
            for failure in filter(None, failures):
                if isinstance(failure, ConfigError) or self._state.ended.is_set() or (self.failure and alone):
                    raise failure
        except BaseException:
            self.close()
            raise
        finally:
            threads.shutdown()
        for member, failure in zip(self._members, failures, strict=True):
            if failure is not None:
                member.said = str(failure)
                self.tell(f"warning: the run begins without {member.url}, and takes it in when it answers: {failure}")
        for keeper in self._keepers:
            keeper.start()
        return [member.url for member in self._members]

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> dict[str, float]:
        """Give all servers new weights in this form, each bucket while the next one is made.

        Returns the seconds that "gather", "quantise" and "send" took of the whole, and those of sending that were
        "hidden". WeightSyncError if a server refuses them, or if ``tensors`` are not those of the checkpoint. A server
        that is away, or is lost during the update, gets them when it is back.
        """
        started, sending = time.perf_counter(), Line()
        most = bucket_bytes(sum(map(math.prod, self._shapes.values())), BUCKET_BYTES)
        most = most if self.exchange is None else self.exchange.fit(most)
        staging = Staging(most, empty_shared) if self.exchange is not None else Staging(most)
        intake = Intake(self._shapes, version, form, most, staging, of_several=bool(self.others.ranks))
        rounds = self._rounds(intake.buckets(tensors), sending)
        self._state.no_starts.clear()
        self._apart = False
        self._refusals.clear()
        self.others.begin()
        try:
            with self._pause_keepers():
                self._each(lambda member: member.sender.take_memory("weights"), self._resting)
                self._each(lambda member: member.sender.begin())
                copy = self._deliver(rounds, version, sending)
                sums = intake.join(self.others.parts)
                self._each(lambda member: member.sender.finish(version))
                last = Update(version, copy, self._compare_checksums(), sums)
                self._each(lambda member: member.sender.take_memory("kv_cache"), self._resting)
                self._resting = []
                self._each(lambda member: member.sender.resume())
                self._each(lambda member: member.settle(last, self._prompt))
                self._raise_refusals()
                self._state.last = last
        except MegarlError as error:
            if self.exchange is not None:
                self.exchange.fail(error, rounds)
            raise
        finally:
            self._state.updating.clear()
            self.others.end()
        gather, made = intake.gathering.seconds, intake.making.seconds
        send = time.perf_counter() - started - made
        return {"gather": gather, "quantise": made - gather, "send": send, "hidden": sending.busy_s - sending.awaited_s}

    def prove(self) -> bool:
        """Ask all servers whether they have the weights of the last update; nothing may be sampled meanwhile.

        Returns whether somebody else has changed some. They have the right ones again then, but what they have sampled
        since the update is wrong.
        """
        last, changed = self._state.last, list[Keeper]()

        def ask(member: Member) -> None:
            if member.proof is not None and (change := member.proof.find_change(member.sender)) is not None:
                self.tell(
                    f"{member.url} does not compute with the weights that it was sent: {change}. Somebody else has "
                    "changed them: what it has sampled since is dropped, and it gets the weights again. Give the "
                    "servers an API key that only this run knows (sglang.api_key_env)"
                )
                changed.append(self._keepers[self._members.index(member)])

        with self._take(lambda member: member.ready and member.holds is last is not None):
            self._each(ask)
            self._raise_refusals()
            with ThreadPoolExecutor(len(changed) or 1) as threads:
                list(threads.map(Keeper.send_copy, changed))
        return bool(changed)

    def rest(self) -> None:
        """Have all servers free their memory until the next update; those that start or die come back after it."""
        self._state.no_starts.set()
        with self._pause_keepers():  # until the update: resting servers fail health checks, and there are no weights
            self._each(lambda member: member.sender.release_memory())
            self._raise_refusals()
            self._resting = [*self._taken]
            for member in self._members:
                if member.process is not None and member not in self._resting:
                    member.process.kill()

    def close(self) -> None:
        """Stop the servers that were started here, and wait until their processes are gone."""
        self._state.last = None
        self._state.ended.set()
        self._state.no_starts.set()
        self._stop()  # what the keepers wait for
        for keeper in filter(Keeper.is_alive, self._keepers):
            keeper.join(None if keeper.member.process is not None else CLOSE_S)
        self._stop()  # what they have started meanwhile
        for member in self._members:
            if member.connection is not None:
                member.connection.close()

    def _start_member(self, member: Member) -> MegarlError | OSError | None:
        """Returns why the server does not answer, None if it does."""
        try:
            if member.process is not None:
                member.process.start()
                member.process.wait_ready(self.settings.start_deadline_s, self._state.no_starts)
            member.connect()
        except (MegarlError, OSError) as error:
            member.leave()
            if member.process is not None:
                member.process.kill()
            return error
        member.ready = True
        return None

    def _stop(self) -> None:
        for member in self._members:
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
        """Take all servers that answer from their keepers; without weights to send, these stop soon."""
        last, self._state.last = self._state.last, None
        loads_folder = last is not None and isinstance(last.copy, Path)
        del last  # the copy's memory is needed for the next one
        self._state.updating.set()
        with self._take(lambda member: member.ready, 0.0 if loads_folder else YIELD_S):
            for member in self._members:
                member.holds = None
            yield

    @contextmanager
    def _take(self, wanted: Callable[[Member], bool], wait_s: float = 0.0) -> Iterator[None]:
        """Hold the locks of these members, without those whose keepers do not give them up in time."""
        until = time.monotonic() + wait_s
        try:
            for member in self._members:
                while wanted(member) and member not in self._taken:
                    if member.lock.acquire(timeout=0.05):
                        self._taken.append(member)
                    elif time.monotonic() > until:
                        break
            for member in [member for member in self._taken if not wanted(member)]:  # lost by their keepers meanwhile
                self._drop(member)
            yield
        finally:
            while self._taken:
                self._taken.pop().lock.release()

    def _each(self, step: Callable[[Member], object], among: Sequence[Member] | None = None) -> list[Member]:
        """Run a step on all members of the update at the same time, and return those that have done it.

        The others leave the update: those that are late, hang, have gone, or refuse (``_raise_refusals``).
        """
        steps = {member: in_thread(partial(step, member)) for member in self._taken if among is None or member in among}
        await_most(steps.values(), max((member.leniency for member in steps), default=1))
        shares_gpu = self.exchange is not None and self.exchange.gpu != CPU
        for member, running in steps.items():
            is_late = not running.done()
            error = None if is_late else running.exception()
            if error is not None and not isinstance(error, WeightSyncError):
                raise error
            if is_late or isinstance(error, HangError | GoneError):
                self._taken.remove(member)
                member.leave_update(error, must_end=shares_gpu or bool(self._resting))
            elif error is not None:
                self._refusals.append(partial(member.await_death, error, time.monotonic(), member.restarts))
                self._drop(member)  # its keeper need not wait for the end of the update
        if not self._taken:
            self._raise_refusals()
        return [member for member in steps if member in self._taken]

    def _raise_refusals(self) -> None:
        """Raise the first refusal of a server that lives; one that was dying has gone by now, or soon."""
        while self._refusals:
            self._refusals.pop(0)()

    def _drop(self, member: Member) -> None:
        self._taken.remove(member)
        member.lock.release()

    def _rounds(self, buckets: Iterator[Bucket], sending: Line) -> Iterator[tuple[Bucket, dict[int, Handle]]]:
        """Yields the buckets, each with the handles of its memory by GPU if the servers open it."""
        if self.exchange is None:
            return ((bucket, {}) for bucket in buckets)
        self.exchange.settle = sending.wait
        return self.exchange.rounds(buckets)

    def _deliver(
        self, rounds: Iterable[tuple[Bucket, dict[int, Handle]]], version: int, sending: Line
    ) -> list[Bucket] | Path | None:
        """Send every bucket to all; returns a copy of them if one is kept, or the folder that holds them."""
        assert self.source is not None
        place = self.folder or self.spare
        folder = WeightFolder(place, self.served or self.source, version) if place else None
        copies: list[Bucket] = []

        def pass_on(bucket: Bucket, handles: dict[int, Handle]) -> None:
            if folder:
                folder.add(bucket)
            elif self.keeps_copy:
                copies.append(bucket.spare())
            if not self.folder:
                self.others.check()
                with self.others.turn:
                    self._send(bucket, handles)

        with self.others.giving_turns(self._make_turn, self._note):
            with sending:
                for bucket, handles in rounds:
                    sending.put(partial(pass_on, bucket, handles))
                sending.wait()
            self.others.wait()
        if folder is None:
            return copies if self.keeps_copy else None
        path = folder.finish().absolute()
        if self.folder:
            self._each(lambda member: member.sender.load_from_disk(str(path)))
        return path

    def _send(self, bucket: Bucket, handles: Mapping[int, Handle]) -> None:
        """Send a bucket to all servers."""
        exchange = self.exchange
        if exchange is not None:
            for member in self._each(lambda member: member.sender.share(bucket, [handles[g] for g in member.gpus])):
                exchange.taken.update(member.gpus)
        elif self.broadcast:
            self._note(broadcast_to([member.sender for member in self._taken], bucket, self._apart))
        else:
            payload = payload_of(bucket)
            self._each(lambda member: member.sender.send(bucket, payload))

    def _make_turn(self) -> Turn:
        """Where another source sends its next bucket."""
        self._each(lambda member: member.sender.open_session())
        senders = [member.sender for member in self._taken]
        targets = [Target(sender.url, sender.release, sender.tp, sender.life) for sender in senders]
        return Turn(targets, self._apart)

    def _note(self, sent: Sent) -> None:
        """Go on without the servers that are lost; after a failed broadcast to all, each gets the rest by itself."""
        if sent.common:
            self._apart = True
            self.tell(f"warning: a broadcast of weights to all servers failed, each gets them by itself: {sent.common}")

        def check(member: Member) -> None:
            if (failure := sent.failures.get(member.url)) is not None:
                raise failure

        self._each(check)

    def _compare_checksums(self) -> Checksums | None:
        """Returns the checksums of all servers, None unless wanted; WeightSyncError if those of one are others."""
        found: dict[str, Checksums] = {}
        if self.checksums:
            self._each(lambda member: found.update({member.url: member.sender.checksums()}))
        first = next((found[member.url] for member in self._taken), None) if found else None
        if first:
            for member in self._taken:
                member.compare_checksums(found[member.url], first)
        return first
