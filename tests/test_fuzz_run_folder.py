"""Commands that read a run folder, on files that anything may have written into: one line and no traceback.

What hypothesis finds is bounded: a few hundred files. Every command runs in this process, as ``megarl.cli.main``.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from run_configs import run_text

from megarl.cli import main
from megarl.config.file import load
from megarl.errors import ConfigError, printable

SHARED = [HealthCheck.function_scoped_fixture]  # what capsys holds is taken before each example
CONTROL = "\x1b]0;owned\x07\x1b[31m\x08\r\u202e\ud800"
STATUS: dict[str, Any] = {
    **{"state": "failed", "step": 3, "steps": 9, "phase": "train", "phase_since": 1.0, "started": 1.0, "updated": 2.0},
    **{"step_s": 1.5, "tokens_per_s": None, "eta_s": 3.0, "ranks": 2, "last_error": "boom", "error_kind": "X"},
    **{"host": "h", "pid": 1, "job": None, "restart": None, "attempt": None, "health": []},
}
RECORD = {"kind": "step", "step": 1, "minibatch": None, "wall_s": 1.0, "reward/mean": 0.5}
SIGN = {"rank": 0, "host": socket.gethostname(), "pid": 1, "step": 2, "phase": "train", "beat": 1.0, "beat_s": 2.0}
SOUND = {"status": STATUS, "launch": {"says": "running"}, "lock": {"host": "h", "pid": 1, "since": ""}, "sign": SIGN}
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
    given = {
        "status": STATUS,
        "launch": {"says": "running", "launch": "a"},
        "lock": {"host": "h", "pid": 1, "since": ""},
        "sign": SIGN,
    }
    for name, good in given.items():
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
    "utf-16": CONFIG.encode("utf-16"),
    "NUL": b"[run]\nsteps = 1\0\n",
    "deep": b"a = " + b"[" * 100_000,
    "deep tables": b"[" + b"a." * 5_000 + b"b]\n",
    "digits": b"a = " + b"1" * 10_000,
    "control": CONFIG.encode() + '[run\x1b]0;owned\x07]\n"\u202e" = 1'.encode(),
    "control in a key": CONFIG.encode() + b'"a\\u001b[31m" = 1\n',
    "control in a value": CONFIG.replace("0.0001", '"\\u001b[31m\\u202e"').encode(),
    "types": CONFIG.replace("steps = 3", "steps = [[1979-05-27, nan]]").encode(),
    "huge": CONFIG.replace("steps = 3", "steps = 1e400").encode(),
    "array of tables": b"[[run]]\nsteps = 1\n",
    "empty": b"",
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


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(max_examples=100)
def test_no_bytes_make_a_configuration_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load(path)


def test_a_disk_that_is_full_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(folder)

    def full(*_: object) -> None:
        with open("/dev/full", "wb", 0) as file:
            file.write(b"1")

    monkeypatch.setattr("megarl.files.outputs.write_atomically", full)
    code, said = run(capsys, "report", folder)
    assert code == 2
    assert "No space left on device" in said


KEYS = ["run.steps", "model.path", "optim.lr", "rollout.engine", "train.objective", "parallel.tp", "sglang.urls"]


@given(st.sampled_from([*KEYS, "megatron.moe_router_topk", "reward.function", "environment.tools"]), odd)
@settings(max_examples=150)
def test_odd_values_are_refused_or_taken(tmp_path_factory: pytest.TempPathFactory, key: str, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.toml"
    path.write_text(CONFIG)
    with suppress(ConfigError):
        load(path, {key: value})


NO_TRACES = (b"", b"\xff" * 100, b"\x08" + bytes(7) + b"{}      ", b"\xff" * 7 + b"\x7f", bytes(999))


@pytest.mark.parametrize("data", NO_TRACES)
def test_traces_that_are_none_are_one_line(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"a{CONTROL[:3]}.safetensors"
    path.write_bytes(data)
    assert run(capsys, "trace", "inspect", path)[0] == 2
