"""The protocol of a transport, and the transport over HTTP: base64 of the tensors, or of a handle of their memory.

A restarted server gets the kept copy over HTTP, whatever the transport of updates is.
"""

import base64
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megarl.engines.sglang.plugin.deltas import encode, pack
from megarl.engines.sglang.transports.sender import Message, WeightSender, deadline
from megarl.engines.weights import Bucket, Intake, Named

if TYPE_CHECKING:
    from megarl.engines.sglang.fleet import Fleet
    from megarl.engines.sglang.member import Member
    from megarl.engines.sglang.transports.folder import WeightFolder

Buckets = Generator[Bucket | None, None, None]
"""The buckets of an update. An error thrown into the generator ends the update on all ranks."""


@dataclass(slots=True)
class Delivery:
    """One update in progress."""

    receivers: "Fleet"
    """The servers that take part."""
    folder: "WeightFolder | None" = None
    """The copy on disk, or None; complete after all buckets have passed the line."""
    line: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "weight-sending"))
    """Sends one bucket while the next bucket is made."""
    running: Future[None] | None = None
    base: deque[Bucket] = field(default_factory=deque)
    """The buckets of the last update, not yet compared with the new buckets; empty without ``sglang.deltas``."""
    refused: "set[Member]" = field(default_factory=set)
    """Servers that have refused a delta: the rest of the update is whole."""
    is_split: bool = False
    """Whether the rest of a broadcast goes through a group per server."""

    def put(self, step: Callable[[], None]) -> None:
        """Start a step after the previous step has ended; raises the error of the previous step."""
        self.wait()
        self.running = self.line.submit(step)

    def wait(self) -> None:
        """Wait for the running step, if any; raises the error of the step."""
        running, self.running = self.running, None
        if running is not None:
            running.result()


class Transport(Protocol):
    """A way of weights to the servers."""

    def stream(self, intake: Intake, tensors: Iterable[Named], delivery: Delivery | None) -> Buckets:
        """Yield the buckets of an update, in memory for this transport. Runs in the caller's thread."""
        return intake.buckets(tensors)

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Send one bucket to all servers of the update. Runs in the thread of the line."""
        ...


Handle = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments: the call returns a tensor in the process that unpickles the handle."""


class Rebuilt:
    """Is pickled as the result of a handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> Handle:
        return self._handle


def payload_of(bucket: Bucket, flat: torch.Tensor | Rebuilt | None = None) -> str:
    """Base64 of the pickle that ``/update_weights_from_tensor`` takes as a "flattened_bucket".

    flat: rebuilds the bucket's memory, uint8 [bytes], in the server; None: the payload holds the tensors.
    """
    # A copy: pickle would write the whole storage of a slice.
    return base64.b64encode(pack(bucket.places, bucket.on_host().flat.clone() if flat is None else flat)).decode()


def post_payloads(sender: WeightSender, payloads: list[str], num_bytes: int) -> None:
    """Have a server load a bucket; payloads: by tensor-parallel rank."""
    sender.open_session()
    body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
    sender.post("update_weights_from_tensor", body, deadline(num_bytes))


def make_message(bucket: Bucket, base: Bucket | None = None) -> Message:
    """Return a bucket for servers with megarl's plugin. base: the bucket that the servers got last; None: the message
    holds everything."""
    last = base.flat.numpy() if base is not None and base.places == bucket.places else None
    message, receipt = encode(bucket.places, bucket.on_host().flat.numpy(), last)
    return Message(base64.b64encode(message).decode(), receipt, bucket.flat.numel())


def send_tensors(sender: WeightSender, bucket: Bucket, payload: str | None = None) -> None:
    """Send a whole bucket to a server. payload: the bucket's ``payload_of``, if already made."""
    if sender.takes_deltas:
        return sender.load(make_message(bucket))
    payloads = [payload or payload_of(bucket)] * sender.tp
    return post_payloads(sender, payloads, sum(map(len, payloads)))


def send_handles(sender: WeightSender, bucket: Bucket, handles: Mapping[int, Handle]) -> None:
    """Send a server the handles of a bucket's memory; handles: by GPU."""
    post_payloads(sender, [payload_of(bucket, Rebuilt(handles[gpu])) for gpu in sender.gpus], bucket.flat.numel())


class Tensors(Transport):
    """Tensors in the body of HTTP requests. The servers need no connection to the trainer."""

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Encode a bucket once and post the text to all servers.

        Servers that take deltas get the bytes that differ from the last update; a server with another base gets the
        rest of the update whole.
        """
        fleet, refused = delivery.receivers, delivery.refused
        takers = {member for member in fleet.present if member.sender.takes_deltas}
        plain = {*fleet.present} - takers
        base = delivery.base.popleft() if delivery.base else None

        def offer(message: Message, member: "Member") -> None:
            if refusal := member.sender.offer(message):
                refused.add(member)
                fleet.tell(f"{member.url} takes no delta, and gets everything: {refusal}")

        if base is not None and takers - refused:
            fleet.each(partial(offer, make_message(bucket, base)), takers - refused)
        if whole := takers if base is None else takers & refused:
            message = make_message(bucket)
            fleet.each(lambda member: member.sender.load(message), whole)
        if plain:
            payload = payload_of(bucket)
            fleet.each(lambda member: send_tensors(member.sender, bucket, payload), plain)
