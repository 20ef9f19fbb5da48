"""Weights through the folder of the kept copy, which all servers can read."""

from collections.abc import Iterable

from megarl.engines.buckets import Bucket, Intake
from megarl.engines.sglang.transports.protocol import Buckets, Delivery, Transport
from megarl.engines.weights import Named


class Disk(Transport):
    """The fleet writes its copy of the weights to disk; afterwards all servers load the folder."""

    def stream(self, intake: Intake, tensors: Iterable[Named], delivery: Delivery | None) -> Buckets:
        """Yield the buckets; after the last bucket is written, complete the folder and have the servers load it."""
        yield from super().stream(intake, tensors, delivery)
        assert delivery is not None, "one rank writes the folder, without help"
        assert delivery.folder is not None, "a fleet with this transport keeps its copy on disk"
        delivery.line.wait()
        path = str(delivery.folder.finish())
        delivery.receivers.each(lambda sender: sender.load_from_disk(path))

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Do nothing: the fleet has written the bucket."""
