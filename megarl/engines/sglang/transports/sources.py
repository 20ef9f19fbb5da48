"""Several ranks that send the weights, each its part, in broadcasts of its own to the same servers.

Servers that take two broadcasts in different orders would wait for ever. So one rank, the first source, talks to the
servers about all else, and gives the others their turns:

    first source    make a bucket   send it   <- ready, your turn ->           <- sent   ...
    another one     make a bucket                                    send it             ...

Each makes its next bucket meanwhile. A turn depends on the servers alone: the next bucket of one source may need
tensors of the rank that another one is on. At its end a source says what it has sent in all, or what is wrong. When an
update has failed, the first one answers that instead of giving turns.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megarl.engines.buckets import Bucket, Intake, Part, Staging
from megarl.engines.sglang.transports.deadlines import HangError, await_most
from megarl.engines.sglang.transports.line import Line
from megarl.engines.sglang.transports.process_group import in_thread, own_address
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.sglang.versions import Version
from megarl.engines.weights import Named, WeightForm, checkpoint_shapes
from megarl.errors import WeightSyncError
from megarl.models.hf_files import bucket_bytes


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a bucket."""

    failures: Mapping[str, WeightSyncError] = field(default_factory=dict)
    """By URL, of servers that have not received it."""
    common: str = ""
    """Why a broadcast to all failed, before each server got it by itself."""


def broadcast_to(senders: Sequence[WeightSender], bucket: Bucket, apart: bool) -> Sent:
    """Send a bucket once, through one group of all servers, or through a group for each of them.

    One server that does not receive it spoils the former for all, and nobody knows which one that was. The latter,
    which is tried then, or at once if they are to be kept ``apart``, fails for that server alone.
    """
    common = ""
    if not apart and len(senders) > 1 and len({own_address(sender.url) for sender in senders}) == 1:
        try:
            senders[0].broadcast(bucket, senders[1:])
        except WeightSyncError as error:
            common = str(error)
        else:
            return Sent()
    failures = dict[str, WeightSyncError]()
    steps = {sender.url: in_thread(partial(sender.broadcast, bucket), daemon=False) for sender in senders}
    await_most(steps.values())
    for url, step in steps.items():
        error = step.exception() if step.done() else HangError(f"{url} is late")
        if isinstance(error, WeightSyncError):
            failures[url] = error
        elif error is not None:
            raise error
    return Sent(failures, common)


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as another source must know it."""

    url: str
    release: Version
    tp: int
    life: str
    """Changes when the server is started anew, and is in no group."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a source sends its bucket."""

    targets: Sequence[Target]
    apart: bool


_READY = "ready"


def _nobody(*_: object) -> Any:
    raise AssertionError("there is no other source")


@dataclass(eq=False)
class OtherSources:
    """The other sources, seen from the first one; by default there are none."""

    ranks: Sequence[int] = ()
    tell: Callable[[object, int], None] = _nobody
    """Sends an object to a rank."""
    hear: Callable[[int], Any] = _nobody
    """Returns what a rank sends; must raise if it is gone."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by who sends a bucket."""
    parts: list[Part] = field(default_factory=list)
    """What sources have sent that have sent all."""
    _served: list[Future[None]] = field(default_factory=list)
    _failure: Exception | None = None
    _make: Callable[[], Turn] = _nobody
    _note: Callable[[Sent], None] = _nobody

    def begin(self) -> None:
        """Begin an update; the others wait for their turns."""
        wait(self._served)
        self.turn.acquire()
        self.parts, self._failure = [], None
        self._served = [in_thread(partial(self._serve, rank)) for rank in self.ranks]

    @contextmanager
    def giving_turns(self, make: Callable[[], Turn], note: Callable[[Sent], None]) -> Iterator[None]:
        """Inside, each source sends when it has a bucket, to where ``make`` says; ``note`` gets what became of it."""
        self._make, self._note = make, note
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def check(self) -> None:
        """Raises the error of a source that has failed, or of its turn."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until all have sent all; raises the error of one that fails."""
        wait(self._served)
        self.check()

    def end(self) -> None:
        """End an update; those that have more are told that it has failed."""
        self._failure = self._failure or WeightSyncError("the update has ended")
        self.turn.release()

    def _serve(self, rank: int) -> None:
        """Give a source its turns until it has sent all; after a failure it is told so instead.

        It must be heard to its end, because it waits for that.
        """
        try:
            while (said := self.hear(rank)) == _READY:
                with self.turn:
                    turn = self._attempt(self._make)
                    self.tell(turn, rank)
                    if turn is None:
                        return
                    self._attempt(self._note, self.hear(rank))
        except Exception as error:  # of the collective call: the rank is gone
            self._failure = self._failure or error
            return
        if isinstance(said, WeightSyncError):
            said.second_hand = True
            self._failure = self._failure or said
        else:
            self.parts.append(said)

    def _attempt(self, step: Callable[..., Any], *given: Any) -> Any:
        """What a step returns; None if it fails, or if anything has."""
        if self._failure is None:
            try:
                return step(*given)
            except Exception as error:
                self._failure = error
        return None


class _StoppedError(WeightSyncError):
    second_hand = True


@dataclass(eq=False)
class Source:
    """A source that is not the first one."""

    tell: Callable[[object], None]
    """Sends an object to the first one."""
    hear: Callable[[], Any]
    """Returns what the first one sends; must raise if it is gone."""
    source: Path
    """Checkpoint folder with the model's config."""
    bucket_bytes: int
    api_key: str | None = None
    _senders: dict[str, tuple[Target, WeightSender]] = field(default_factory=dict)

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> dict[str, float]:
        """Sends its part in an update of the first source; WeightSyncError if it fails here or there."""
        line = Line()
        try:
            most = bucket_bytes(sum(map(math.prod, self._shapes.values())), self.bucket_bytes)
            intake = Intake(self._shapes, version, form, most, Staging(most), of_several=True)
            with line:
                for bucket in intake.buckets(tensors):
                    line.put(partial(self._send, bucket))
                line.wait()
            part = intake.part()
        except _StoppedError:
            raise
        except WeightSyncError as error:
            line.wait()  # perhaps stopped meanwhile
            self.tell(WeightSyncError(str(error)))
            raise
        self.tell(part)
        return {}

    def close(self) -> None:
        """Leave the groups with the servers."""
        while self._senders:
            self._senders.popitem()[1][1].close()

    def _send(self, bucket: Bucket) -> None:
        turn = self._await_turn()
        try:
            sent = broadcast_to([self._sender(target) for target in turn.targets], bucket, turn.apart)
        except WeightSyncError as error:  # of its own network: no route to a server
            sent = Sent(dict.fromkeys((target.url for target in turn.targets), error))
        self.tell(Sent({url: _portable(error) for url, error in sent.failures.items()}, sent.common))

    def _await_turn(self) -> Turn:
        self.tell(_READY)
        turn = self.hear()
        if turn is None:
            raise _StoppedError("the weight update failed at its first source, whose message says why")
        return turn

    def _sender(self, target: Target) -> WeightSender:
        known, sender = self._senders.get(target.url, (None, None))
        if sender is None or known != target:
            if sender is not None:
                sender.close()
            sender = WeightSender(target.url, target.release, tp=target.tp, api_key=self.api_key, in_session=True)
            self._senders[target.url] = target, sender
        return sender

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return checkpoint_shapes(self.source)


def _portable(error: WeightSyncError) -> WeightSyncError:
    """The error without its cause, which does not survive a pickle."""
    return type(error)(str(error))
