"""`megarl doctor` on the null GPU: it attends with Transformer Engine, and names two copies of cuDNN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not os.environ.get("NULL_GPU"), reason="a real GPU needs no stand-in for TE's kernels")
SCRIPT = """
import ctypes, json, sys
from null_gpu.computing import computing
from null_gpu.te import install
with computing():
    install()
    for library in sys.argv[1:]:
        ctypes.CDLL(library)
    if sys.argv[1:]:
        import transformer_engine.pytorch as engine
        def fail(*_, **__): raise RuntimeError("CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED")
        engine.DotProductAttention.forward = fail
    from megarl.ops.doctor.machine import run_trial
    checks, _ = run_trial(None, set())
print(json.dumps([[check.name, check.status, check.says()] for check in checks]))
"""


def attention_check(*libraries: Path) -> list[str]:
    """Status and sentence of doctor's check of attention, in a process that has loaded these libraries."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, libraries)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    checks = json.loads(done.stdout.splitlines()[-1])
    assert {status for name, status, _ in checks if not name.startswith("attention")} <= {"ok"}
    return next(rest for name, *rest in checks if name == "attention of transformer-engine")


def test_attention_works() -> None:
    status, sentence = attention_check()
    assert status == "ok"
    assert sentence.startswith("works; cuDNN of ")


def test_a_failure_names_the_copies_of_cudnn(tmp_path: Path) -> None:
    spec = find_spec("nvidia.cudnn")
    assert spec is not None
    assert spec.submodule_search_locations
    wheel = Path(spec.submodule_search_locations[0]) / "lib/libcudnn.so.9"
    copy = tmp_path / wheel.name
    copy.write_bytes(wheel.read_bytes())
    status, sentence = attention_check(wheel, copy)
    assert status == "failed"
    assert "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED" in sentence
    assert str(wheel.parent.resolve()) in sentence
    assert f"{tmp_path}" in sentence
    assert "unset LD_LIBRARY_PATH" in sentence
