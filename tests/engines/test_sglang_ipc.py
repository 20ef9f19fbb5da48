"""Weights in memory that servers open: the ranks of a machine go in step, and nothing is left behind."""

from __future__ import annotations

import base64
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megarl.engines.sglang.transports import ipc
from megarl.engines.sglang.transports.ipc import SharedMemory, empty_shared, make_handle
from megarl.engines.sglang.transports.protocol import Buckets, Rebuilt, payload_of
from megarl.engines.weights import Bucket, split_into_buckets
from megarl.errors import MegarlError, WeightSyncError

TENSORS = [(f"t{number}", torch.full((4,), float(number))) for number in range(6)]


def files() -> set[str]:
    """Of this process, that torch has made in shared memory."""
    return {path.name for path in ipc.SHARED_MEMORY.glob(f"torch_{os.getpid()}_*")}


class Meeting:
    """Ranks that are threads: each gives a value, and gets those of all."""

    def __init__(self, num_ranks: int) -> None:
        self._given: dict[int, Any] = {}
        self._met = threading.Barrier(num_ranks, timeout=600.0)

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            self._given[rank] = mine
            self._met.wait()
            found = [self._given[other] for other in sorted(self._given)]
            self._met.wait()
            return found

        return gather


def run(num_ranks: int, work: Callable[[int, SharedMemory, Iterator[Bucket]], Any]) -> list[Any]:
    """What ``work`` returns or raises on each rank; gathering a bucket is a collective call too."""
    meeting, gathering = Meeting(num_ranks), Meeting(num_ranks)

    def buckets_of(rank: int) -> Iterator[Bucket]:
        for bucket in split_into_buckets(iter(TENSORS), 32, allocate=empty_shared):  # two tensors each
            gathering.of(rank)(rank)
            yield bucket

    def of_rank(rank: int) -> Any:
        memory = SharedMemory(range(num_ranks), rank, meeting.of(rank))
        made = buckets_of(rank)
        try:
            found = work(rank, memory, made)
        except MegarlError as error:
            found = error
        deque(made, maxlen=0)  # as the engine does, because gathering is collective
        return found

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(of_rank, range(num_ranks)))


def rounds_of(memory: SharedMemory, made: Iterator[Bucket]) -> Buckets:
    """The rounds after their first step, as the fleet gets them."""
    rounds = memory.rounds(made, lambda: None)
    assert next(rounds) is None
    return rounds


def opened(handle: Any, bucket: Bucket) -> dict[str, torch.Tensor]:
    """The tensors that a payload gives where it is unpickled."""
    content = pickle.loads(base64.b64decode(payload_of(bucket, Rebuilt(handle))))
    flat = content["flattened_tensor"]
    return {
        place.name: flat[place.start_idx : place.end_idx].view(place.dtype).clone() for place in content["metadata"]
    }


def test_every_rank_gives_a_handle_for_its_gpu():
    def work(rank: int, memory: SharedMemory, made: Iterator[Bucket]) -> Any:
        found: dict[str, torch.Tensor] = {}
        for bucket in rounds_of(memory, made):
            assert sorted(memory.handles) == [0, 1, 2]
            if rank == 0:
                for handle in memory.handles.values():
                    found |= opened(handle, bucket)
        return found

    found, *_ = run(3, work)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS)
    assert files() == set()
    free = ipc.shutil.disk_usage(ipc.SHARED_MEMORY).free
    with pytest.raises(WeightSyncError, match=r"/dev/shm has \d+ MiB left, a bucket of weights takes"):
        empty_shared(free + (1 << 40), torch.device("cpu"))


@pytest.mark.parametrize("where", ["before the first", "in the last"])
def test_all_ranks_learn_that_the_main_one_has_failed(where: str):
    def work(rank: int, memory: SharedMemory, made: Iterator[Bucket]) -> Any:
        rounds = rounds_of(memory, made)
        if rank:
            for _ in rounds:
                pass
            return "done"
        try:
            if where == "before the first":
                raise WeightSyncError("the server refuses")
            for number, _ in enumerate(rounds):
                if number == 2:
                    raise WeightSyncError("the server refuses")
        except WeightSyncError as error:
            rounds.throw(error)

    main, *others = run(3, work)
    assert not main.second_hand
    assert all(isinstance(error, WeightSyncError) and error.second_hand for error in others)
    assert {str(error) for error in (main, *others)} == {"the server refuses"}
    assert files() == set()


def test_all_ranks_learn_that_one_cannot_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    share, refused = make_handle, threading.local()

    def refusing(flat: torch.Tensor) -> Any:
        if getattr(refused, "here", False):
            raise RuntimeError("CUDA error: invalid argument")
        return share(flat)

    monkeypatch.setattr(ipc, "make_handle", refusing)
    sent: list[int] = []

    def work(rank: int, memory: SharedMemory, made: Iterator[Bucket]) -> Any:
        refused.here = rank == 1
        for number, _ in enumerate(rounds_of(memory, made)):
            sent.append(number)

    found = run(3, work)
    assert all("memory of GPU 1 cannot be shared with the server on it" in str(error) for error in found)
    assert [error.second_hand for error in found] == [True, False, True]
    assert sent == []


def test_handles_that_no_server_has_taken_are_withdrawn(monkeypatch: pytest.MonkeyPatch):
    """Else torch would keep the memory of every bucket for a server that is away."""
    withdrawn: list[Any] = []
    monkeypatch.setattr(ipc, "withdraw", lambda handle: withdrawn.append(handle) if handle else None)

    def work(rank: int, memory: SharedMemory, made: Iterator[Bucket]) -> Any:
        for number, _ in enumerate(rounds_of(memory, made)):
            if rank == 0:
                memory.confirmed.update((0, 1) if number == 1 else (0,))

    run(2, work)
    assert len(withdrawn) == 2  # those of rank 1, but for the second
