"""Traces of routes: what they hold, how two of them differ, and their bytes."""

from __future__ import annotations

import math
import struct
import tracemalloc
import zlib
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core.metrics import finalize, merge
from megarl.errors import TraceError
from megarl.routes import RoutingTrace, compare, decode, encode
from megarl.routes import codec as routing_codec
from megarl.routes.codec import HEADER_BYTES

START, FIELDS = "<4sBI", "<BHHHI"
"""magic, version, CRC32 of all that follows; whether there is a mask, L, K, E - 1, T."""


def random_experts(seed: int, tokens: int, layers: int, top_k: int, num_experts: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.argsort(generator.random((tokens, layers, num_experts)), axis=2)[:, :, :top_k]


def packet(payload: bytes, *, mask=0, layers=1, top_k=2, experts=4, tokens=1) -> bytes:
    """Data with a header that says what it likes, and the right checksum."""
    body = struct.pack(FIELDS, mask, layers, top_k, experts - 1, tokens) + payload
    return struct.pack(START, b"MRLT", 7, zlib.crc32(body)) + body


def assert_equal(found: RoutingTrace, expected: RoutingTrace) -> None:
    np.testing.assert_array_equal(found.experts, expected.experts)
    assert found.experts.dtype == expected.experts.dtype
    assert found.num_experts == expected.num_experts
    if expected.present is None:
        assert found.present is None
    else:
        np.testing.assert_array_equal(found.present, expected.present)


@st.composite
def traces(draw) -> RoutingTrace:
    top_k = draw(st.integers(0, 6))
    num_experts = draw(st.sampled_from([max(top_k, 1), top_k + 1, 16, 256, 257, 2000]))
    tokens, layers = draw(st.integers(0, 20)), draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows = [generator.choice(num_experts, top_k, replace=False) for _ in range(tokens * layers)]
    experts = np.array(rows, dtype=np.int64).reshape(tokens, layers, top_k)
    present = draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    return RoutingTrace(experts, num_experts, present=None if present is None else np.array(present, dtype=bool))


@settings(max_examples=150, deadline=None)
@given(trace=traces())
def test_round_trip(trace):
    data = encode(trace)
    assert_equal(decode(data), trace)
    assert_equal(decode(memoryview(bytearray(data))), trace)


def test_the_bytes_by_hand():
    """Of 4 experts, 2 bits each: of 3, 1, 0, 2 the low bits 1, 1, 0, 0, then the high bits 1, 0, 0, 1."""
    trace = RoutingTrace(np.array([[[3, 1], [0, 2]]]), 4)
    assert encode(trace) == packet(bytes([0b1001_0011]), layers=2)
    holes = RoutingTrace(np.array([[[3, 1]], [[0, 0]]]), 4, present=np.array([True, False]))
    assert encode(holes) == packet(bytes([0b01, 0b01_11]), mask=1, tokens=2)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(4, 2), (5, 5), (9, 1), (16, 15), (16, 16), (256, 8), (257, 8), (384, 8), (512, 10), (65536, 64)],
)
def test_experts_stand_in_planes_of_bits(num_experts, top_k):
    rows = random_experts(1, 40, 1, top_k, num_experts)
    num_bits = math.ceil(math.log2(num_experts))
    flags = [expert >> bit & 1 for bit in range(num_bits) for expert in rows.flatten().tolist()]
    payload = np.packbits(np.array(flags, bool), bitorder="little").tobytes()
    data = encode(RoutingTrace(rows, num_experts))
    assert data == packet(payload, top_k=top_k, experts=num_experts, tokens=len(rows))
    np.testing.assert_array_equal(decode(data).experts, rows)


@pytest.mark.parametrize("row", [(1, 1), (2, 7), (0, 6)], ids=["twice", "expert 7", "expert 6"])
def test_rows_that_are_no_sets_of_experts_are_found(row):
    flags = [expert >> bit & 1 for bit in range(3) for expert in row]
    payload = np.packbits(np.array(flags, bool), bitorder="little").tobytes()
    with pytest.raises(TraceError, match="sample 1, row 0, layer 0: experts"):
        decode(packet(payload, experts=6, top_k=2), label="sample 1")


@given(trace=traces())
def test_a_trace_takes_no_more_than_its_experts_and_a_header(trace):
    plain = trace.experts.astype(np.uint8 if trace.num_experts <= 256 else np.uint16).nbytes
    mask = 0 if trace.present is None else -(-len(trace.present) // 8)
    assert len(encode(trace)) <= HEADER_BYTES + mask + plain


def test_damage_anywhere_is_found():
    experts = np.tile(random_experts(0, 1, 2, 2, 8), (40, 1, 1))
    data = encode(RoutingTrace(experts, 8, present=np.arange(40) % 7 > 0))
    for position in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            wrong = bytearray(data)
            wrong[position] ^= change
            with pytest.raises(TraceError, match="sample 3: "):
                decode(wrong, label="sample 3")
    for length in range(len(data)):
        with pytest.raises(TraceError, match=r"bytes.*cut off"):
            decode(data[:length])
    with pytest.raises(TraceError, match="others behind it"):
        decode(data + b"\0")
    with pytest.raises(TraceError, match=r"begins with b'PK\\x03\\x04', expected b'MRLT'"):
        decode(b"PK\3\4" + data[4:])
    with pytest.raises(TraceError, match=r"format version 2, expected 7: .* record again"):
        decode(data[:4] + b"\2" + data[5:])
    with pytest.raises(TraceError, match="does not match its checksum"):
        decode(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (packet(b"\0", tokens=2**31), "1 bytes of routes, expected"),
        (packet(b"", tokens=2**31, layers=0), "hold no route"),
        (packet(b"", tokens=2**31, top_k=1, experts=1), "hold no route"),
        (packet(bytes(2**10), tokens=2**13, layers=2**16 - 1, top_k=0, mask=1), "hold no route"),
        (packet(b"\0", tokens=2**31, mask=1), "for the mask of"),
        (packet(b"\1", tokens=8, mask=1), "0 bytes of routes, expected 1"),
        (packet(b"\0", mask=2), "a mask 2, expected 0 or 1"),
        (packet(b"\0", top_k=5), "top-5 of 4 experts"),
        (packet(b"\0" * 99, top_k=65, experts=128), "at most top-64"),
        (packet(b"\x0f"), "row 0, layer 0: experts"),
    ],
)
def test_a_lying_header_costs_an_error_and_no_memory(data, message):
    with pytest.raises(TraceError, match=message):
        decode(data)


COUNTS = [1, 2, 3, 8, 65, 256, 257, 2**15, 2**16 - 1]
PAYLOADS = st.binary(max_size=200) | st.just(b"\xff" * 200)


@st.composite
def forged(draw) -> bytes:
    """A written trace with some header fields and perhaps the payload replaced, and both checksums right."""
    data = encode(draw(traces()))
    mask, layers, top_k, last_expert, tokens = struct.unpack_from(FIELDS, data, struct.calcsize(START))
    fields = {"mask": mask, "layers": layers, "top_k": top_k, "experts": last_expert + 1, "tokens": tokens}
    changes = {
        "mask": st.integers(0, 2),
        "tokens": st.sampled_from([0, *COUNTS, 2**28, 2**32 - 1]),
        "experts": st.sampled_from([*COUNTS[:7], 2**11]),
    }
    for name in draw(st.sets(st.sampled_from(sorted(fields)))):
        fields[name] = draw(changes.get(name, st.sampled_from([0, *COUNTS])))
    payload = bytearray(draw(st.just(data[HEADER_BYTES:]) | PAYLOADS))
    for position in draw(st.lists(st.integers(0, 200), max_size=3)):
        payload[position : position + 1] = draw(st.binary(max_size=2))
    return packet(bytes(payload), **fields)


@settings(max_examples=400, deadline=None)
@given(data=forged())
def test_whatever_has_right_checksums_is_a_trace_or_an_error_and_takes_no_more_memory_than_it_has_bytes(data):
    """A byte stands for at most 8 experts, of 1 bit each."""
    with mock.patch.object(routing_codec, "MAX_FREE_BYTES", 1 << 16):
        tracemalloc.start()
        try:
            trace = decode(data)
        except TraceError:
            trace = None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 2**20 + 600 * len(data[HEADER_BYTES:])
        if trace is not None:
            assert_equal(decode(encode(trace)), trace)


def test_what_cannot_be_written_is_refused():
    wide = RoutingTrace(np.arange(65)[None, None], 128, label="sample 1")
    with pytest.raises(TraceError, match=r"sample 1: .* top-65 of 128 experts, expected .* at most top-64"):
        encode(wide)
    for shape in ((2**32, 0, 0), (0, 2**16, 1)):
        with pytest.raises(TraceError, match=r"expected fewer than 2\^32 tokens and 2\^16 layers"):
            encode(RoutingTrace(np.empty(shape, np.uint8), 65536))


A = [[[0, 1], [2, 3]], [[0, 1], [1, 3]], [[2, 3], [0, 1]]]
B = [[[0, 2], [2, 3]], [[0, 1], [1, 3]], [[0, 1], [2, 3]]]


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
    a = random_experts(seed, tokens, layers, top_k, num_experts)
    b = random_experts(seed + 1, tokens, layers, top_k, num_experts)
    slow = reference.disagreement(a.tolist(), b.tolist())
    found = compare(RoutingTrace(a, num_experts), RoutingTrace(b[:, :, ::-1], num_experts))
    for name in ("flip", "overlap", "token_any", "layers_per_token"):
        assert getattr(found, name) == pytest.approx(slow[name], abs=1e-12)
    np.testing.assert_allclose(found.per_layer_flip, slow["per_layer_flip"], atol=1e-12)
    turned = compare(RoutingTrace(a, num_experts), RoutingTrace(a[:, :, ::-1], num_experts))
    assert (turned.flip, turned.overlap, turned.token_any) == (0, 1, 0)


def test_parts_merge():
    a, b = random_experts(0, 9, 3, 2, 6), random_experts(1, 9, 3, 2, 6)
    whole = compare(RoutingTrace(a, 6), RoutingTrace(b, 6))
    parts = [
        compare(RoutingTrace(a[:4], 6), RoutingTrace(b[:4], 6)),
        compare(RoutingTrace(a[4:4], 6), RoutingTrace(b[4:4], 6)),
        compare(RoutingTrace(a[4:], 6), RoutingTrace(b[4:], 6)),
    ]
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


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16)])
def test_narrowing(num_experts, dtype):
    experts = np.where(np.array(A, dtype=np.int64) == 3, num_experts - 1, A)
    trace = RoutingTrace(experts, num_experts)
    assert trace.experts.dtype == dtype
    np.testing.assert_array_equal(trace.experts, experts)


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


def test_missing_rows_may_hold_anything_and_become_zero():
    experts = np.array(A)
    experts[1] = -7
    trace = RoutingTrace(experts, 4, present=np.array([True, False, True]))
    assert (trace.experts[1] == 0).all()
    with pytest.raises(TraceError, match="present is"):
        RoutingTrace(experts, 4, present=np.array([True]))


def test_different_shapes_do_not_compare():
    with pytest.raises(TraceError, match="same tokens and model"):
        compare(RoutingTrace(np.array(A), 4), RoutingTrace(np.array(A)[:2], 4))
