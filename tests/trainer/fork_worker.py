"""Launched by forks.py: forks the ranks of one job after the other."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ports import free_port

JOB_TIMEOUT_S = 7200.0
GRACE_S = 30.0
"""Ranks that see the error of another one have so long to say so."""


def run_rank(job: Any, index: int, rank: int, port: int, folder: Path) -> int:
    os.setpgid(0, 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    output = os.open(folder / f"job{index}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        module, _, name = job.function.partition(":")
        value = getattr(importlib.import_module(module), name)(**job.arguments)
        if rank == 0:
            (folder / f"job{index}.pkl").write_bytes(pickle.dumps(value))
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_job(job: Any, index: int, folder: Path) -> tuple[int, ...]:
    port = free_port()
    started, codes, raised_at = time.monotonic(), [0] * job.world_size, math.inf
    ranks: dict[int, int] = {}
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            os._exit(run_rank(job, index, rank, port, folder))
        ranks[pid] = rank
    running = dict(ranks)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid:
            codes[(rank := running.pop(pid))] = os.waitstatus_to_exitcode(status)
            raised_at = min(raised_at, now if codes[rank] > 0 else math.inf)
        elif any(code < 0 for code in codes) or now - raised_at > GRACE_S or now - started > JOB_TIMEOUT_S:
            for other in running:
                os.kill(other, signal.SIGKILL)
            time.sleep(0.05)
        else:
            time.sleep(0.01)
    for leader in ranks:  # Megatron's checkpoint writer keeps a helper process, which outlives a rank that was killed
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    print(f"{time.monotonic() - started:6.2f} s  {job.name}  {codes}", flush=True)
    return tuple(codes)


def run_plan(folder: Path) -> None:
    jobs = pickle.loads((folder / "plan.pkl").read_bytes())
    codes = []
    for index, job in enumerate(jobs):
        (folder / f"job{index}.txt").touch()
        codes.append(run_job(job, index, folder))
    (folder / "codes.pkl").write_bytes(pickle.dumps(codes))


if __name__ == "__main__":  # on another release of Megatron-Core, which has to be imported afresh
    import torch

    import megarl.trainer.loop  # noqa: F401

    sys.path.insert(0, str(Path(__file__).parents[1]))

    torch.set_num_threads(1)
    run_plan(Path(sys.argv[1]))
