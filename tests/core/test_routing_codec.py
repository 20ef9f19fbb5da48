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

from megarl.errors import TraceError
from megarl.routes import RoutingTrace, compare, decode, encode
from megarl.routes import codec as routing_codec
from megarl.routes.codec import HEADER_BYTES

SHAPES = {"qwen3-30b-a3b": (48, 8, 128), "qwen3-235b-a22b": (94, 8, 128), "deepseek-v3": (58, 8, 256)}
START, FIELDS = "<4sBI", "<BHHHI"
"""magic, version, CRC32 of all that follows; flags, L, K, E - 1, T."""


def random_experts(seed: int, tokens: int, layers: int, top_k: int, num_experts: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.argsort(generator.random((tokens, layers, num_experts)), axis=2)[:, :, :top_k]


def packet(payload: bytes, *, flags=0, layers=1, top_k=2, experts=4, tokens=1) -> bytes:
    """Data with a header that says what it likes, and the right checksum."""
    body = struct.pack(FIELDS, flags, layers, top_k, experts - 1, tokens) + payload
    return struct.pack(START, b"MRLT", 3, zlib.crc32(body)) + body


def assert_equal(found: RoutingTrace, expected: RoutingTrace, *, ordered: bool) -> None:
    wanted = expected.experts if ordered else np.sort(expected.experts, axis=2)
    np.testing.assert_array_equal(found.experts, wanted)
    assert found.experts.dtype == expected.experts.dtype
    assert found.num_experts == expected.num_experts
    if expected.present is None:
        assert found.present is None
    else:
        np.testing.assert_array_equal(found.present, expected.present)


@st.composite
def traces(draw) -> RoutingTrace:
    top_k = draw(st.integers(0, 6))
    num_experts = draw(st.sampled_from([max(top_k, 1), top_k + 1, 16, 256, 257, 40000]))
    tokens, layers = draw(st.integers(0, 20)), draw(st.integers(0, 3))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows = [generator.choice(num_experts, top_k, replace=False) for _ in range(tokens * layers)]
    experts = np.array(rows, dtype=np.int64).reshape(tokens, layers, top_k)
    present = draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    return RoutingTrace(experts, num_experts, present=None if present is None else np.array(present, dtype=bool))


@settings(max_examples=150, deadline=None)
@given(trace=traces(), ordered=st.booleans())
def test_round_trip(trace, ordered):
    data = encode(trace, ordered=ordered)
    assert_equal(decode(data), trace, ordered=ordered)
    assert_equal(decode(memoryview(bytearray(data))), trace, ordered=ordered)


def test_the_bytes_by_hand():
    """{1, 3}: C(1,1) + C(3,2) = 4; {0, 2}: 1; of C(4,2) = 6 sets, 3 bits each, bit by bit: 01 (of 4, 1), 00, 10."""
    trace = RoutingTrace(np.array([[[3, 1], [0, 2]]]), 4)
    assert encode(trace) == packet(bytes([0b01_00_10]), layers=2)
    assert encode(trace, ordered=True) == packet(bytes([3, 1, 0, 2]), flags=1, layers=2)
    wide = RoutingTrace(np.array([[[3, 256]]]), 257)
    assert encode(wide, ordered=True) == packet(bytes([3, 0, 0, 1]), flags=1, experts=257)
    holes = RoutingTrace(np.array([[[3, 1]], [[0, 0]]]), 4, present=np.array([True, False]))
    assert encode(holes) == packet(bytes([0b01, 0b100]), flags=2, tokens=2)


def test_a_long_trace_spans_blocks():
    trace = RoutingTrace(random_experts(0, 9000, 5, 2, 8), 8)
    assert_equal(decode(encode(trace)), trace, ordered=False)
    found = compare(decode(encode(trace)), trace)
    assert (found.flip, found.overlap) == (0, 1)


@given(trace=traces())
def test_a_trace_takes_no_more_than_its_experts_and_a_header(trace):
    plain = trace.experts.astype(np.uint8 if trace.num_experts <= 256 else np.uint16).nbytes
    mask = 0 if trace.present is None else -(-len(trace.present) // 8)
    assert len(encode(trace)) <= HEADER_BYTES + mask + plain


def test_short_sequences_take_less_than_uint8():
    """The quickstart's: 14 tokens, 3 layers, top-2 of 32. 27 bits a token, and a header of 20 bytes."""
    trace = RoutingTrace(random_experts(0, 14, 3, 2, 32), 32)
    assert len(encode(trace)) == 20 + 48 < trace.experts.nbytes == 84


@pytest.mark.parametrize("name", SHAPES)
def test_size_of_known_models(name):
    layers, top_k, num_experts = SHAPES[name]
    trace = RoutingTrace(random_experts(0, 64, layers, top_k, num_experts), num_experts)
    bound = math.ceil(math.log2(math.comb(num_experts, top_k)))
    assert len(encode(trace)) * 8 <= 1.03 * bound * 64 * layers
    assert len(encode(trace, ordered=True)) == HEADER_BYTES + 64 * layers * top_k
    assert_equal(decode(encode(trace)), trace, ordered=False)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(4, 2), (8, 7), (64, 6), (257, 1), (384, 8), (512, 10), (512, 22), (160, 6), (1024, 64), (65536, 1), (65536, 8)],
)
def test_size_of_other_shapes(num_experts, top_k):
    generator = np.random.default_rng(0)
    few = np.stack([generator.choice(num_experts, top_k, replace=False) for _ in range(100)])
    experts = few[generator.integers(0, 100, (500, 20))]
    trace = RoutingTrace(experts, num_experts, present=np.arange(500) < 499)  # an engine that misses the last row
    bound = math.ceil(math.log2(math.comb(num_experts, top_k)))
    assert len(encode(trace)) * 8 <= 1.03 * bound * 500 * 20
    assert_equal(decode(encode(trace)), trace, ordered=False)


def test_missing_rows_cost_nothing():
    experts = random_experts(0, 4000, 6, 2, 8)
    present = np.zeros(4000, dtype=bool)
    present[1000:1010] = True
    assert len(encode(RoutingTrace(experts, 8, present=present))) == HEADER_BYTES + 20 + math.ceil(10 * 6 * 5 / 8)
    present = np.arange(4000) % 3 == 0
    rows = int(present.sum())
    assert len(encode(RoutingTrace(experts, 8, present=present))) == HEADER_BYTES + 500 + math.ceil(rows * 6 * 5 / 8)


@pytest.mark.parametrize("ordered", [False, True])
def test_damage_anywhere_is_found(ordered):
    experts = np.tile(random_experts(0, 1, 2, 2, 8), (40, 1, 1))
    data = encode(RoutingTrace(experts, 8, present=np.arange(40) % 7 > 0), ordered=ordered)
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


def test_what_is_found_is_said():
    data = encode(RoutingTrace(random_experts(0, 3, 2, 2, 8), 8))
    with pytest.raises(TraceError, match=r"begins with b'PK\\x03\\x04', expected b'MRLT'"):
        decode(b"PK\3\4" + data[4:])
    with pytest.raises(TraceError, match=r"format version 2, expected 3: .* record again"):
        decode(data[:4] + b"\2" + data[5:])
    for wrong in (data[:12] + b"\7" + data[13:], data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(TraceError, match="does not match its checksum"):
            decode(wrong)


RUNS = struct.pack("<3I", 2, 1, 4_000_000_000)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (packet(b"\0", tokens=2**31), "1 bytes of routes, expected"),
        (packet(b"\0", tokens=2**32 - 1, layers=2**16 - 1), "1 bytes of routes, expected"),
        (packet(b"", tokens=2**31, layers=0), "hold no route"),
        (packet(b"", tokens=2**31, top_k=4), "hold no route"),
        (packet(b"", tokens=2**31, top_k=0), "hold no route"),
        (packet(b"", tokens=2**14, layers=2**14, top_k=0), "hold no route"),
        (packet(b"", tokens=2**12, layers=2**15, top_k=0, flags=1), "hold no route"),
        (packet(bytes(2**10), tokens=2**13, layers=2**15, top_k=0, flags=2), "hold no route"),
        (packet(b"", tokens=2**23, top_k=4), "hold no route"),
        (packet(b"\0", tokens=2**31, flags=2), "for the mask of"),
        (packet(b"", tokens=1, flags=4), "expected 4 for the mask of"),
        (packet(struct.pack("<I", 2**32 - 1), flags=4), "for the mask of"),
        (packet(RUNS, tokens=2**31, flags=4), "a mask of 4000000001 tokens"),
        (packet(RUNS, tokens=4_000_000_001, flags=4), "0 bytes of routes, expected 1"),
        (packet(RUNS + b"\0", tokens=4_000_000_001, flags=4), "4000000000 tokens of 1 layers, top-2, hold no route"),
        (packet(struct.pack("<2I", 1, 4_000_000_000), tokens=4_000_000_000, flags=4), "0 bytes of routes"),
        (packet(b"\0", flags=8), "flags 0x08"),
        (packet(b"\0", flags=6), "flags 0x06"),
        (packet(b"\0", top_k=5), "top-5 of 4 experts"),
        (packet(b"\0" * 99, top_k=65, experts=128), "ordered=True"),
        (packet(b"\x07"), "row 0, layer 0 holds a number that is of no 2 of 4 experts"),
        (packet(b"\x08\x08", flags=1), r"row 0, layer 0: experts \[8, 8\]"),
        (packet(b"\x03\x03", flags=1), r"experts \[3, 3\], expected 2 different ones of 0 to 3 "),
    ],
)
def test_a_lying_header_costs_an_error_and_no_memory(data, message):
    with pytest.raises(TraceError, match=message):
        decode(data)


COUNTS = [1, 2, 3, 8, 65, 256, 257, 2**15, 2**16 - 1]
PAYLOADS = st.one_of(
    st.binary(max_size=200),
    st.just(b"\xff" * 200),
    st.lists(st.sampled_from([0, 1, 2, 7, 2**16, 2**32 - 1]), max_size=5).map(
        lambda runs: struct.pack(f"<{len(runs) + 1}I", len(runs), *runs)
    ),
)


@st.composite
def forged(draw) -> bytes:
    """A written trace with some header fields and perhaps the payload replaced, and both checksums right."""
    data = encode(draw(traces()), ordered=draw(st.booleans()))
    flags, layers, top_k, last_expert, tokens = struct.unpack_from(FIELDS, data, struct.calcsize(START))
    fields = {"flags": flags, "layers": layers, "top_k": top_k, "experts": last_expert + 1, "tokens": tokens}
    changes = {
        "flags": st.integers(0, 15),
        "tokens": st.sampled_from([0, *COUNTS, 2**28, 2**32 - 1]),
        "experts": st.sampled_from([*COUNTS, 2**16]),
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
    """A byte stands for at most 74 experts of one byte (7 bits for 64 of 65); 32 MiB are the tables of binomials."""
    with (
        mock.patch.object(routing_codec, "MAX_MISSING_BYTES", 1 << 16),
        mock.patch.object(routing_codec, "MAX_FREE_BYTES", 1 << 16),
    ):
        tracemalloc.start()
        try:
            trace = decode(data)
        except TraceError:
            trace = None
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 2**25 + 6 * 74 * len(data[HEADER_BYTES:])
        if trace is not None:
            ordered = bool(data[9] & 1)
            assert_equal(decode(encode(trace, ordered=ordered)), trace, ordered=ordered)


def test_what_cannot_be_written_is_refused():
    wide = RoutingTrace(np.arange(65)[None, None], 128, label="sample 1")
    with pytest.raises(TraceError, match=r"sample 1: top-65 of 128 experts.*ordered=True"):
        encode(wide)
    assert_equal(decode(encode(wide, ordered=True)), wide, ordered=True)
    for shape in ((2**32, 0, 0), (0, 2**16, 1), (0, 1, 2**16)):
        with pytest.raises(TraceError, match=r"expected fewer than 2\^32 tokens, 2\^16 layers and 2\^16 experts"):
            encode(RoutingTrace(np.empty(shape, np.uint8), 65536), ordered=True)
