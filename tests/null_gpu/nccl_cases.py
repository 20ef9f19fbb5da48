"""Cases for several ranks over the null NCCL, run below torch's own ProcessGroupNCCL.

``python nccl_cases.py FOLDER`` forks fresh ranks for every case and writes what each rank returned, or the error that
it met, to FOLDER/CASE.RANK.json. A rank that ends without a word leaves no file.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CASE_LIMIT_S = 600
"""Only a case that hangs takes so long."""
CASES: dict[str, tuple[int, Callable[[int, int], Any]]] = {}
"""Name -> (number of ranks, function of rank and number of ranks)."""

LONG = 150_001
"""Elements of a tensor that needs several rounds through the shared memory, also as uint8 over four ranks."""


def on_ranks(size: int) -> Callable[[Callable[[int, int], Any]], Callable[[int, int], Any]]:
    def register(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        CASES[function.__name__] = (size, function)
        return function

    return register


def library() -> ctypes.CDLL:
    """The preloaded NCCL."""
    loaded = ctypes.CDLL(None)
    loaded.null_nccl_calls.restype = ctypes.c_long
    return loaded


def values(rank: int, dtype: torch.dtype, length: int = LONG) -> torch.Tensor:
    """Small integers, so that every type holds their sums and products exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, (length,), generator=generator).to(dtype)


def raised(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return str(error)
    return "nothing was raised"


@on_ranks(4)
def reductions(rank: int, size: int) -> list[str]:
    """Wrong ones of all types and operations."""
    ops = {"SUM": torch.sum, "PRODUCT": torch.prod, "MAX": torch.amax, "MIN": torch.amin, "AVG": torch.mean}
    names = "float32 bfloat16 float16 float64 int64 int32 uint8 int8"
    wrong = []
    for name, op in itertools.product(names.split(), ops):
        dtype = getattr(torch, name)
        found = values(rank, dtype).cuda()
        dist.all_reduce(found, op=getattr(dist.ReduceOp, op))
        every = torch.stack([values(one, torch.float64) for one in range(size)])
        expected = ops[op](every, 0).to(dtype)
        if not torch.equal(found.cpu(), expected):
            wrong.append(f"{name} {op}")
    scaled = values(rank, torch.float32).cuda()
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    if not torch.equal(scaled.cpu(), sum(0.5 * values(one, torch.float32) for one in range(size))):
        wrong.append("float32 scaled")
    return wrong


@on_ranks(4)
def collectives(rank: int, size: int) -> list[str]:
    """Which of the other collective calls do not move the right data to the right place."""
    whole = torch.stack([values(one, torch.float32) for one in range(size)])
    mine = whole[rank].cuda()
    wrong = []

    def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        wrong.extend([name] if not torch.equal(found.cpu(), expected) else [])

    sent = mine.clone()
    dist.broadcast(sent, 2)
    compare("broadcast", sent, whole[2])
    reduced = mine.clone()
    dist.reduce(reduced, 1)
    compare("reduce", reduced, whole.sum(0) if rank == 1 else reduced.cpu())
    gathered = torch.empty(size * LONG, device="cuda")
    dist.all_gather_into_tensor(gathered, mine)
    compare("all_gather", gathered, whole.flatten())
    in_place = torch.empty(size, LONG, device="cuda")
    in_place[rank].copy_(mine)
    dist.all_gather_into_tensor(in_place, in_place[rank])
    compare("all_gather in place", in_place, whole)
    parts = [torch.empty(LONG, device="cuda") for _ in range(size)]
    dist.all_gather(parts, mine)
    compare("all_gather of a list", torch.stack([part.cpu() for part in parts]), whole)
    share = torch.empty(LONG, device="cuda")
    dist.reduce_scatter_tensor(share, whole.flatten().cuda())
    compare("reduce_scatter", share, size * whole[rank])
    exchanged = torch.empty(size * LONG, device="cuda")
    dist.all_to_all_single(exchanged, whole[rank].repeat(size).cuda())
    compare("all_to_all", exchanged, whole.flatten())
    takes = [torch.empty(LONG, device="cuda") for _ in range(size)] if rank == 3 else None
    dist.gather(mine, takes, dst=3)
    if takes:
        compare("gather", torch.stack([part.cpu() for part in takes]), whole)
    dist.scatter(share, [row.cuda() for row in whole] if rank == 1 else None, src=1)
    compare("scatter", share, whole[rank])
    return wrong


@on_ranks(4)
def uneven_exchange(rank: int, size: int) -> list[float]:
    """Rank r sends r * 10 + s to rank s, s + 1 times."""
    gives = [other + 1 for other in range(size)]
    source = torch.tensor([rank * 10.0 + other for other in range(size) for _ in range(other + 1)]).cuda()
    target = torch.empty(size * (rank + 1), device="cuda")
    dist.all_to_all_single(target, source, [rank + 1] * size, gives)
    return target.cpu().tolist()


@on_ranks(2)
def unequal_counts(rank: int, size: int) -> str:
    return raised(lambda: dist.all_reduce(torch.zeros(4 + rank, device="cuda")))


@on_ranks(2)
def rank_that_ends(rank: int, size: int) -> Any:
    dist.all_reduce(torch.zeros(1, device="cuda"))
    if rank == 1:
        os._exit(0)
    return raised(lambda: dist.all_reduce(torch.zeros(1, device="cuda")))


def run_rank(name: str, rank: int, folder: Path) -> None:
    size, function = CASES[name]
    signal.alarm(CASE_LIMIT_S)
    torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=CASE_LIMIT_S)
    store = dist.FileStore(str(folder / f"{name}.store"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit)
    outcome = json.dumps({"value": function(rank, size)})
    (folder / f"{name}.{rank}.json").write_text(outcome)


def run_case(name: str, folder: Path) -> None:
    ranks = []
    for rank in range(CASES[name][0]):
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(name, rank, folder)
            except BaseException:
                error = json.dumps({"error": traceback.format_exc()})
                (folder / f"{name}.{rank}.json").write_text(error)
            os._exit(0)  # without the end of torch: some cases leave their groups broken
        ranks.append(pid)
    if name == "rank_that_ends":  # a process that nobody has waited for has ended all the same
        time.sleep(1)
    for pid in ranks:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    for case in sys.argv[2:] or CASES:
        begun = time.monotonic()
        with contextlib.suppress(ChildProcessError):
            run_case(case, target)
        print(f"{time.monotonic() - begun:6.2f} s  {case}", flush=True)
