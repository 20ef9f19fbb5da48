"""The null NCCL has NCCL's own semantics between processes, seen through torch's real ProcessGroupNCCL.

All cases of nccl_cases.py run in one launch; a test reads what the ranks of its case returned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).with_name("nccl_cases.py")
pytestmark = [
    pytest.mark.gate,
    pytest.mark.skipif("NULL_GPU" not in os.environ, reason="these are the rules of the stand-in for NCCL"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    folder = tmp_path_factory.mktemp("nccl")
    environment = {**os.environ, "NULL_GPU_DEVICES": "4"}
    words = [sys.executable, "-W", "ignore", str(CASES), str(folder)]
    run = subprocess.run(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )

    def values(case: str) -> list[Any]:
        files = sorted(folder.glob(f"{case}.*.json"))
        found = [json.loads(file.read_text()) for file in files]
        errors = [one["error"] for one in found if "error" in one]
        assert found, f"no rank of {case} came to its end\n{run.stdout}"
        assert not errors, "\n".join(errors)
        return [one["value"] for one in found]

    return values


RETURNED = {
    **dict.fromkeys(["reductions", "collectives"], [[]] * 4),  # the wrong ones
    "uneven_exchange": [[10.0 * source + rank for source in range(4) for _ in range(rank + 1)] for rank in range(4)],
}


@pytest.mark.parametrize("case", RETURNED)
def test_ranks_return(ranks: Callable[[str], list[Any]], case: str) -> None:
    assert ranks(case) == RETURNED[case]


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("unequal_counts", "AllReduce of 4 fp32, sum on rank 0"),
        ("unequal_counts", "AllReduce of 5 fp32, sum on rank 1"),
        ("rank_that_ends", "has ended"),  # at the limit the message would say "waited"
    ],
)
def test_ranks_that_disagree_or_are_gone_fail_the_others(
    ranks: Callable[[str], list[Any]], case: str, word: str
) -> None:
    for message in filter(None, ranks(case)):
        assert word in message, message
