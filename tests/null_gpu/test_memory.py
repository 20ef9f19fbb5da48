"""Memory of the null GPU: what it holds, who else may map it, and what torch's allocator does with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as mp

EXPANDABLE = "expandable_segments:True"


def _send(orders: mp.Queue, answers: mp.Queue) -> None:
    """The process that owns the memory."""
    from null_gpu.computing import computing

    with computing():
        weights = torch.arange(1000, device="cuda", dtype=torch.float32)
        part = weights[10:20]
        answers.put({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
        answers.put((weights, part))
        assert orders.get() == "changed"
        answers.put((weights[0].item(), weights[15].item()))
        assert orders.get() == "end"


@pytest.mark.parametrize("settings", ["expandable_segments:False", EXPANDABLE])
def test_another_process_maps_the_same_memory(computing: None, monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    context = mp.get_context("spawn")
    orders, answers = context.Queue(), context.Queue()
    owner = context.Process(target=_send, args=(orders, answers))
    owner.start()
    assert answers.get(timeout=3600) == {settings == EXPANDABLE}
    weights, part = answers.get(timeout=3600)
    assert weights.device == torch.device("cuda:0")
    assert weights.cpu().tolist() == list(range(1000))
    weights[0] = -1
    part[5] = -2
    assert weights[15].item() == -2
    orders.put("changed")
    assert answers.get(timeout=3600) == (-1, -2)
    del weights, part
    orders.put("end")
    owner.join(600)
    assert owner.exitcode == 0


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


GROW = """
import torch
blocks = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
del blocks[1], blocks[1]
big = torch.zeros(50 << 20, dtype=torch.uint8, device="cuda")  # fits where two blocks were, if segments can grow
print(torch.cuda.memory_reserved() >> 20, sum(s["is_expandable"] for s in torch.cuda.memory_snapshot()))
del blocks, big
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved())
"""
FULL = """
import torch
free, total = torch.cuda.mem_get_info()
assert free == total == 1 << 30
x = torch.empty(900 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.mem_get_info()[0] == 124 << 20
try:
    torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("refused")
"""
ADDRESSES = """
import ctypes
cuda, made = ctypes.CDLL(None), ctypes.c_void_p()
sizes, codes = [(79 << 30) - (number << 21) for number in range(13)], []
for size in [*sizes, sizes[0]]:
    codes.append(cuda.cudaMalloc(ctypes.byref(made), ctypes.c_size_t(size)))
    if codes[-1] == 0:
        assert cuda.cudaFree(made) == 0
print(*codes)  # 13 sizes would take more than 1 TiB of addresses
"""
SPARSE = """
import torch
a = torch.zeros(30 << 30, dtype=torch.uint8, device="cuda")
b = a.clone()
a[5] = 0
assert torch.cuda.memory_allocated() == 60 << 30
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) >> 20 < 2)
"""
DEVICES = """
import torch
x = torch.empty(8, device="cuda:2")
print(torch.cuda.device_count(), x.device, torch.cuda.memory_allocated(2), torch.cuda.memory_allocated(0))
try:
    torch.empty(8, device="cuda:3")
except torch.AcceleratorError as error:
    print(str(error).splitlines()[0])
"""
VISIBLE = """
import torch
print(torch.cuda.device_count(), torch.cuda.is_available(), torch.cuda.get_device_properties(1).uuid)
"""
BEYOND = """
import ctypes, torch
x = torch.empty(8, device="cuda")
cuda = ctypes.CDLL(None)
address = ctypes.c_void_p(x.data_ptr())
print(cuda.cudaMemset(address, 0, ctypes.c_size_t(2 << 20)), cuda.cudaMemset(address, 0, ctypes.c_size_t(3 << 20)))
"""
FIXED = "expandable_segments:False"


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        pytest.param(GROW, {"PYTORCH_ALLOC_CONF": FIXED}, "170 0 0", id="segments of fixed size"),
        pytest.param(GROW, {"PYTORCH_ALLOC_CONF": EXPANDABLE}, "120 1 0", id="segments that grow"),
        pytest.param(FULL, {"NULL_GPU_GB": "1"}, "refused", id="memory runs out"),
        pytest.param(ADDRESSES, {}, f"{'0 ' * 12}2 0", id="addresses of the next device are never given"),
        pytest.param(SPARSE, {}, "True", id="80 GB take no memory until they are written"),
        pytest.param(
            DEVICES, {"NULL_GPU_DEVICES": "3"}, "3 cuda:2 512 0 CUDA error: invalid device ordinal", id="devices"
        ),
        pytest.param(
            VISIBLE,
            {"NULL_GPU_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "1,2,7"},
            "2 True 00000000-0000-0000-0000-000000000003",
            id="visible devices",
        ),
        pytest.param(BEYOND, {}, "0 700", id="a copy beyond an allocation fails"),
    ],
)
def test_a_program_prints(code: str, environment: dict[str, str], expected: str) -> None:
    assert " ".join(_run(code, **environment).split()) == expected


def test_pinned_memory_is_known(computing: None) -> None:
    x = torch.ones(1000)
    assert not x.is_pinned()
    assert x.pin_memory().is_pinned()
    assert not x.is_pinned()
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 0
    assert x.is_pinned()
    assert cudart.cudaHostUnregister(x.data_ptr()) == 0
    assert not x.is_pinned()


def test_functions_that_are_not_done_say_their_name() -> None:
    code = """
import torch
torch.ones(1, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "not supported" in done.stdout
    assert "null GPU: cudaStreamBeginCapture" in done.stderr
