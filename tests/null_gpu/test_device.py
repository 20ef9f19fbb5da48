"""The null GPU itself: values as the CPU's, what cannot be computed raises, and waits are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from null_gpu.counting import Counts, host_waits
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gate
null_only = pytest.mark.skipif(not os.environ.get("NULL_GPU"), reason="a real GPU computes everything by itself")


def _gradients(device: str, dtype: torch.dtype, recomputed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    net = torch.nn.Sequential(*layers).to(device, dtype)
    torch.manual_seed(1)
    x = torch.randn(5, 8).to(device, dtype)
    out = checkpoint(net, x, use_reentrant=False) if recomputed else net(x)
    loss = out.float().log_softmax(-1)[:, 1].square().sum()
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.float().cpu() for p in net.parameters())]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_loss_and_gradients_equal_the_cpu(
    computing: None, dtype: torch.dtype, tolerance: float, recomputed: bool
) -> None:
    wanted, found = (_gradients(device, dtype, recomputed) for device in ("cpu", "cuda"))
    assert wanted[0].abs() > 0.1
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@null_only
def test_kernels_leave_no_values() -> None:
    """Without the computing mode nothing is computed: a test that forgets it cannot pass by accident."""
    assert 123.5 not in torch.full((4,), 123.5, device="cuda").cpu()


@null_only
def test_launches_and_copies_are_counted(computing: None) -> None:
    x, pinned = torch.ones(8), torch.ones(8).pin_memory()
    y = x.cuda()
    before = Counts.now()
    y + 1
    assert (Counts.now() - before).launches == 1
    y.copy_(x)
    pinned.copy_(y, non_blocking=True)
    found = Counts.now() - before
    assert (found.host_to_device, found.device_to_host, found.pageable) == (1, 1, 1)


@null_only
@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda x: x + x.cumsum(0), 0),
        (lambda x: x[x > 2], 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x.sum().item(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.repeat_interleave(x.long()), 1),
        (lambda x: x.repeat_interleave(x.long(), output_size=10), 0),
        (lambda x: torch.tensor([1.0], device="cuda"), 1),
    ],
)
def test_waits_of_the_host_are_counted(computing: None, call: Callable[[torch.Tensor], object], waits: int) -> None:
    x = torch.arange(5.0, device="cuda")
    with host_waits() as found:
        call(x)
    assert len(found) == waits, found
    assert all("test_device.py" in line for line in found)


@null_only
def test_a_kernel_outside_of_an_operation_is_refused() -> None:
    """Transformer Engine and Triton launch theirs by themselves; their values would be missing."""
    code = """
import ctypes
from null_gpu.computing import Computing
class Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]
one = Dim3(1, 1, 1)
launch = lambda: ctypes.CDLL(None).cudaLaunchKernel(None, one, one, None, ctypes.c_size_t(0), None)
print(launch())
with Computing():
    print(launch())
print(launch())
"""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=3600,
    )
    assert done.stdout.split() == ["0", "801", "0"], done.stderr
    assert "outside of an operation" in done.stderr
