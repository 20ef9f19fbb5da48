from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core.metrics import finalize, merge
from megarl.errors import TraceError
from megarl.routes import RoutingTrace, compare

A = [[[0, 1], [2, 3]], [[0, 1], [1, 3]], [[2, 3], [0, 1]]]
B = [[[0, 2], [2, 3]], [[0, 1], [1, 3]], [[0, 1], [2, 3]]]


def random_trace(seed: int, tokens: int, layers: int, top_k: int, num_experts: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.argsort(generator.random((tokens, layers, num_experts)), axis=2)[:, :, :top_k]


def test_hand_computed():
    found = compare(RoutingTrace(np.array(A), 4), RoutingTrace(np.array(B), 4))
    assert found.flip == 0.5
    assert found.overlap == pytest.approx(0.5833333333333334, abs=1e-12)
    assert found.token_any == pytest.approx(2 / 3)
    assert found.layers_per_token == 1.0
    np.testing.assert_allclose(found.per_layer_flip, [2 / 3, 1 / 3])


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 6),
    layers=st.integers(1, 3),
    top_k=st.integers(1, 4),
    extra=st.integers(0, 3),
)
def test_against_reference_in_any_order(seed, tokens, layers, top_k, extra):
    num_experts = top_k + extra
    a = random_trace(seed, tokens, layers, top_k, num_experts)
    b = random_trace(seed + 1, tokens, layers, top_k, num_experts)
    slow = reference.disagreement(a.tolist(), b.tolist())
    found = compare(RoutingTrace(a, num_experts), RoutingTrace(b[:, :, ::-1], num_experts))
    for name in ("flip", "overlap", "token_any", "layers_per_token"):
        assert getattr(found, name) == pytest.approx(slow[name], abs=1e-12)
    np.testing.assert_allclose(found.per_layer_flip, slow["per_layer_flip"], atol=1e-12)
    turned = compare(RoutingTrace(a, num_experts), RoutingTrace(a[:, :, ::-1], num_experts))
    assert (turned.flip, turned.overlap, turned.token_any) == (0, 1, 0)


def test_parts_add_up_and_merge():
    a, b = random_trace(0, 9, 3, 2, 6), random_trace(1, 9, 3, 2, 6)
    whole = compare(RoutingTrace(a, 6), RoutingTrace(b, 6))
    parts = [
        compare(RoutingTrace(a[:4], 6), RoutingTrace(b[:4], 6)),
        compare(RoutingTrace(a[4:4], 6), RoutingTrace(b[4:4], 6)),
        compare(RoutingTrace(a[4:], 6), RoutingTrace(b[4:], 6)),
    ]
    total = parts[0] + parts[1] + parts[2]
    assert (total.flip, total.overlap, total.token_any) == (whole.flip, whole.overlap, whole.token_any)
    np.testing.assert_array_equal(total.per_layer_flip, whole.per_layer_flip)
    numbers = finalize(merge([part.stats() for part in parts]))
    assert numbers["router/flip"] == pytest.approx(whole.flip)
    assert numbers["router/overlap"] == pytest.approx(whole.overlap)
    assert numbers["router/token_any"] == pytest.approx(whole.token_any)
    assert numbers["router/layers_per_token"] == pytest.approx(whole.layers_per_token)
    by_layer = [numbers[f"router/flip/layer_{layer:02d}"] for layer in range(3)]
    np.testing.assert_allclose(by_layer, whole.per_layer_flip)


def test_only_rows_present_in_both_are_compared():
    a, b = np.array(A), np.array(B)
    a[0] = 0
    left = RoutingTrace(a, 4, present=np.array([False, True, True]))
    right = RoutingTrace(b, 4, present=np.array([True, True, False]))
    found = compare(left, right)
    assert (found.num_tokens, found.flip, left.num_missing) == (1, 0.0, 1)
    nothing = compare(left, RoutingTrace(b, 4, present=np.array([True, False, False])))
    assert finalize(nothing.stats()) == {}
    with pytest.raises(TraceError, match="no token is present in both"):
        _ = nothing.flip


@pytest.mark.parametrize(("num_experts", "dtype"), [(4, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_narrowing(num_experts, dtype):
    trace = RoutingTrace(np.array(A, dtype=np.int64), num_experts)
    assert trace.experts.dtype == dtype
    np.testing.assert_array_equal(trace.experts, A)


def test_largest_expert_survives_narrowing():
    for num_experts in (256, 65536):
        trace = RoutingTrace(np.array([[[num_experts - 1, 0]]]), num_experts)
        assert trace.experts[0, 0, 0] == num_experts - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[0], r"expected integers \[T, L, K\]"),
        (lambda x: x.astype(float), "float64"),
        (lambda x: np.where(x == 3, 4, x), r"sample 1, row 0, layer 1: experts .* expected 2 different ones of 0 to 3"),
        (lambda x: np.where(x == 3, -1, x), r"experts \[.*-1"),
        (lambda x: np.where(x == 0, 1, x), r"sample 1, row 0, layer 0: experts \[1, 1\], .* \(3 such rows\)"),
        (lambda x: np.tile(x, (1, 1, 3)), "top-6 of 4"),
    ],
)
def test_wrong_traces(change, message):
    with pytest.raises(TraceError, match=message):
        RoutingTrace(change(np.array(A)), 4, label="sample 1")


def test_wrong_present_mask():
    with pytest.raises(TraceError, match="present is"):
        RoutingTrace(np.array(A), 4, present=np.array([True]))


def test_missing_rows_may_hold_anything_and_become_zero():
    experts = np.array(A)
    experts[1] = -7
    trace = RoutingTrace(experts, 4, present=np.array([True, False, True]))
    assert (trace.experts[1] == 0).all()


def test_different_shapes_do_not_compare():
    with pytest.raises(TraceError, match="same tokens and model"):
        compare(RoutingTrace(np.array(A), 4), RoutingTrace(np.array(A)[:2], 4))
    one = compare(RoutingTrace(np.array(A), 4), RoutingTrace(np.array(B), 4))
    other = compare(RoutingTrace(np.array(A)[:, :1], 4), RoutingTrace(np.array(B)[:, :1], 4))
    with pytest.raises(TraceError, match="different models"):
        _ = one + other
