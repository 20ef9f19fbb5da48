"""What is sent to servers: every tensor once, in the form that they compute with, and back out of its bucket."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_families import write_family

from megarl.core.fp8 import quantize_fp8, round_through_fp8
from megarl.core.fp8_names import is_fp8_weight
from megarl.engines.sglang.transports.protocol import payload_of
from megarl.engines.weights import Bucket, Intake, WeightForm, checkpoint_shapes, split_into_buckets
from megarl.errors import WeightSyncError

SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "c.weight": (1, 5)}
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def intake() -> Intake:
    return Intake(SHAPES, 3, WeightForm(), 32)


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 100))
def test_buckets_are_in_order_and_as_large_as_allowed(sizes: list[int], max_bytes: int):
    given_ = [(f"t{i:02}", torch.zeros(size)) for i, size in enumerate(sizes)]
    found = list(split_into_buckets(iter(given_), max_bytes))
    assert [name for bucket in found for name in sorted(bucket.names)] == [name for name, _ in given_]
    weight = [bucket.flat.numel() for bucket in found]
    for i, bucket in enumerate(found):
        assert weight[i] <= max_bytes or len(bucket.names) == 1
        if i + 1 < len(found):  # the next tensor would not have fitted
            assert weight[i] + 4 * sizes[int(min(found[i + 1].names)[1:])] > max_bytes


@pytest.mark.parametrize("order", ["exported", "backwards"])
@pytest.mark.parametrize("fp8", ["off", "blocks"])
@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2", "moonlight"])
def test_the_halves_of_a_fused_projection_are_in_one_bucket(tmp_path: Path, family: str, fp8: str, order: str):
    """SGLang answers success to one half, and drops it. Moonlight has no q_a_proj, and nothing is held back."""
    shapes = checkpoint_shapes(write_family(tmp_path / "model", family))
    names = {"exported": list(shapes), "backwards": sorted(shapes, reverse=True)}[order]
    form = WeightForm(torch.bfloat16, fp8)  # type: ignore[arg-type]
    given_ = ((name, torch.ones(shapes[name])) for name in names)
    made = [set(bucket.names) for bucket in split_into_buckets(given_, 1, shapes, form=form)]
    scales = [f"{name}_scale_inv" for name in names if fp8 == "blocks" and is_fp8_weight(name)]
    assert sorted(name for bucket in made for name in bucket) == sorted([*names, *scales])
    halves = [name for name in shapes if "q_a_proj" in name]
    assert bool(halves) == (family != "moonlight")
    for name in halves:
        for end in ("", "_scale_inv") if fp8 == "blocks" else ("",):
            both = {f"{name}{end}", f"{name}{end}".replace("q_a_proj", "kv_a_proj_with_mqa")}
            assert any(both <= bucket for bucket in made)
    whole = [bucket for bucket in made if len({name.removesuffix("_scale_inv") for name in bucket}) > 1]
    assert len(whole) == len(halves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], r"1 of 3 tensors are missing from the update to version 3, for example c\.weight"),
        (lambda t: [*t, ("d.weight", torch.zeros(1))], r"d\.weight is unknown to the engine.s model"),
        (lambda t: [*t, t[0]], r"a\.weight arrived twice in one update \(version 3\)"),
        (lambda t: [("a.weight", torch.zeros(3, 2)), *t[1:]], r"a\.weight has shape \(3, 2\), expected \(2, 3\)"),
    ],
    ids=["lacks one", "unknown", "twice", "shape"],
)
def test_an_update_that_is_not_the_checkpoint_is_an_error(change, message: str):
    with pytest.raises(WeightSyncError, match=message):
        list(intake().buckets(change(tensors())))


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
    for name, dtype, _, start, _ in bucket.places:
        assert start % dtype.itemsize == 0, name


def test_a_bucket_is_a_copy_and_its_payload_names_every_place():
    given_ = tensors()
    bucket = Bucket(given_)
    before = given_[0][1].clone()
    given_[0][1].zero_()
    content = pickle.loads(base64.b64decode(payload_of(bucket)))
    (place,) = [place for place in content["metadata"] if place.name == "a.weight"]
    found = content["flattened_tensor"][place.start_idx : place.end_idx].view(place.dtype).view(place.shape)
    assert torch.equal(found, before)
    assert sum(place.numel for place in content["metadata"]) == bucket.flat.numel() == 4 * (6 + 4 + 5)


@pytest.mark.parametrize("fp8", ["off", "rounded", "blocks"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("bad", ["model.layers.0.mlp.experts.1.up_proj.weight", "model.norm.weight"])
def test_a_value_that_is_not_finite_is_named_in_every_form(fp8: str, value: float, bad: str):
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(3)]
    given_ = {name: torch.randn(130, 60) for name in names} | {"model.norm.weight": torch.randn(60)}
    shapes = {name: tuple(tensor.shape) for name, tensor in given_.items()}
    form = WeightForm(torch.bfloat16, fp8)  # type: ignore[arg-type]
    given_[names[0]][:2] = 3e38  # finite, but for their sum
    buckets = Intake(shapes, 1, form, 1).buckets(given_.items())
    assert len(next(buckets).names) <= 2  # one at a time: a sharded model is never gathered as a whole
    assert list(buckets)
    given_[bad].view(-1)[-1] = value
    with pytest.raises(WeightSyncError, match=f"1 of 4 tensors hold NaN or infinite values, for example {bad}:"):
        list(Intake(shapes, 1, form, 1 << 20).buckets(given_.items()))


@pytest.mark.parametrize("fp8", ["off", "rounded", "blocks"])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, None)]
)
def test_a_bucket_converts_each_tensor(fp8: str, dtypes: tuple[torch.dtype, torch.dtype | None]):
    """Bit for bit, also from views that are not contiguous."""
    source, held = dtypes
    shapes = {f"layers.{i}.{part}_proj.weight": (130, 40 + 20 * (i % 2)) for i in range(5) for part in ("up", "down")}
    given_ = {name: torch.randn(shape[::-1]).to(source).t() for name, shape in shapes.items()}
    given_["layers.0.mlp.gate.weight"] = torch.randn(40, 130).to(source).t()
    found = dict(Bucket(given_.items(), form=WeightForm(held, fp8)).tensors())  # type: ignore[arg-type]
    assert len(found) == len(given_) + len(shapes) * (fp8 == "blocks")
    for name, tensor in given_.items():
        if name in shapes and fp8 == "blocks":
            codes, scale = quantize_fp8(tensor)
            assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(found[f"{name}_scale_inv"], scale)
            continue
        if name in shapes and fp8 == "rounded":
            tensor = round_through_fp8(tensor.float())
        assert torch.equal(found[name], tensor.to(held or source))
        assert found[name].dtype == (held or source)
