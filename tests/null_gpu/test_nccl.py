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
    "reductions": [[]] * 4,  # the wrong ones, of every type and operation
    "uneven_exchange": [[10.0 * source + rank for source in range(4) for _ in range(rank + 1)] for rank in range(4)],
    "order_of_messages": [[2.0, 3.0], [0.0, 1.0]],  # between two ranks in order, whatever the tags
    "ring_in_a_group": [True] * 4,  # a group sends and receives at once
    "send_waits_for_its_receiver": [[False, True], []],
    "stream_order": [[2.0 * turn + 1.0 for turn in range(20)]] * 2,  # streams wait for asynchronous calls
    "groups_by_split": [[1.0, 6.0], [1.0, 6.0], [5.0, 6.0], [5.0, 6.0]],
}


@pytest.mark.parametrize("case", RETURNED)
def test_ranks_return(ranks: Callable[[str], list[Any]], case: str) -> None:
    assert ranks(case) == RETURNED[case]


def test_collective_calls_move_the_right_data(ranks: Callable[[str], list[Any]]) -> None:
    found = ranks("collectives")
    names = {name for one in found for name in one}
    assert len(names) == 9
    assert [name for one in found for name, right in one.items() if not right] == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unequal_counts", ["AllReduce of 4 fp32, sum on rank 0", "AllReduce of 5 fp32, sum on rank 1"]),
        ("unequal_types", ["Broadcast of 4 fp32, root 0 on rank 0", "Broadcast of 4 bf16, root 0 on rank 1"]),
        ("unequal_calls", ["Broadcast of 4 fp32, root 0 on rank 0", "AllReduce of 4 fp32, sum on rank 1"]),
        ("unequal_messages", ["rank 0 sends 4 fp32, rank 1 receives 5 fp32"]),
        ("same_device_twice", ["Duplicate GPU detected"]),
    ],
)
def test_ranks_that_disagree_are_refused(ranks: Callable[[str], list[Any]], case: str, words: list[str]) -> None:
    found = ranks(case)
    assert len(found) == 2
    for message in found:
        assert all(word in message for word in words), message


def test_two_sends_without_a_group_wait_for_their_receivers(ranks: Callable[[str], list[Any]]) -> None:
    messages = ranks("sends_without_a_group")
    for rank, message in enumerate(messages):
        assert f"Send of 4 fp32 to rank {1 - rank}: " in message
    # The first to give up ends, and the other may see that before its own limit.
    assert any(f"waited 1 s for rank {1 - rank}" in message for rank, message in enumerate(messages))


@pytest.mark.parametrize(
    ("case", "word"), [("rank_that_ends", "has ended"), ("rank_that_aborts", "rank 1 has aborted")]
)
def test_a_rank_that_is_gone_fails_the_others(ranks: Callable[[str], list[Any]], case: str, word: str) -> None:
    assert word in ranks(case)[0]  # at the limit the message would say "waited"


def test_a_rank_that_stays_away_fails_the_others_after_the_limit(ranks: Callable[[str], list[Any]]) -> None:
    assert "waited 1 s for rank 1" in ranks("rank_that_stays_away")[0]


def test_calls_and_bytes_are_counted(ranks: Callable[[str], list[Any]]) -> None:
    for rank, found in enumerate(ranks("counted")):
        assert found["calls"] == [1, 1, 1, 1, 1, 0]
        assert found["bytes"] == [40, 80, 40, 40, 40, 0]
        assert found["unknown"] == -1
        assert [line[3:] for line in found["table"]] == [
            ["AllReduce", "-1", "1", "40"],
            ["AllGather", "-1", "1", "80"],
            ["ReduceScatter", "-1", "1", "40"],
            ["Send", "-1", "1", "40"],
            ["Send", str(1 - rank), "-1", "40"],
            ["Recv", "-1", "1", "40"],
            ["Recv", str(1 - rank), "-1", "40"],
        ]


def test_wrong_arguments_are_refused(ranks: Callable[[str], list[Any]]) -> None:
    [found] = ranks("host_memory")
    words = [
        "",
        "the send buffer",
        "the receive buffer",
        "the send buffer is NULL",
        "",  # nothing to send from nowhere
        "data type 99",
        "no reduction of this type",
        "the reduction belongs to another type or communicator",
    ]
    assert [result for result, _ in found] == [0, 4, 4, 4, 0, 4, 4, 4]
    for (result, message), word in zip(found, words, strict=True):
        assert result == 0 or word in message
    assert "is host memory, expected device memory" in found[1][1]
    assert "is host memory, expected device memory" in found[2][1]
