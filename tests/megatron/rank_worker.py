"""Launched by ranks.py: forks fresh ranks for every case of the plan.

No case meets the process groups, or the failure, of another.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ports import free_port

CASE_TIMEOUT_S = 900


def run_rank(rank: int, case: Any, stem: Path) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.world_size))
    signal.alarm(CASE_TIMEOUT_S)
    module, _, name = case.function.partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(dict(case.layout), **dict(case.arguments))
        dist.barrier()
    except Exception:
        stem.with_suffix(f".rank{rank}.error").write_text(traceback.format_exc())
        time.sleep(1.0)  # so that others can tell what they saw
        raise
    if rank == 0:
        stem.with_suffix(".pkl").write_bytes(pickle.dumps(result))


def run_case(case: Any, stem: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    children = set()
    for rank in range(case.world_size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run_rank(rank, case, stem)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.add(pid)
    while children:
        pid, status = os.wait()
        children.discard(pid)
        if status:  # the others may wait for this rank for ever
            for other in children:
                os.kill(other, signal.SIGKILL)


def run_plan(folder: Path) -> None:
    for index, case in enumerate(pickle.loads((folder / "plan.pkl").read_bytes())):
        started = time.perf_counter()
        run_case(case, folder / f"case{index}")
        print(f"{time.perf_counter() - started:6.2f} s  {case.function} {case}", flush=True)
