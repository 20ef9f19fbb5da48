"""Several ranks that send the weights, each its part, in broadcasts of its own to the same servers.

Servers that take two broadcasts in different orders would wait for ever. So one rank, the first source, talks to the
servers about all else, and tells the others whose turn it is:

    first source    make a bucket   send it   your turn ->         <- sent    make the next one ...
    another one     make a bucket                       -> send it ->         make the next one ...

Each makes its next bucket while others send theirs. In its last turn a source says what it has sent in all, or what is
wrong. The first one ends an update that has failed by telling the others to stop.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx

from megarl.errors import WeightSyncError
from megarl.models.hf_files import bucket_bytes
from megarl.rollout.buckets import Bucket, Intake, Part, Staging
from megarl.rollout.sglang.versions import Version
from megarl.rollout.sglang.weights.line import Line
from megarl.rollout.sglang.weights.process_group import GroupError, own_address
from megarl.rollout.sglang.weights.sender import WeightSender
from megarl.rollout.weights import Named, WeightForm, checkpoint_shapes


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
    failures: dict[str, WeightSyncError] = {}

    def broadcast(sender: WeightSender) -> None:
        try:
            sender.broadcast(bucket)
        except WeightSyncError as error:
            failures[sender.url] = error

    with ThreadPoolExecutor(len(senders) or 1) as threads:
        list(threads.map(broadcast, senders))
    return Sent(failures, common)


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as another source must know it."""

    url: str
    release: Version
    tp: int
    group: str
    """Name of the first source's group with it. A new one: the server was started anew, or is in another company."""


@dataclass(frozen=True, slots=True)
class _Turn:
    targets: Sequence[Target]
    apart: bool


@dataclass(eq=False)
class OtherSources:
    """The other sources, seen from the first one."""

    ranks: Sequence[int]
    tell: Callable[[object, int], None]
    """Sends an object to a rank."""
    hear: Callable[[int], Any]
    """Returns what a rank sends; must raise if it is gone."""
    sending: list[int] = field(default_factory=list)
    """Ranks that have more."""
    parts: list[Part] = field(default_factory=list)

    def begin(self) -> None:
        """Begin an update."""
        self.sending, self.parts = [*self.ranks], []

    def send_next(self, rank: int, targets: Sequence[Target], apart: bool) -> Sent:
        """Have a source send its next bucket to these servers, or say what it has sent in all; else WeightSyncError."""
        self.tell(_Turn(targets, apart), rank)
        answer = self.hear(rank)
        if isinstance(answer, Sent):
            return answer
        self.sending.remove(rank)
        if isinstance(answer, WeightSyncError):
            answer.second_hand = True
            raise answer
        self.parts.append(answer)
        return Sent()

    def stop(self) -> None:
        """Tell those that have more that the update has failed; one that is gone need not hear it."""
        for rank in self.sending:
            with suppress(RuntimeError):
                self.tell(None, rank)
        self.sending = []


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
        most = bucket_bytes(sum(map(math.prod, self._shapes.values())), self.bucket_bytes)
        intake = Intake(self._shapes, version, form, most, Staging(most), of_several=True)
        line = Line()
        try:
            with line:
                for bucket in intake.buckets(tensors):
                    line.put(partial(self._send, bucket))
                line.wait()
            part = intake.part()
        except _StoppedError:
            raise
        except WeightSyncError as error:
            line.wait()  # perhaps stopped meanwhile
            self._await_turn()
            self.tell(WeightSyncError(str(error)))
            raise
        self._await_turn()
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

    def _await_turn(self) -> _Turn:
        turn = self.hear()
        if turn is None:
            raise _StoppedError("the weight update failed at its first source, whose message says why")
        return turn

    def _sender(self, target: Target) -> WeightSender:
        known, sender = self._senders.get(target.url, (None, None))
        if sender is None or known != target:
            if sender is not None:
                sender.close()
            sender = WeightSender(
                target.url, target.release, tp=target.tp, api_key=self.api_key, in_session=True
            )
            self._senders[target.url] = target, sender
        return sender

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return checkpoint_shapes(self.source)


def _portable(error: WeightSyncError) -> WeightSyncError:
    """The error without its cause, which does not survive a pickle; one of a server that hangs stays such a one."""
    hangs = isinstance(error, GroupError) or isinstance(error.__cause__, httpx.TimeoutException)
    return (GroupError if hangs else WeightSyncError)(str(error))
