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
    loaded.null_nccl_calls.restype = loaded.null_nccl_bytes.restype = loaded.null_nccl_table.restype = ctypes.c_long
    loaded.ncclGetLastError.restype = ctypes.c_char_p
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
def collectives(rank: int, size: int) -> dict[str, bool]:
    """Which of the other collective calls move the right data to the right place."""
    whole = torch.stack([values(one, torch.float32) for one in range(size)])
    mine = whole[rank].cuda()
    right = {}

    def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        right[name] = torch.equal(found.cpu(), expected)

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
    return right


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
def unequal_types(rank: int, size: int) -> str:
    dtype = (torch.float32, torch.bfloat16)[rank]
    return raised(lambda: dist.broadcast(torch.zeros(4, dtype=dtype, device="cuda"), 0))


@on_ranks(2)
def unequal_calls(rank: int, size: int) -> str:
    x = torch.zeros(4, device="cuda")
    return raised(lambda: dist.all_reduce(x) if rank else dist.broadcast(x, 0))


@on_ranks(2)
def unequal_messages(rank: int, size: int) -> str:
    x = torch.zeros(4 + rank, device="cuda")
    return raised(lambda: dist.recv(x, 0) if rank else dist.send(x, 1))


def batch(*operations: tuple[Any, torch.Tensor, int]) -> list[Any]:
    return dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations])


@on_ranks(2)
def order_of_messages(rank: int, size: int) -> list[float]:
    """Two messages between the same ranks in one group: matched in order, whatever their tags say."""
    a, b = (torch.full((3,), float(2 * rank + index)).cuda() for index in range(2))
    first, second = (torch.empty(3, device="cuda") for _ in range(2))
    other = 1 - rank
    operations = [
        dist.P2POp(dist.isend, a, other, tag=1),
        dist.P2POp(dist.isend, b, other, tag=2),
        dist.P2POp(dist.irecv, first, other, tag=2),
        dist.P2POp(dist.irecv, second, other, tag=1),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [float(first[0]), float(second[0])]


@on_ranks(4)
def ring_in_a_group(rank: int, size: int) -> bool:
    """Every rank sends before it receives, more than fits under way: only a group call can do that."""
    found = torch.empty(LONG, device="cuda")
    mine = values(rank, torch.float32).cuda()
    for work in batch((dist.isend, mine, (rank + 1) % size), (dist.irecv, found, (rank - 1) % size)):
        work.wait()
    return torch.equal(found.cpu(), values((rank - 1) % size, torch.float32))


@on_ranks(2)
def sends_without_a_group(rank: int, size: int) -> str:
    x = torch.zeros(4, device="cuda")
    dist.recv(x, 0) if rank else dist.send(x, 1)  # creates the communicator
    torch.cuda.synchronize()  # the limit is not for this message
    os.environ["NULL_NCCL_TIMEOUT_S"] = "1"
    return raised(lambda: dist.send(x, 1 - rank))


@on_ranks(2)
def send_waits_for_its_receiver(rank: int, size: int) -> list[bool]:
    """Whether an asynchronous send was finished: before the other rank received, and after waiting for it."""
    x = torch.full((3,), 7.0).cuda() if rank == 0 else torch.zeros(3, device="cuda")
    batch((dist.isend, x, 1) if rank == 0 else (dist.irecv, x, 0))[0].wait()  # creates the communicator
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["seen"])
        time.sleep(0.2)
        batch((dist.irecv, x, 0))[0].wait()
        return []
    [work] = batch((dist.isend, x, 1))
    time.sleep(0.2)
    before = work.is_completed()
    store.set("seen", "1")
    work.wait()
    torch.cuda.synchronize()
    return [before, work.is_completed()]


@on_ranks(2)
def stream_order(rank: int, size: int) -> list[float]:
    """What is read behind an asynchronous call, on a stream that waits for it, is what the call has brought."""
    found = []
    for turn in range(20):
        x = torch.full((LONG,), float(turn + rank)).cuda()
        work = dist.all_reduce(x, async_op=True)
        if rank == 1:
            time.sleep(0.005)
        work.wait()
        found.append(float(x[-1]))
    return found


@on_ranks(2)
def same_device_twice(rank: int, size: int) -> str:
    torch.cuda.set_device(0)
    return raised(lambda: dist.all_reduce(torch.zeros(1, device="cuda")))


@on_ranks(2)
def rank_that_ends(rank: int, size: int) -> Any:
    dist.all_reduce(torch.zeros(1, device="cuda"))
    if rank == 1:
        os._exit(0)
    return raised(lambda: dist.all_reduce(torch.zeros(1, device="cuda")))


@on_ranks(2)
def rank_that_aborts(rank: int, size: int) -> Any:
    dist.all_reduce(torch.zeros(1, device="cuda"))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        assert dist.group.WORLD is not None
        dist.group.WORLD._get_backend(torch.device("cuda")).abort()
        store.wait(["given up"])  # it lives until the other rank has failed
        return None
    message = raised(lambda: dist.all_reduce(torch.zeros(1, device="cuda")))
    store.set("given up", "1")
    return message


@on_ranks(2)
def rank_that_stays_away(rank: int, size: int) -> str:
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()  # the limit is not for this call
    os.environ["NULL_NCCL_TIMEOUT_S"] = "1"
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["given up"])
        return ""
    message = raised(lambda: dist.all_reduce(torch.zeros(1, device="cuda")))
    store.set("given up", "1")
    return message


@on_ranks(4)
def groups_by_split(rank: int, size: int) -> list[float]:
    """With a bound device, torch splits the communicator of the world (ncclCommSplit)."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    x = torch.full((2,), float(rank)).cuda()
    dist.all_reduce(x, group=pairs[rank // 2])
    y = torch.full((2,), float(rank)).cuda()
    dist.all_reduce(y)
    return [float(x[0]), float(y[0])]


@on_ranks(2)
def counted(rank: int, size: int) -> dict[str, Any]:
    nccl = library()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    nccl.null_nccl_reset()
    x = torch.zeros(10, device="cuda")
    dist.all_reduce(x)
    dist.all_gather_into_tensor(torch.empty(20, device="cuda"), x)
    dist.reduce_scatter_tensor(torch.empty(5, device="cuda"), x)
    for work in batch((dist.isend, x, 1 - rank), (dist.irecv, x.clone(), 1 - rank)):
        work.wait()
    kinds = ["AllReduce", "AllGather", "ReduceScatter", "Send", "Recv", "AlltoAll"]
    text = ctypes.create_string_buffer(nccl.null_nccl_table(None, 0) + 1)
    nccl.null_nccl_table(text, len(text))
    return {
        "calls": [nccl.null_nccl_calls(kind.encode()) for kind in kinds],
        "bytes": [nccl.null_nccl_bytes(kind.encode()) for kind in kinds],
        "unknown": nccl.null_nccl_calls(b"Nonsense"),
        "table": [line.split("\t") for line in text.value.decode().splitlines()],
    }


@on_ranks(1)
def host_memory(rank: int, size: int) -> list[Any]:
    """(result, words) of calls with host memory and with none, straight at the library."""
    nccl = library()

    class UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 128),)

    name, comm = UniqueId(), ctypes.c_void_p()
    nccl.ncclGetUniqueId(ctypes.byref(name))
    assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, name, 0) == 0
    host, device = torch.zeros(4), torch.zeros(4, device="cuda")

    def reduce(source: int, target: int, count: int = 4, kind: int = 7, op: int = 0) -> list[Any]:
        places = ctypes.c_void_p(source), ctypes.c_void_p(target)
        result = nccl.ncclAllReduce(*places, ctypes.c_size_t(count), kind, op, comm, None)
        return [result, nccl.ncclGetLastError(comm).decode()]

    on_host, on_device = host.data_ptr(), device.data_ptr()
    return [
        reduce(on_device, on_device),
        reduce(on_host, on_device),
        reduce(on_device, on_host),
        reduce(0, on_device),
        reduce(0, 0, count=0),
        reduce(on_device, on_device, kind=99),
        reduce(on_device, on_device, kind=10),
        reduce(on_device, on_device, op=5),
    ]


def run_rank(name: str, rank: int, folder: Path) -> None:
    size, function = CASES[name]
    signal.alarm(CASE_LIMIT_S)
    torch.cuda.set_device(rank)
    bound = torch.device("cuda", rank) if name == "groups_by_split" else None
    limit = datetime.timedelta(seconds=CASE_LIMIT_S)
    store = dist.FileStore(str(folder / f"{name}.store"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=limit, device_id=bound)
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
