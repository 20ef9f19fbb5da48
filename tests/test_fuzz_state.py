"""Manifests that megarl reads back, changed by anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_fuzz_run_folder import damaged, odd

from megarl.errors import DamageError
from megarl.megatron.checkpoints import folders as manifest

DIGEST = "0" * 64
MANIFEST = {"run": "r", "step": 3, "files": {"a": [1, DIGEST]}}
entries = st.one_of(odd, st.tuples(odd, odd).map(list), st.just([1, DIGEST]))
tables = st.dictionaries(st.sampled_from(["a", "../a", "/etc/passwd", "..", ".", "", "a/../b", "a\0"]), entries)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / manifest.step_name(3)
    folder.mkdir()
    (folder / "a").write_bytes(b"1")
    return folder


def test_a_sound_manifest_is_read(step: Path) -> None:
    (step / manifest.MANIFEST).write_bytes(manifest._encode(MANIFEST))
    assert manifest.read_manifest(step, "r") == {"a": (1, DIGEST)}
    assert manifest.read_run(step) == "r"


@given(name=st.sampled_from([*MANIFEST, "more"]), value=odd | tables, keep=st.booleans())
@settings(max_examples=150)
@example(name="files", value={"../a": [1, DIGEST]}, keep=True)
@example(name="files", value={"a": [True, DIGEST]}, keep=True)
@example(name="step", value=None, keep=False)
def test_a_forged_manifest_with_a_digest_that_fits_is_damage(step: Path, name: str, value: Any, keep: bool) -> None:
    record = {key: old for key, old in MANIFEST.items() if key != name} | ({name: value} if keep else {})
    try:
        (step / manifest.MANIFEST).write_bytes(manifest._encode(record))
    except UnicodeEncodeError:
        return
    if record == MANIFEST:
        return
    with pytest.raises(DamageError):
        manifest.read_manifest(step, "r")
    assert isinstance(manifest.read_run(step), str)


@given(damaged(MANIFEST))
@settings(max_examples=50)
def test_bytes_that_are_no_manifest_are_damage(step: Path, data: bytes) -> None:
    (step / manifest.MANIFEST).write_bytes(data)
    with pytest.raises(DamageError):
        manifest.read_manifest(step)


def test_a_manifest_of_100_mb_or_deep_is_damage(step: Path) -> None:
    for data in (b" " * 10**8, b'{"a":' * 10**5):
        (step / manifest.MANIFEST).write_bytes(data)
        with pytest.raises(DamageError, match=r"expected at most|levels of lists"):
            manifest.read_manifest(step)
