"""The trainer's end of the process group that one server receives weights through: rank 0; the server's ranks follow.

One group per server, so that a server that dies leaves no other one waiting inside of a broadcast.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

# The group must not be one of the trainer's own world. torch has no public way to make such a group; SGLang makes its
# end in this way too, and both ends must agree on the keys of the store.
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from megarl.errors import WeightSyncError

POLL_S = 0.002


class GroupError(WeightSyncError):
    """The server did not take part in what it was asked to: it is dead, or hangs."""


class BroadcastGroup:
    """A gloo group for weights on the CPU, an NCCL group for weights on a GPU."""

    def __init__(self, url: str, tp: int, device: torch.device, timeout_s: float) -> None:
        """Opens the port where the server is expected. ``device`` is that of the tensors that will be sent."""
        self.name = f"megarl-{uuid.uuid4().hex}"
        self.address = own_address(url)
        self.world_size = 1 + tp
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)
        # Not through rendezvous(), which under torchrun takes torchrun's own store for that of every group.
        store = dist.TCPStore(
            self.address, 0, self.world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        self.port = int(store.port)
        self._store: dist.Store | None = store
        self._group: dist.ProcessGroup | None = None

    def join(self, server_joins: Future[None]) -> None:
        """Meet the server, which has been asked to join; WeightSyncError if it does not.

        The server's answer is looked at while we wait: one that refuses never comes.
        """
        ours = in_thread(self._rendezvous, daemon=False)
        while not (ours.done() and server_joins.done()):
            self._raise_failure(server_joins, ours)
            time.sleep(POLL_S)
        self._raise_failure(server_joins, ours)

    def _rendezvous(self) -> None:
        self._use_device()
        assert self._store is not None, "closed"
        self._group, _ = _new_process_group_helper(
            self.world_size,
            0,
            [],
            Backend(self.backend),
            PrefixStore(self.name, self._store),
            group_name=self.name,
            backend_options=None,
            timeout=self._timeout,
        )
        _world.pg_group_ranks[self._group] = {member: member for member in range(self.world_size)}

    def broadcast(self, flat: torch.Tensor, server_receives: Future[None]) -> None:
        """Send ``flat`` to the server, which has been asked to receive it; WeightSyncError if it does not take it."""
        assert self._group is not None, "join first"
        self._use_device()
        failure = None  # kept as text: an exception would keep the group alive through its frames
        try:
            work = dist.broadcast(flat, group_src=0, group=self._group, async_op=True)
            assert work is not None
            while not work.is_completed():
                self._raise_failure(server_receives)
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:  # of gloo and NCCL
            failure = str(error)
        if failure is not None:
            raise self._failure(failure)
        while not server_receives.done():
            time.sleep(POLL_S)
        self._raise_failure(server_receives)

    def close(self) -> None:
        """Leave the group, also while a broadcast is still under way, which ends with the group's timeout."""
        group, self._group = self._group, None
        self._store = None  # a server that still waits for others gives up when the store is gone
        if group is None:
            return
        with contextlib.suppress(RuntimeError, ValueError):  # one that has failed may refuse either
            group.abort()
            dist.destroy_process_group(group)
        held = [group]
        del group
        # Taking a gloo group apart waits for what is under way, so does the end of the process.
        threading.Thread(target=held.clear, name="weight-group-end").start()

    def _use_device(self) -> None:
        if self.device.type == "cuda":  # every thread begins with the first one
            torch.cuda.set_device(self.device)

    def _raise_failure(self, *sides: Future[None]) -> None:
        for side in sides:
            error = side.exception() if side.done() else None
            if isinstance(error, WeightSyncError):
                raise error
            if error is not None:
                raise self._failure(str(error))

    def _failure(self, told: str) -> GroupError:
        return GroupError(f"the {self.backend} group at {self.address}:{self.port} failed: {told}")


def in_thread(work: Callable[[], None], daemon: bool = True) -> Future[None]:
    """The future of a thread. A daemon ends with the process, which must not happen inside of torch's own code."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # whatever HTTP, gloo, NCCL and the store raise; the waiting thread raises it
            # Without its frames, which would keep a store and a group alive that nobody wants any more.
            done.set_exception(error.with_traceback(None))
        else:
            done.set_result(None)

    threading.Thread(target=run, name="weight-sync", daemon=daemon).start()
    return done


def own_address(url: str) -> str:
    """The address of this machine as the server at ``url`` sees it."""
    host = urlsplit(url).hostname or "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightSyncError(f"found no way from here to {url}: {error}") from error
