from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megarl.core.types import Rollout
from megarl.errors import ConfigError, TraceError
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, from_rollout, read_traces, write_traces

INFO = TraceInfo("tiny", layers=(1, 2, 5), num_experts=8, top_k=2)


def experts(seed: int, tokens: int) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((tokens, 3, 8)), axis=2)[:, :, :2]


def sequence(seed: int, tokens: int = 6, missing: tuple[int, ...] = (), columns: bool = True) -> TracedSequence:
    present = np.ones(tokens, dtype=bool)
    present[list(missing)] = False
    trace = RoutingTrace(experts(seed, tokens), 8, present=present if missing else None)
    if not columns:
        return TracedSequence(f"sample {seed}", trace)
    return TracedSequence(
        f"sample {seed}",
        trace,
        tokens=np.arange(seed, seed + tokens, dtype=np.int32),
        row_versions=np.full(tokens, 10 + seed, dtype=np.int32),
        gate_weights=np.random.default_rng(seed).random((tokens, 3, 2), np.float32),
    )


def test_round_trip(tmp_path):
    written = [sequence(0), sequence(1, tokens=40, missing=(0, 39)), sequence(2, tokens=0), sequence(3, tokens=1)]
    path = tmp_path / "a.safetensors"
    write_traces(path, INFO, written)
    file = read_traces(path)
    assert file.info == INFO
    assert file.names == ("sample 0", "sample 1", "sample 2", "sample 3")
    assert (len(file), file.num_tokens, file.lengths.tolist()) == (4, 47, [6, 40, 0, 1])
    assert file.weight_versions == (10, 11, 13)
    assert file.columns == ("tokens", "row_versions", "gate_weights")
    for expected, found in zip(written, file, strict=True):
        np.testing.assert_array_equal(found.trace.experts, expected.trace.experts)
        assert found.trace.num_missing == expected.trace.num_missing
        for column in file.columns:
            np.testing.assert_array_equal(getattr(found, column), getattr(expected, column))
    assert "sample 3" in file
    assert "sample 4" not in file
    np.testing.assert_array_equal(file["sample 3"].tokens, [3])
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_what_cannot_be_written(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(ConfigError, match="there is no folder"):
        write_traces(tmp_path / "no" / "a.safetensors", INFO, [])
    with pytest.raises(TraceError, match=r"sample 0: routes \[6, 3, 2\] of 8 experts, expected \[6, 2, 2\] of 8"):
        write_traces(path, replace(INFO, layers=(1, 2)), [sequence(0)])
    with pytest.raises(TraceError, match=r"expected .* of 9 for tiny"):
        write_traces(path, replace(INFO, num_experts=9), [sequence(0)])
    with pytest.raises(TraceError, match="1 of 2 sequences have tokens"):
        write_traces(path, INFO, [sequence(0), sequence(1, columns=False)])
    assert not path.exists()


def test_columns_must_fit_the_trace():
    for change, message in (
        ({"tokens": np.arange(5, dtype=np.int32)}, r"tokens is int32 \[5\], expected int32 \[6\]"),
        ({"tokens": list(range(6))}, r"tokens is int64 \[6\], expected int32 \[6\]"),
        ({"row_versions": np.arange(6)}, "row_versions is int64"),
        ({"gate_weights": np.ones((6, 6), np.float32)}, r"gate_weights is float32 \[6, 6\], expected .* \[6, 3, 2\]"),
    ):
        with pytest.raises(TraceError, match=f"sample 0: {message}"):
            replace(sequence(0, missing=(4,)), **change)


def test_from_rollout(tmp_path):
    tokens, zeros = np.arange(5, dtype=np.int32), np.zeros(5, dtype=np.float32)
    routed, versions = experts(0, 5).astype(np.uint8), np.array([7, 7, 7, 8, 8], dtype=np.int32)
    rollout = Rollout(3, 1, tokens, tokens > 1, zeros, routed, tokens < 4, versions, "stop")
    write_traces(tmp_path / "a.safetensors", INFO, [from_rollout(rollout, 8, "step 2 ")])
    found = read_traces(tmp_path / "a.safetensors")["step 2 group 3 sample 1"]
    assert found.trace.num_missing == 1
    assert found.row_versions.tolist() == [7, 7, 7, 8, 8]
    np.testing.assert_array_equal(found.trace.experts[:4], routed[:4])
    with pytest.raises(TraceError, match="group 3 sample 1: the rollout has no routes"):
        from_rollout(replace(rollout, routed_experts=None), 8)


def rewrite(path, metadata_change=(), **tensors) -> None:
    """Write the file again with something changed; None takes a tensor out."""
    file = read_traces(path)
    metadata = {
        "format": "megarl-routing-traces",
        "format_version": "1",
        "model": file.info.model,
        "layers": "[1, 2, 5]",
        "num_experts": "8",
        "top_k": "2",
        "weight_versions": "[]",
        "names": '["sample 0", "sample 1"]',
    }
    changed = {name: t for name, t in (load_file(path) | tensors).items() if t is not None}
    save_file(changed, path, metadata | dict(metadata_change))


INT64 = np.int64


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"format": "weights"}, {}, r"format 'weights'\); expected routing traces"),
        ({"names": '["sample 0", 3]'}, {}, "names = .* valid string"),
        ({"names": '["a"]'}, {}, "route_offsets has 3 entries, expected 2"),
        ({"top_k": "-2"}, {}, "top_k = '-2': Input should be greater than or equal to 1"),
        ({}, {"routes": None}, "tensor routes found none, expected uint8"),
        ({}, {"cu_seqlens": np.array([0, 6, 12], dtype=np.int32)}, "cu_seqlens found int32"),
        ({}, {"cu_seqlens": np.array([0, 9, 3], dtype=INT64)}, "rise from 0 to 3"),
        ({}, {"tokens": np.zeros(11, dtype=np.int32)}, "tokens has 11 entries, expected 12"),
    ],
)
def test_a_file_that_contradicts_itself(tmp_path, metadata, tensors, message):
    path = tmp_path / "a.safetensors"
    write_traces(path, INFO, [sequence(0), sequence(1)])
    rewrite(path, metadata, **tensors)
    with pytest.raises(TraceError, match=message):
        read_traces(path)


def test_a_damaged_sequence_is_named_and_the_others_still_read(tmp_path):
    path = tmp_path / "a.safetensors"
    write_traces(path, INFO, [sequence(0), sequence(1)])
    routes = load_file(path)["routes"].copy()
    routes[-1] ^= 1
    rewrite(path, routes=routes)
    file = read_traces(path)
    np.testing.assert_array_equal(file[0].tokens, sequence(0).tokens)
    with pytest.raises(TraceError, match=r"a\.safetensors: sample 1: the data of 34 bytes does not match its checksum"):
        file[1]
    rewrite(path, {"num_experts": "9"})
    with pytest.raises(TraceError, match=r"sample 0: routes .* of 8 experts, expected .* of 9 for tiny"):
        read_traces(path)[0]


def test_not_such_a_file(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(TraceError, match="No such file"):
        read_traces(path)
    path.write_bytes(b"abc")
    with pytest.raises(TraceError, match="not a readable safetensors file"):
        read_traces(path)
