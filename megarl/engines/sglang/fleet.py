"""The servers of an engine: joint start, updates, and proof of the weights in use.

- **start** starts the servers and waits until every server answers or has failed.
- **update** sends new weights to all servers that answer, at once, and keeps a copy.
- **prove** asks all servers whether they still have the weights of the update, by their checksums.
- **a keeper** per server restarts a dead server, and sends the copy.

An absent server delays nothing: an update includes only the servers that answer.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megarl.engines.sglang.member import FleetState, Member, Update, find_changes
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.folder import WeightFolder
from megarl.engines.sglang.transports.protocol import Buckets, Delivery, Tensors, Transport
from megarl.engines.sglang.transports.sender import Checksums, GoneError, HangError, in_thread
from megarl.engines.weights import Bucket, Intake, Named, WeightForm, checkpoint_shapes
from megarl.errors import ConfigError, MegarlError, WeightSyncError, refusal

YIELD_S = 5.0
"""How long an update waits for a keeper that sends a bucket of the copy; then the update continues without the
server."""
CLOSE_S = 10.0
"""How long ``close`` waits for a keeper that talks to a server at a URL."""


@dataclass
class Fleet(FleetState):
    """Servers with a process here (``specs``), or running elsewhere (``urls``)."""

    specs: Sequence[ServerSpec] = ()
    urls: Sequence[str] = ()
    served: Path | None = None
    """Model folder given to the servers when it differs from ``source`` (the FP8 copy)."""
    transport: Transport = field(default_factory=Tensors)
    """How the weights reach the servers."""

    def __post_init__(self) -> None:
        if self.source is None and self.specs:
            self.source = Path(self.specs[0].model_path)
        if self.source is None:
            raise ConfigError("a fleet of servers given by URL needs source, a checkpoint folder of their model")
        processes = [Server(spec) for spec in self.specs]
        self.members = [Member(url, None, self) for url in self.urls]
        self.members += [Member(process.url, process, self) for process in processes]
        self.failure: Exception | None = None
        """Why no server answered at the start."""
        self.present: list[Member] = []
        """The servers in an operation, whose locks the fleet holds: no keeper talks to the servers."""
        self._resting: Collection[Member] = ()
        """Servers without memory, since a rest."""
        self._compared: tuple[int, Checksums] | None = None
        """Sum of the bytes of the last weights, and their checksums on the servers."""

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
                if isinstance(failure, ConfigError) or self.ended.is_set() or (self.failure and is_only):
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
        for member in self.members:
            member.keeper.start()
        return [member.url for member in self.members]

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> None:
        """Give all servers new weights in this form. Sending a bucket overlaps with making the next bucket.

        WeightSyncError if a server refuses the weights, or if ``tensors`` are not the checkpoint's. An absent or lost
        server gets the weights when it is back.
        """
        assert self.source is not None
        intake = Intake.for_servers(checkpoint_shapes(self.source), version, form)
        delivery = Delivery(self)
        if self.settings.deltas and self.last is not None and not isinstance(self.last.copy, Path):
            delivery.base.extend(self.last.copy or ())
        buckets = self.transport.stream(intake, tensors, delivery)
        self.no_starts.clear()
        try:
            with self._pause_keepers():
                self.each(lambda member: member.sender.take_memory("weights"), self._resting)
                self.each(Member.begin)
                if isinstance(place := self.copies, Path) and (model := self.served or self.source):
                    delivery.folder = WeightFolder(place, model, version)
                copy, total = self._deliver(buckets, delivery)
                self.each(lambda member: member.sender.finish(version))
                last = Update(version, copy, self._compare_checksums(version, total))
                self.each(lambda member: member.sender.take_memory("kv_cache"), self._resting)
                self._resting = ()
                self.each(lambda member: member.sender.resume())
                self.each(lambda member: member.settle(last))
                self.last = last
        except MegarlError as error:
            with suppress(MegarlError):
                buckets.throw(error)  # tells ranks with shared memory of the failure
            raise
        finally:
            self.updating.clear()

    def prove(self) -> bool:
        """Compare the checksums of all servers with those of the last update, if the update compared checksums.

        Returns whether foreign code has changed the weights of a server. All servers then have the right weights again,
        but responses since the update are wrong. No rank may sample meanwhile.
        """
        last, changed = self.last, list[Member]()
        if last is None or (expected := last.checksums) is None:
            return False

        def ask(member: Member) -> None:
            if names := find_changes(member.sender.checksums(), expected):
                self.tell(refusal("weights_of_others", url=member.url, num=len(names), first=names[0]))
                changed.append(member)

        with self._take(lambda member: member.ready and member.holds is last is not None):
            self.each(ask)
            with ThreadPoolExecutor(len(changed) or 1) as threads:
                list(threads.map(Member.send_copy, changed))
        return bool(changed)

    def rest(self) -> None:
        """Have all servers free their memory until the next update; servers that start or die come back after the
        update."""
        self.no_starts.set()
        with self._pause_keepers():  # until the update: resting servers fail health checks, and have no weights
            self.each(lambda member: member.sender.release_memory())
            self._resting = [*self.present]
            for member in self.members:
                if member.process is not None and member not in self._resting:
                    member.process.kill()

    def close(self) -> None:
        """Stop the servers with a process here, and wait until the processes are gone."""
        self.last = None
        self.ended.set()
        self.no_starts.set()
        self._stop()  # unblocks the keepers
        for member in self.members:
            if member.keeper.is_alive():
                member.keeper.join(None if member.process is not None else CLOSE_S)
        self._stop()  # servers that keepers have started meanwhile
        for member in self.members:
            if member.connection is not None:
                member.connection.close()

    def _start_member(self, member: Member) -> MegarlError | OSError | None:
        """Return why the server does not answer; None: the server answers."""
        try:
            if member.process is not None:
                member.process.start()
                member.process.wait_ready(self.settings.start_deadline_s, self.no_starts)
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

    @contextmanager
    def _pause_keepers(self) -> Iterator[None]:
        """Take all servers that answer from the keepers; without weights to send, keepers stop soon."""
        last, self.last = self.last, None
        loads_folder = last is not None and isinstance(last.copy, Path)
        del last  # the next copy needs the memory
        self.updating.set()
        with self._take(lambda member: member.ready, 0.0 if loads_folder else YIELD_S):
            for member in self.members:
                member.holds = None
            yield

    def _deliver(self, buckets: Buckets, delivery: Delivery) -> tuple[list[Bucket] | Path | None, int]:
        """Send every bucket to all servers; return the kept copy of the weights, and the sum of their bytes."""
        folder, copies, sums = delivery.folder, list[Bucket](), list[int]()

        def pass_on(bucket: Bucket) -> None:
            if folder is not None:
                folder.add(bucket)
            elif self.copies == "memory":
                copies.append(bucket.spare())
            sums.append(bucket.sum_bytes() if self.settings.checksums else 0)
            self.transport.send(bucket, delivery)

        with delivery.line:
            for bucket in buckets:
                if bucket is not None:
                    delivery.put(partial(pass_on, bucket))
            delivery.wait()
        if folder is not None:
            return folder.finish(), sum(sums)
        return copies if self.copies == "memory" else None, sum(sums)

    def _compare_checksums(self, version: int, total: int) -> Checksums | None:
        """Return the checksums of all servers, None unless compared; WeightSyncError if two servers differ, or if all
        are as before although other weights were sent. total: sum of the bytes that were sent."""
        by_url: dict[str, Checksums] = {}
        if self.settings.checksums:
            self.each(lambda member: by_url.update({member.url: member.sender.checksums()}))
        present = self.present
        if not by_url or not present:
            return None
        first = by_url[present[0].url]
        for member in present:
            member.compare_checksums(by_url[member.url], first)
        before, self._compared = self._compared, (total, first)
        if before is not None and before[0] != total and before[1] == first:
            self._compared = before  # for the next attempt
            raise WeightSyncError(refusal("update_not_made", url=present[0].url, version=version))
        return first

    # The servers in an operation: an update, a proof, or a rest

    @contextmanager
    def _take(self, is_wanted: Callable[[Member], bool], wait_s: float = 0.0) -> Iterator[None]:
        """Hold the locks of wanted members, except where a keeper keeps the lock for longer than ``wait_s``."""
        until = time.monotonic() + wait_s
        try:
            for member in self.members:
                while is_wanted(member) and member not in self.present:
                    if member.lock.acquire(timeout=0.05):
                        self.present.append(member)
                    elif time.monotonic() > until:
                        break
            for member in [member for member in self.present if not is_wanted(member)]:  # lost by the keeper meanwhile
                self.present.remove(member)
                member.lock.release()
            yield
        finally:
            while self.present:
                self.present.pop().lock.release()

    def each(
        self, step: Callable[[Member], object], among: Collection[Member] | None = None, *, daemon: bool = True
    ) -> list[Member]:
        """Run a step for all present members at once; return the members that have done the step.

        The remaining members leave: they hang, or have gone. WeightSyncError if a member refuses the step. daemon:
        False for a step inside torch, which must not end with the process.
        """
        members = [member for member in self.present if among is None or member in among]
        steps = {member: in_thread(partial(step, member), daemon) for member in members}
        for member, running in steps.items():
            error = running.exception()
            if isinstance(error, HangError | GoneError):
                self.present.remove(member)
                member.leave_update(error)
        for member in self.present:
            if member in steps and (fault := steps[member].exception()) is not None:
                raise fault
        return [member for member in steps if member in self.present]
