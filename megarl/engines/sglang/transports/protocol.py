"""The protocol of a transport, and the update that the transport delivers."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megarl.engines.buckets import Bucket, Intake, Staging
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.sglang.transports.threads import Line
from megarl.engines.weights import Named

if TYPE_CHECKING:
    from megarl.engines.sglang.transports.folder import WeightFolder

Buckets = Generator[Bucket | None, None, None]
"""The buckets of an update. An error thrown into the generator ends the update on all ranks."""


class Receivers(Protocol):
    """The servers that take part in an update."""

    @property
    def senders(self) -> list[WeightSender]:
        """One for each server."""
        ...

    def each(self, step: Callable[[WeightSender], object], *, daemon: bool = True) -> list[WeightSender]:
        """Run a step for all servers at the same time; return the senders of the servers that have done the step.

        The update continues without servers that are late, hang or have gone. daemon: False for a step inside
        torch, which must not end with the process; a late server is then killed, because it waits in a dead group.
        """
        ...


@dataclass(slots=True)
class Delivery:
    """One update in progress."""

    receivers: Receivers
    line: Line
    """Sends one bucket while the next bucket is made."""
    tell: Callable[[str], None]
    """Prints one line for the user."""
    folder: "WeightFolder | None" = None
    """The copy on disk, or None; complete after all buckets have passed the line."""


class Transport(Protocol):
    """A way of weights to the servers."""

    def stream(self, intake: Intake, tensors: Iterable[Named], delivery: Delivery | None) -> Buckets:
        """Yield the buckets of an update, in memory for this transport. Runs in the caller's thread."""
        return intake.buckets(tensors, Staging(intake.max_bytes))

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Send one bucket to all servers of the update. Runs in the thread of the line."""
        ...
