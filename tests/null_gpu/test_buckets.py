"""Buckets of a weight update on a GPU: made without the host waiting, and copied beside what makes the next one."""

from __future__ import annotations

import pytest
import torch
from null_gpu.counting import Counts, host_waits

from megarl.engines.weights import Bucket, Intake, WeightForm
from megarl.errors import WeightSyncError

pytestmark = pytest.mark.gate
SHAPES = {f"layers.{i}.{part}_proj.weight": (130, 60) for i in range(3) for part in ("up", "down")}
SHAPES |= {"norm.weight": (60,), "mlp.gate.weight": (3, 130)}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("fp8", ["off", "rounded", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_of_a_gpu_holds_and_checks_what_one_of_the_host_does(computing: None, fp8: str, dtype: torch.dtype):
    form = WeightForm(torch.bfloat16, fp8)  # type: ignore[arg-type]
    on_host = Bucket(tensors(dtype).items(), form=form)
    on_gpu = Bucket(((name, tensor.cuda()) for name, tensor in tensors(dtype).items()), form=form)
    assert on_gpu.flat.is_cuda
    assert on_gpu.places == on_host.places
    for copied in (on_gpu.on_host(), on_gpu.spare()):
        assert copied.flat.is_pinned()
        assert torch.equal(copied.flat, on_host.flat)
    assert on_gpu.finite.tolist() == [True] * len(on_host.names)


def test_a_value_on_a_gpu_that_is_not_finite_is_named(computing: None):
    given = {name: tensor.cuda() for name, tensor in tensors().items()}
    given["layers.1.up_proj.weight"][2, 3] = torch.inf
    with pytest.raises(WeightSyncError, match=r"1 of 8 tensors hold NaN .* for example layers\.1\.up_proj\.weight"):
        list(Intake(SHAPES, 1, WeightForm(), 1 << 15).buckets(given.items()))


@pytest.mark.parametrize("fp8", ["off", "rounded", "blocks"])
def test_the_host_does_not_wait_until_all_buckets_are_made(fp8: str):
    form = WeightForm(torch.bfloat16, fp8)  # type: ignore[arg-type]
    given = {name: torch.empty(shape, device="cuda") for name, shape in SHAPES.items()}
    intake = Intake(SHAPES, 1, form, 1 << 14)
    made = []
    with host_waits() as waits:
        rounds = intake.buckets(given.items())
        for _ in range(3):
            made.append(next(rounds))
    assert waits == []
    assert all(bucket.ready is not None for bucket in made)


def test_a_copy_on_the_host_is_asynchronous_and_into_pinned_memory():
    bucket = Bucket((name, torch.empty(shape, device="cuda")) for name, shape in SHAPES.items())
    before = Counts.now()
    copied = bucket.on_host()
    used = Counts.now() - before
    assert (used.device_to_host, used.pageable, used.launches) == (1, 0, 0)
    assert copied.ready is None
    assert copied.on_host() is copied
