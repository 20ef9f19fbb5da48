"""The Triton kernels of ``linear_logprobs``, in Triton's interpreter, against the block version, their oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from environments import triton_release

HERE = Path(__file__).parent
CASES = """
log-probabilities; entropies; kept sets; kept sets and entropies; bf16; bf16, kept sets; fp16; one block
no padding, whole blocks; one token; extreme logits; two ranks; two ranks, kept sets; two ranks, one has only padding
"""
NAMES = [name.strip() for name in CASES.replace("\n", ";").split(";") if name.strip()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("kernels")
    path = os.pathsep.join([str(triton_release()), str(HERE.parents[1]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    outs = [folder / f"{rank}.pt" for rank in range(2)]
    command = [sys.executable, "-W", "ignore", str(HERE / "cases_logprob_kernels.py"), str(folder / "store")]
    ranks = [subprocess.Popen([*command, str(rank), str(out)], env=environment) for rank, out in enumerate(outs)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    return [torch.load(out) for out in outs]


def test_every_case_was_run(results: list[dict[str, Any]]) -> None:
    assert list(results[0]) == NAMES
    assert list(results[1]) == [name for name in NAMES if name.startswith("two ranks")]


@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_give_what_the_block_version_gives(name: str, results: list[dict[str, Any]]) -> None:
    for rank in results:
        if name not in rank:
            continue
        expected, found = rank[name]["blocks"], rank[name]["kernels"]
        # Gradients of logits may fall to the other side of a rounding to 16 bits.
        tolerance = {"bf16": 1e-3, "fp16": 1e-3}.get(name.split(",")[0], 1e-5)
        for column, values in expected.items():
            assert values.abs().sum() > 0 or name.endswith("only padding"), column
            assert found[column].dtype == values.dtype
            torch.testing.assert_close(
                found[column],
                values,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, column=column: f"{column}: {text}",
            )
        assert bool(expected["logprobs"].isneginf().any()) == ("kept" in name or name == "extreme logits")
