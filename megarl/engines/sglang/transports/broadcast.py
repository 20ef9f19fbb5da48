"""Weights by broadcast: a process group of all servers, or a group for every server after a failure."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from megarl.config.addresses import url_host
from megarl.engines.buckets import Bucket, Intake
from megarl.engines.sglang.transports.process_group import BroadcastGroup, own_address
from megarl.engines.sglang.transports.protocol import Buckets, Delivery, Transport
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.sglang.transports.threads import JOIN_S, deadline, in_thread
from megarl.engines.weights import Named
from megarl.errors import WeightSyncError


class Broadcast(Transport):
    """A bucket leaves the trainer once, for all servers.

    A failing server spoils the shared broadcast for all servers, and stays unknown. The rest of the update then goes
    through a group per server, and fails for the lost server alone.
    """

    def __init__(self) -> None:
        self._is_split = False
        """Whether the rest of the update goes through a group per server."""

    def stream(self, intake: Intake, tensors: Iterable[Named], delivery: Delivery | None) -> Buckets:
        """Begin with a group of all servers."""
        self._is_split = False
        return super().stream(intake, tensors, delivery)

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Broadcast to all servers; if the group fails, to each server by itself."""
        senders = delivery.receivers.senders
        if not self._is_split and len(senders) > 1 and len({own_address(sender.url) for sender in senders}) == 1:
            try:
                return broadcast(senders, bucket)
            except WeightSyncError as error:
                self._is_split = True
                delivery.tell(
                    f"warning: a broadcast of weights to all servers failed, each gets them by itself: {error}"
                )
        delivery.receivers.each(lambda sender: broadcast([sender], bucket), daemon=False)
        return None


def broadcast(senders: Sequence[WeightSender], bucket: Bucket) -> None:
    """Send the tensors of a bucket through a process group of all these servers.

    WeightSyncError if a server fails; all servers have then left the group.
    """
    places = [(name, str(dtype).removeprefix("torch."), list(shape)) for name, dtype, shape, *_ in bucket.places()]
    body = dict(zip(("names", "dtypes", "shapes"), zip(*places, strict=True), strict=True))
    body |= {"load_format": "flattened_bucket", "flush_cache": False}
    for sender in senders:
        sender.open_session()
    try:
        group, timeout_s = senders[0].group, deadline(bucket.flat.numel())
        is_shared = all(sender.group is group for sender in senders)
        world_size = 1 + sum(sender.tp for sender in senders)
        if group is None or not is_shared or group.world_size != world_size or group.timeout_s < timeout_s:
            group = _new_group(senders, bucket.flat.device, timeout_s)
        post = ("update_weights_from_distributed", body | {"group_name": group.name}, timeout_s)
        answers = [in_thread(partial(sender.post, *post)) for sender in senders]
        with bucket.beside():
            group.broadcast(bucket.flat, *answers)
    except WeightSyncError:
        for sender in senders:
            sender.leave_group()
        raise


def _new_group(senders: Sequence[WeightSender], device: torch.device, timeout_s: float) -> BroadcastGroup:
    """Return a new group of the servers, which leave their old groups."""
    for sender in senders:
        sender.leave_group()
    ranks = sum(sender.tp for sender in senders)
    timeout_s += JOIN_S * ranks
    group = BroadcastGroup(senders[0].url, ranks, device, timeout_s)
    joins, first = [], 1
    for sender in senders:
        sender.group = group
        body = {
            "master_address": url_host(group.address),  # the form for a URL
            "master_port": group.port,
            "rank_offset": first,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        # The trainer gives up first: waiting servers join no second group before that.
        joins.append(in_thread(partial(sender.post, "init_weights_update_group", body, 2 * timeout_s)))
        first += sender.tp
    group.join(*joins)
    return group
