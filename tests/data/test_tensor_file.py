"""Files of tensors, against the safetensors library in both directions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors import safe_open
from safetensors.numpy import save_file

from megarl.errors import TraceError
from megarl.routes.trace_file import dump_tensors, load_tensors

TENSORS = st.dictionaries(
    st.text(max_size=6).filter(lambda name: name != "__metadata__"),
    st.sampled_from(["<u1", "<i1", "<u2", "<i4", "<i8"]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    ),
    max_size=4,
)
METADATA = st.dictionaries(st.text(max_size=6), st.text(max_size=9), min_size=1, max_size=3)
"""Not empty: without metadata and tensors the library writes a header that is not JSON."""


def load(path):
    return load_tensors(path, lambda metadata: None)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


@given(tensors=TENSORS, metadata=METADATA)
def test_the_library_reads_what_is_written(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("file") / "a"
    path.write_bytes(dump_tensors(tensors, metadata))
    with safe_open(path, framework="np") as file:
        assert (file.metadata() or {}) == metadata
        assert_same({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118 (not a mapping)


@given(tensors=TENSORS, metadata=METADATA)
def test_what_the_library_writes_is_read(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("file") / "a"
    save_file(tensors, path, metadata)
    found, texts = load(path)
    assert texts == metadata
    assert_same(found, tensors)


def test_the_check_comes_before_the_tensors(tmp_path):
    save_file({"weight": np.ones(3, np.float16)}, tmp_path / "model", {"format": "pt"})
    with pytest.raises(LookupError, match="pt"):
        load_tensors(tmp_path / "model", lambda metadata: (_ for _ in ()).throw(LookupError(metadata["format"])))


def entry(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HEADERS = [
    *([], {"__metadata__": {"a": 1}}, {"a": entry(0, 9)}, {"a": entry(0, 3)}, {"a": entry(1, 4)}, {"a": 5}),
    *({"a": entry(0, 3), "b": entry(2, 4)}, {"a": entry(0, 4, "U9")}),
    *({"a": entry(0, 4, shape=[2, 3])}, {"a": entry(0, 4, shape=[-2, -2])}),
]
TEXTS = [*(json.dumps(header).encode() for header in HEADERS), b"[\xff", b"[" * 200_000]
FILES = [*(len(text).to_bytes(8, "little") + text + b"\1\2\3\4" for text in TEXTS), b"", b"\0" * 7, b"\xff" * 40]


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
def test_a_wrong_header(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(TraceError, match="not a readable safetensors file"):
        load(tmp_path / "a")
