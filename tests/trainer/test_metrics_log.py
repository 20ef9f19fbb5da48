from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import DataError
from megarl.run.metrics_log import MetricsLog, read_metrics


def write_steps(run_dir: Path, steps: range) -> None:
    with MetricsLog(run_dir) as log:
        for step in steps:
            log.write("minibatch", step, {"loss": step + 0.25}, minibatch=0)
            log.write("minibatch", step, {"loss": step + 0.5}, minibatch=1)
            log.write("step", step, {"reward/mean": 1 / (step + 1), "time/step_s": 0.1})


def test_a_record_comes_back_as_it_went_in(tmp_path: Path) -> None:
    metrics = {"a": np.float32(0.1), "b": torch.tensor(3), "c": 1e-300, "x": math.nan, "y": math.inf, "z": -math.inf}
    with MetricsLog(tmp_path) as log:
        log.write("step", 4, metrics)
        log.write("minibatch", 5, {"loss": 0.1}, minibatch=2)
        log.write("eval", 5, {"eval/pass_rate": 1.0})
        # Readable while the run goes on, without close.
        step, minibatch, evaluation = read_metrics(tmp_path / "metrics.jsonl")
    assert (step["kind"], step["step"], step["minibatch"]) == ("step", 4, None)
    assert (step["a"], step["b"], step["c"]) == (float(np.float32(0.1)), 3.0, 1e-300)
    assert math.isnan(step["x"])
    assert (step["y"], step["z"]) == (math.inf, -math.inf)
    assert (minibatch["kind"], minibatch["minibatch"], minibatch["loss"]) == ("minibatch", 2, 0.1)
    assert evaluation["kind"] == "eval"
    assert 0 <= step["wall_s"] <= minibatch["wall_s"] <= evaluation["wall_s"] < 60


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    last_step=st.integers(-1, 6),
    torn=st.integers(0, 60),
)
def test_what_is_cut_is_what_came_later(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], last_step: int, torn: int
) -> None:
    """Against a reference that knows the lines."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    lines = [
        json.dumps(
            {"kind": "step", "step": n // 2, "minibatch": None, "wall_s": 1e3 * n + 1e3, "x": "nan", "y": 10**length}
        )
        for n, length in enumerate(lengths)
        if length < 15
    ]
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(data[: len(data) - torn])
    whole = [line for line in lines if f"{line}\n".encode() in path.read_bytes() + b"\n"]
    kept = [line for line in whole if json.loads(line)["step"] <= last_step]
    with MetricsLog(path.parent) as log:
        assert path.read_text() == "".join(f"{line}\n" for line in whole)
        assert log.truncate_after(last_step) == len(whole) - len(kept)
        log.write("step", 99, {})
    assert path.read_text().startswith("".join(f"{line}\n" for line in kept))
    *_, added = read_metrics(path)
    assert added["wall_s"] == pytest.approx(json.loads(kept[-1])["wall_s"] if kept else 0.0, abs=900.0)


def test_a_failed_cut_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    with MetricsLog(tmp_path) as log:
        monkeypatch.setattr(Path, "open", lambda self, mode="r", **_: io.FileIO(self, "r"))  # a file system went away
        with pytest.raises(OSError, match="not open for writing"):
            log.truncate_after(0)
    assert path.read_bytes() == before


def test_only_the_last_line_may_be_broken(tmp_path: Path) -> None:
    write_steps(tmp_path, range(2))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"kind"\n', *lines[2:]]))
    with pytest.raises(DataError, match=r"metrics\.jsonl:3: broken record"):
        read_metrics(path)
    path.write_bytes(b"[1]\n" + lines[0])
    with pytest.raises(DataError, match=":1: broken record"):
        read_metrics(path)
    with pytest.raises(DataError, match="no such file"):
        read_metrics(tmp_path / "absent.jsonl")
