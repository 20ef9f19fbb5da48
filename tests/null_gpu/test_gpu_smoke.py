"""The script that users run on their GPU, on the null GPU: its cases train, its checks hold, its report is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not os.environ.get("NULL_GPU"), reason="users run it on a real GPU")


def test_the_cases_train_and_the_report_says_so(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent / "smoke"), str(ROOT / "tests"), os.environ["PYTHONPATH"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}
    words = [sys.executable, str(ROOT / "tools" / "gpu_smoke.py"), "--size", "tiny", "--out", str(tmp_path / "smoke")]
    words += ["--only", "doctor", "with", "FP8"]  # a kernel of the gap's engines is not on the null GPU
    result = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=7200)
    report = json.loads((tmp_path / "smoke" / "report.json").read_text())
    text = (tmp_path / "smoke" / "report.txt").read_text()
    assert result.returncode == 0, text
    assert text in result.stdout
    cases = {case["name"]: case for case in report["cases"]}
    assert [name for name, case in cases.items() if case["not_run"] is None] == [
        "doctor",
        "without TE, r3",
        "with TE, r3",
        "with TE, none",
    ]
    assert "no SGLang in this environment" in cases["FP8 to SGLang, r3"]["not_run"]
    assert all(check["passed"] for check in report["checks"])
    assert len(report["checks"]) == 16
    for case in list(cases.values())[1:4]:
        assert 1e-4 < case["metrics"]["rollout/ratio/std"] < 3e-3
    assert cases["with TE, r3"]["metrics"]["router/flip"] == 0
    # Whether two roundings choose other experts in these few tokens is chance.
    assert 0 <= cases["with TE, none"]["metrics"]["router/flip"] < 0.05
