"""Weights in memory of a GPU that another process opens, as a server on the same GPU does."""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing import reductions

from megarl.engines.sglang.transports.ipc import empty_shared, make_handle, withdraw
from megarl.engines.sglang.transports.protocol import Rebuilt, payload_of
from megarl.engines.weights import Bucket

WEIGHTS = [("a", torch.arange(1000, dtype=torch.float32)), ("b", torch.arange(50).bfloat16())]
EXPANDABLE = "expandable_segments:True"


class _Unpickler(pickle.Unpickler):
    """Finds a GPU by its UUID, as SGLang's does."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _rebuild if found is reductions.rebuild_cuda_tensor else found


def _rebuild(*arguments: Any) -> torch.Tensor:
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    return reductions.rebuild_cuda_tensor(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])


def _serve(orders: Any, answers: Any) -> None:
    """The process of a server: opens each payload, and says what it has read."""
    from null_gpu.computing import computing

    with computing():
        torch.zeros(1, device="cuda")
        answers.put("ready")
        while (order := orders.get()) is not None:
            content = _Unpickler(io.BytesIO(base64.b64decode(order))).load()
            found, part = {}, None
            for place in content["metadata"]:
                part = content["flattened_tensor"][place.start_idx : place.end_idx]
                found[place.name] = part.view(place.dtype).view(place.shape).float().cpu().tolist()
            answers.put((str(content["flattened_tensor"].device), found))
            if orders.get() == "die":
                os._exit(9)
            del content, part
            answers.put("closed")


@contextmanager
def _server() -> Iterator[tuple[Any, Any, Any]]:
    context = mp.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    process = context.Process(target=_serve, args=(orders, answers))
    process.start()
    try:
        assert answers.get(timeout=3600) == "ready"
        yield orders, answers, process
    finally:
        process.kill()
        process.join()


def _bucket() -> Bucket:
    return Bucket(((name, tensor.cuda()) for name, tensor in WEIGHTS), empty_shared)


def _held() -> int:
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("settings", ["", EXPANDABLE])
def test_a_server_reads_buckets_where_they_lie(computing: None, monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    """Also where segments can grow, which CUDA IPC could not share; the memory is free when it is closed."""
    if settings:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
        torch._C._accelerator_setAllocatorSettings(settings)
    before = _held()
    try:
        with _server() as (orders, answers, _):
            for _ in range(2):
                bucket = _bucket()
                segments = torch.cuda.memory_snapshot()
                (mine,) = (
                    segment
                    for segment in segments
                    if 0 <= bucket.flat.data_ptr() - segment["address"] < segment["total_size"]
                )
                assert not mine["is_expandable"]
                orders.put(payload_of(bucket, Rebuilt(make_handle(bucket.flat))))
                device, found = answers.get(timeout=3600)
                assert device == "cuda:0"
                assert found == {name: tensor.float().tolist() for name, tensor in WEIGHTS}
                del bucket
                assert _held() > before  # the server has it open
                orders.put("close")
                assert answers.get(timeout=3600) == "closed"
                assert _held() == before
        if settings:
            torch.cuda.empty_cache()  # or it lies in memory that was asked for before
            grown = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
            assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
            del grown
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.mark.parametrize("fate", ["never opened", "server killed"])
def test_memory_is_free_when_a_handle_is_withdrawn(computing: None, fate: str) -> None:
    before = _held()
    bucket = _bucket()
    handle = make_handle(bucket.flat)
    if fate == "server killed":
        with _server() as (orders, answers, process):
            orders.put(payload_of(bucket, Rebuilt(handle)))
            answers.get(timeout=3600)
            orders.put("die")
            process.join(600)
            assert process.exitcode == 9
    del bucket
    assert _held() > before
    withdraw(handle)
    assert _held() == before
