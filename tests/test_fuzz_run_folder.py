"""What a run folder holds, after anything may have written into it: one line and no traceback."""

from __future__ import annotations

import json
import math
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from run_configs import run_text

from megarl.cli import main
from megarl.errors import DamageError, DataError, printable
from megarl.files.foreign_json import MAX_DEPTH, parse_json
from megarl.megatron.checkpoints import folders as manifest

SHARED = [HealthCheck.function_scoped_fixture]  # what capsys holds is taken before each example
CONTROL = "\x1b]0;owned\x07\x1b[31m\x08\r\u202e\ud800"
STATUS: dict[str, Any] = {
    **{"state": "failed", "step": 3, "steps": 9, "phase": "train", "phase_since": 1.0, "started": 1.0, "updated": 2.0},
    **{"step_s": 1.5, "tokens_per_s": None, "eta_s": 3.0, "ranks": 2, "last_error": "boom", "error_kind": "X"},
    **{"host": "h", "pid": 1, "job": None, "restart": None, "attempt": None, "health": []},
}
RECORD = {"kind": "step", "step": 1, "minibatch": None, "wall_s": 1.0, "reward/mean": 0.5}
SIGN = {"rank": 0, "host": socket.gethostname(), "pid": 1, "step": 2, "phase": "train", "beat": 1.0, "beat_s": 2.0}
SOUND = {
    "status": STATUS,
    "launch": {"says": "running", "launch": "a"},
    "lock": {"host": "h", "pid": 1, "since": ""},
    "sign": SIGN,
}
CONFIG = run_text()

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**400), 1e308, float("nan"), float("inf"), CONTROL, "", [], {}, [[]], {"says": 1}]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
)


def damaged(good: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A record in which a field is odd or missing, which is cut, or which is something else."""
    changed = st.builds(lambda name, value: json.dumps(good | {name: value}), st.sampled_from([*good]), odd)
    without = st.builds(lambda name: json.dumps({k: v for k, v in good.items() if k != name}), st.sampled_from([*good]))
    cut = st.builds(lambda end: json.dumps(good)[:end], st.integers(0, 200))
    other = st.builds(json.dumps, odd)
    special = st.sampled_from(["[" * 100_000, '{"a":' * 50_000, "1" * 5000, "\0", '{"step": 1e999}', ""])
    text = st.one_of(changed, without, cut, other, special)
    return st.one_of(text.map(lambda t: t.encode("utf-8", "surrogatepass")), st.binary(max_size=40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "ranks").mkdir()
    return folder


def fill(folder: Path, **files: bytes) -> None:
    """Write a sound run, but for ``files``."""
    for name, good in SOUND.items():
        data = files.get(name, json.dumps(good).encode())
        place = {"lock": "lock", "sign": "ranks/00000.json"}.get(name, f"{name}.json")
        (folder / place).write_bytes(data)
    (folder / "launch.lock").write_bytes(files.get("lock", b"{}"))
    (folder / "metrics.jsonl").write_bytes(files.get("metrics", (json.dumps(RECORD) + "\n").encode()))
    (folder / "config.toml").write_bytes(files.get("config", CONFIG.encode()))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """The exit code, and what was printed; fails if a terminal would obey any of it."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    found = capsys.readouterr()
    said = found.out + found.err
    assert "Traceback" not in said
    assert "the traceback is in" not in said
    assert said == printable(said), said
    if code == 2:
        assert found.err.startswith("megarl: error: ")
        assert found.err.count("\n") == 1
    return code, said


@given(name=st.sampled_from([*SOUND]), data=st.data())
@settings(max_examples=100, suppress_health_check=SHARED)
@example(name="status", data=None)
@example(name="sign", data=None)
def test_status_reads_whatever_is_there(folder: Path, capsys: pytest.CaptureFixture[str], name: str, data: Any) -> None:
    known = {"status": STATUS | {"last_error": CONTROL, "host": CONTROL}, "sign": SIGN | {"beat_s": None}}
    fill(folder, **{name: json.dumps(known[name]).encode() if data is None else data.draw(damaged(SOUND[name]))})
    for words in ([], ["--json"]):
        assert run(capsys, "status", folder, *words)[0] in (0, 1, 2)


@given(damaged(RECORD))
@settings(max_examples=25, suppress_health_check=SHARED)
@example(json.dumps(RECORD | {"kind": "other"}).encode())
@example(json.dumps(RECORD | {"kind": "minibatch"}).encode())
def test_report_reads_whatever_is_there(folder: Path, capsys: pytest.CaptureFixture[str], line: bytes) -> None:
    good = json.dumps(RECORD).encode()
    fill(folder, metrics=good + b"\n" + line + b"\n" + good + b"\n")
    assert run(capsys, "report", folder)[0] in (0, 2)


CONFIGS = {
    "binary": bytes(range(256)) * 4,
    "deep": b"a = " + b"[" * 100_000,
    "digits": b"a = " + b"1" * 10_000,
    "control": CONFIG.encode() + '[run\x1b]0;owned\x07]\n"\u202e" = 1'.encode(),
    "control in a value": CONFIG.replace("0.0001", '"\\u001b[31m\\u202e"').encode(),
    "types": CONFIG.replace("steps = 3", "steps = [[1979-05-27, nan]]").encode(),
    "huge": CONFIG.replace("steps = 3", "steps = 1e400").encode(),
    "large": b"#" * 100_000_000,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_is_none_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(folder, config=CONFIGS[name])
    path = folder / "config.toml"
    for command in ("plan", "train", "launch", "eval", "sft"):
        code, said = run(capsys, command, path)
        assert code == 2, command
        assert len(said) < 2000
    assert run(capsys, "report", folder)[0] in (0, 2)


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


@pytest.mark.parametrize("value", [{"a": [1, -2.5, None, True, "ü", ""]}, [], 0, "x", 1 << 80, {"a": {}}])
def test_json_is_read_as_the_standard_library_does(value: Any) -> None:
    assert parse_json(json.dumps(value).encode(), "it", 1000) == value
    assert parse_json(json.dumps(value, ensure_ascii=False), "it", 1000) == value


def test_values_that_are_no_numbers_are_left_to_the_caller_and_the_deepest_can_be_written_again() -> None:
    found = parse_json(b"[NaN, Infinity, 1e999]", "it", 1000)
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, math.inf]
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(parse_json(text, "it", 1000)) == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "a/b.json holds more than 201 levels of lists and objects"),
        (b"", "a/b.json holds no JSON, EOF"),
        (b"<html>", "a/b.json holds no JSON, expected value"),
        (b'{"a": 1} x', "a/b.json holds no JSON, trailing"),
        (b"9" * 5000, "a/b.json holds no JSON, number out of range"),
        (b"[1" + b" " * 200_000 + b"]", "a/b.json holds 200003 bytes of JSON, expected at most 200000"),
    ],
)
def test_anything_else_is_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}") as caught:
        parse_json(data, "a/b.json", 200_000)
    assert "\n" not in str(caught.value)
