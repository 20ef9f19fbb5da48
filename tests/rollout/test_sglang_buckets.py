"""What is sent to servers: every tensor once, in the form that they compute with, and back out of its bucket."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.fp8 import dequantize_fp8, round_through_fp8
from megarl.errors import WeightSyncError
from megarl.rollout.sglang.weights.buckets import Bucket, Stopwatch, split_into_buckets
from megarl.rollout.weights import WeightForm, require_each_once

SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "c.weight": (1, 5)}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 100))
def test_buckets_keep_order_and_are_as_large_as_allowed(sizes: list[int], max_bytes: int):
    given_ = [(f"t{i}", torch.zeros(size)) for i, size in enumerate(sizes)]
    found = list(split_into_buckets(iter(given_), max_bytes))
    assert [name for bucket in found for name in bucket.names] == [name for name, _ in given_]
    given_names = [name for name, _ in given_]
    weight = [bucket.flat.numel() for bucket in found]
    assert all(bucket.names for bucket in found)
    for i, bucket in enumerate(found):
        assert weight[i] <= max_bytes or len(bucket.names) == 1
        if i + 1 < len(found):  # the next tensor would not have fitted
            assert weight[i] + 4 * sizes[given_names.index(found[i + 1].names[0])] > max_bytes


def test_buckets_are_made_one_at_a_time():
    taken: list[int] = []

    def stream():
        for i in range(6):
            taken.append(i)
            yield f"t{i}", torch.zeros(2)

    next(iter(split_into_buckets(stream(), 16)))
    assert taken == [0, 1, 2]  # a sharded model is never gathered as a whole


def test_a_whole_update_passes_unchanged():
    found = list(require_each_once(tensors(), SHAPES, 3))
    assert [name for name, _ in found] == list(SHAPES)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, tensors(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], r"1 of 3 tensors are missing from the update to version 3, for example c\.weight"),
        (lambda t: [], "3 of 3 tensors are missing"),
        (lambda t: [*t, ("d.weight", torch.zeros(1))], r"d\.weight is unknown to the engine.s model"),
        (lambda t: [*t, t[0]], r"a\.weight arrived twice in one update \(version 3\)"),
        (lambda t: [("a.weight", torch.zeros(3, 2)), *t[1:]], r"a\.weight has shape \(3, 2\), expected \(2, 3\)"),
        (lambda t: [("a.weight", torch.full((2, 3), torch.nan)), *t[1:]], r"a\.weight holds NaN"),
        (lambda t: [("a.weight", torch.full((2, 3), torch.inf)), *t[1:]], r"a\.weight holds NaN or infinite"),
    ],
    ids=["lacks one", "lacks all", "unknown", "twice", "shape", "nan", "inf"],
)
def test_an_update_that_is_not_the_checkpoint_is_an_error(change, message: str):
    with pytest.raises(WeightSyncError, match=message):
        list(require_each_once(change(tensors()), SHAPES, 3))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), min_size=1, max_size=3)), min_size=1))
def test_what_goes_into_a_bucket_comes_out_of_it(sizes: list[tuple[torch.dtype, list[int]]]):
    """Also where a byte stands before a float32, which could not be viewed at an odd address."""
    given_ = {f"t{i}": torch.randn(shape).to(dtype) for i, (dtype, shape) in enumerate(sizes)}
    bucket = Bucket(given_.items())
    found = dict(bucket.tensors())
    assert found.keys() == given_.keys()
    for name, tensor in given_.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())
    for name, dtype, _, start, _ in bucket.places():
        assert start % dtype.itemsize == 0, name


def test_a_bucket_is_a_copy_and_its_payload_names_every_place():
    given_ = tensors()
    bucket = Bucket(given_)
    before = given_[0][1].clone()
    given_[0][1].zero_()
    content = pickle.loads(base64.b64decode(bucket.payload))
    (place,) = [place for place in content["metadata"] if place.name == "a.weight"]
    found = content["flattened_tensor"][place.start_idx : place.end_idx].view(place.dtype).view(place.shape)
    assert torch.equal(found, before)
    assert sum(place.numel for place in content["metadata"]) == bucket.flat.numel() == 4 * (6 + 4 + 5)
    assert bucket.payload is bucket.payload  # made once for all servers
    bucket.forget_payload()
    assert "payload" not in vars(bucket)


@pytest.mark.parametrize("fp8", ["rounded", "blocks"])
def test_linear_weights_are_held_in_fp8_and_the_rest_as_it_is(fp8: str):
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(1))
    linear, kept = "model.layers.0.self_attn.q_proj.weight", ("model.layers.0.mlp.gate.weight", "lm_head.weight")
    found = dict(WeightForm(torch.float32, fp8).convert([(name, weight) for name in (linear, *kept)]))  # type: ignore[arg-type]
    if fp8 == "blocks":
        assert list(found) == [linear, f"{linear}_scale_inv", *kept]
        assert found[linear].dtype == torch.float8_e4m3fn
        assert found[f"{linear}_scale_inv"].shape == (2, 2)
        assert found[f"{linear}_scale_inv"].dtype == torch.float32
        found[linear] = dequantize_fp8(found[linear], found[f"{linear}_scale_inv"])
    assert torch.equal(found[linear], round_through_fp8(weight))
    assert 0.01 < float((found[linear] - weight).norm() / weight.norm()) < 0.05
    for name in kept:
        assert torch.equal(found[name], weight)


def test_without_fp8_everything_has_the_dtype_of_the_engine():
    found = dict(WeightForm(torch.bfloat16).convert(tensors()))
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_a_stopwatch_counts_the_time_of_the_iterator_alone():
    def slow() -> Iterator[int]:
        for number in range(3):
            time.sleep(0.02)
            yield number

    watch = Stopwatch()
    for _ in watch.over(slow()):
        time.sleep(0.1)
    assert 0.06 <= watch.seconds < 0.3
