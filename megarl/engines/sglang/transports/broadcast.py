"""Weights by broadcast: a process group of all servers, or a group for every server after a failure."""

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

# The group must lie outside of the trainer's world, for which torch has no public function. SGLang makes its end in a
# similar way, and both ends must use equal keys in the store.
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from megarl.config.addresses import url_host
from megarl.engines.sglang.transports.protocol import Delivery, Transport
from megarl.engines.sglang.transports.sender import JOIN_S, HangError, WeightSender, deadline, in_thread
from megarl.engines.weights import Bucket
from megarl.errors import WeightSyncError, reworded


class Broadcast(Transport):
    """A bucket leaves the trainer once, for all servers.

    A failing server spoils the shared broadcast for all servers, and stays unknown. The rest of the update then goes
    through a group per server, and fails for the lost server alone.
    """

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Broadcast to all servers; if the group fails, to each server by itself."""
        senders = [member.sender for member in delivery.receivers.present]
        if not delivery.is_split and len(senders) > 1 and len({own_address(sender.url) for sender in senders}) == 1:
            try:
                return broadcast(senders, bucket)
            except WeightSyncError as error:
                delivery.is_split = True
                tell = delivery.receivers.tell
                tell(f"warning: a broadcast of weights to all servers failed, each gets them by itself: {error}")
        delivery.receivers.each(lambda member: broadcast([member.sender], bucket), daemon=False)
        return None


def broadcast(senders: Sequence[WeightSender], bucket: Bucket) -> None:
    """Send the tensors of a bucket through a process group of all these servers.

    WeightSyncError if a server fails; all servers have then left the group.
    """
    places = [(name, str(dtype).removeprefix("torch."), list(shape)) for name, dtype, shape, *_ in bucket.places]
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


def _new_group(senders: Sequence[WeightSender], device: torch.device, timeout_s: float) -> "BroadcastGroup":
    """Return a new group of the servers, which leave their old groups."""
    for sender in senders:
        sender.leave_group()
    ranks = sum(sender.tp for sender in senders)
    timeout_s += JOIN_S * ranks
    group = BroadcastGroup(senders[0].url, ranks, device, timeout_s)
    joins, first = [], 1
    for sender in senders:
        sender.group = group
        place = {"master_address": url_host(group.address), "master_port": group.port, "rank_offset": first}
        body = {**place, "world_size": group.world_size, "group_name": group.name, "backend": group.backend}
        # The trainer gives up first: waiting servers join no second group before that.
        joins.append(in_thread(partial(sender.post, "init_weights_update_group", body, 2 * timeout_s)))
        first += sender.tp
    group.join(*joins)
    return group


POLL_S = 0.002


class BroadcastGroup:
    """A gloo group for weights on the CPU, or an NCCL group for weights on a GPU."""

    def __init__(self, url: str, tp: int, device: torch.device, timeout_s: float) -> None:
        """Open the port for the servers.

        url: address of a server. tp: ranks of all servers. device: device of the tensors to send.
        """
        self.name = f"megarl-{uuid.uuid4().hex}"
        self.address = own_address(url)
        self.world_size = 1 + tp
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.device, self.timeout_s = device, timeout_s
        self._timeout = timeout = timedelta(seconds=timeout_s)
        # Not rendezvous(): under torchrun it uses torchrun's own store for every group.
        store = dist.TCPStore(self.address, 0, self.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        self.port = int(store.port)
        self._store: dist.Store | None = store
        self._group: dist.ProcessGroup | None = None

    def join(self, *servers_join: Future[None]) -> None:
        """Wait until the servers are in the group; WeightSyncError if a server refuses.

        servers_join: the requests to join. The wait watches the requests, because a refusing server never connects.
        """
        self._await(in_thread(self._rendezvous, daemon=False), *servers_join)

    def _await(self, *sides: Future[None]) -> None:
        while not all(side.done() for side in sides):
            self._raise_failure(*sides)
            time.sleep(POLL_S)
        self._raise_failure(*sides)

    def _rendezvous(self) -> None:
        self._use_device()
        # Not the store itself, which must end at once with the group: waiting servers then give up.
        store = dist.TCPStore(self.address, self.port, self.world_size, is_master=False, timeout=self._timeout)
        # Any: older releases of torch lack the type of the name.
        options: dict[str, Any] = {"group_name": self.name, "backend_options": None, "timeout": self._timeout}
        ends = Backend(self.backend), PrefixStore(self.name, store)
        self._group, _ = _new_process_group_helper(self.world_size, 0, [], *ends, **options)
        _world.pg_group_ranks[self._group] = {member: member for member in range(self.world_size)}

    def broadcast(self, flat: torch.Tensor, *servers_receive: Future[None]) -> None:
        """Send ``flat``, uint8 [bytes], to the servers; WeightSyncError if a server does not receive it.

        servers_receive: the requests.
        """
        assert self._group is not None, "join first"
        self._use_device()
        failure = None  # without frames, which would keep the group alive
        try:
            work = dist.broadcast(flat, group_src=0, group=self._group, async_op=True)
            assert work is not None
            while not work.is_completed():
                self._raise_failure(*servers_receive)
                time.sleep(POLL_S)
            work.wait()
        except WeightSyncError as error:  # a server refuses
            failure = error.with_traceback(None)
        except RuntimeError as error:  # from gloo or NCCL
            failure = self._failure(str(error))
        if failure is not None:
            raise failure
        self._await(*servers_receive)

    def close(self) -> None:
        """Leave the group. A broadcast in progress ends with the group's timeout."""
        group, self._group = self._group, None
        self._store = None
        if group is None:
            return
        with contextlib.suppress(RuntimeError, ValueError):  # a failed group may refuse both calls
            group.abort()
            dist.destroy_process_group(group)
        groups = [group]
        del group
        # Destroying a gloo group blocks until its broadcast has ended; hence a thread.
        threading.Thread(target=groups.clear, name="weight-group-end").start()

    def _use_device(self) -> None:
        if self.device.type == "cuda":  # each thread starts with device 0
            torch.cuda.set_device(self.device)

    def _raise_failure(self, *sides: Future[None]) -> None:
        for side in sides:
            error = side.exception() if side.done() else None
            if isinstance(error, WeightSyncError):
                raise error
            if error is not None:
                raise self._failure(str(error))

    def _failure(self, reason: str) -> HangError:
        return HangError(f"the {self.backend} group at {url_host(self.address)}:{self.port} failed: {reason}")


def own_address(url: str) -> str:
    """Return the address of this machine as seen by the server at ``url``; WeightSyncError without a route."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with reworded(OSError, WeightSyncError, f"found no route to {url}: "):
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # UDP: sends nothing
            return str(probe.getsockname()[0])
