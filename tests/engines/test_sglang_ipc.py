"""Weights in memory that servers open: the ranks of a machine go in step, and nothing is left behind."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_oracle import make_requests
from sglang_fixtures import SGLANG_PYTHON, START_DEADLINE_S
from sglang_oracle import CLOSE, logprob_gap, noisy, oracle_of

from megarl.engines import buckets
from megarl.engines.buckets import Bucket, split_into_buckets
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import FleetSettings
from megarl.engines.sglang.spec import CPU_SHIM, ServerSpec
from megarl.engines.sglang.transports import ipc
from megarl.engines.sglang.transports.ipc import SharedMemory, empty_shared, make_handle
from megarl.engines.sglang.transports.protocol import Buckets, Rebuilt, payload_of
from megarl.engines.weights import WeightForm
from megarl.errors import MegarlError, WeightSyncError

TENSORS = [(f"t{number}", torch.full((4,), float(number))) for number in range(6)]


def files() -> set[str]:
    """Of this process, that torch has made in shared memory."""
    return {path.name for path in ipc.SHARED_MEMORY.glob(f"torch_{os.getpid()}_*")}


class Meeting:
    """Ranks that are threads: each gives a value, and gets those of all."""

    def __init__(self, num_ranks: int) -> None:
        self._given: dict[int, Any] = {}
        self._met = threading.Barrier(num_ranks, timeout=120.0)

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


@pytest.mark.parametrize("where", ["before the first", "in the first", "in the last"])
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
                if number == (0 if where == "in the first" else 2):
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


def test_shared_memory_that_is_too_small_is_an_error(monkeypatch: pytest.MonkeyPatch):
    free = ipc.shutil.disk_usage(ipc.SHARED_MEMORY).free
    with pytest.raises(WeightSyncError, match=r"/dev/shm has \d+ MiB left, a bucket of weights takes"):
        empty_shared(free + (1 << 30), torch.device("cpu"))


@pytest.mark.sglang
def test_sglang_unpickles_what_handles_name(tmp_path: Path):
    """That of a GPU as torch makes it, with the numbers of none."""
    bucket = Bucket(TENSORS, empty_shared)
    uuid = "0f9c0d6e-7b0d-4d0f-8a43-2b8d9d6f0c11"
    rebuild = (torch.Tensor, torch.Size([96]), (1,), 0, torch.storage.TypedStorage, torch.uint8, uuid)
    of_gpu = (torch.multiprocessing.reductions.rebuild_cuda_tensor, (*rebuild, b"h", 96, 0, False, b"c", 0, b"e", True))
    for name, handle in (("cpu", make_handle(bucket.flat)), ("gpu", of_gpu)):
        (tmp_path / name).write_text(payload_of(bucket, Rebuilt(handle)))  # type: ignore[arg-type]
    words = [
        str(SGLANG_PYTHON),
        str(Path(__file__).with_name("sglang_unpickler.py")),
        tmp_path / "cpu",
        tmp_path / "gpu",
    ]
    environment = os.environ | {"PYTHONPATH": str(CPU_SHIM), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(words, check=True, env=environment, capture_output=True, text=True)
    assert {"rebuild_storage_filename", "_rebuild_cuda_tensor_modified", "SimpleNamespace"} <= {*done.stdout.split()}


@pytest.mark.sglang
def test_a_server_that_dies_in_an_update_gets_the_weights_when_it_is_back(
    sglang_spec: ServerSpec, hostile_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of two tensor-parallel ranks; the shared memory is free afterwards."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 15)
    spec = replace(sglang_spec, model_path=hostile_model, tp=2, log_file=tmp_path / "log")
    told: list[str] = []
    patience = FleetSettings(START_DEADLINE_S, poll_s=0.1)
    fleet = Fleet([spec], tp=2, transport=SharedMemory(), settings=patience, tell=told.append)
    engine = SGLangEngine(
        fleet.start(),
        json.loads((hostile_model / "config.json").read_text()),
        fleet=fleet,
        form=WeightForm(torch.float32),
    )
    process = fleet.members[0].process
    assert process is not None
    wanted = noisy(hostile_model, 4)

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(wanted.items()):
            if number == len(wanted) // 2:
                process.kill()
            yield item

    params = SamplingParams(max_response_tokens=8)
    try:
        first = noisy(hostile_model, 3)
        engine.update_weights(first.items(), 1)
        assert logprob_gap(engine.generate(make_requests(3), params), oracle_of(hostile_model, first)) < CLOSE
        assert files() == set()
        engine.update_weights(dying(), 2)
        assert files() == set()
        until = time.monotonic() + START_DEADLINE_S
        while not any("is back with weights 2" in line for line in told) and time.monotonic() < until:
            time.sleep(0.2)
        assert logprob_gap(engine.generate(make_requests(3), params), oracle_of(hostile_model, wanted)) < CLOSE
    finally:
        fleet.close()
