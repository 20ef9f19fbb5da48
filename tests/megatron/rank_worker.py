"""Launched by ranks.py: imports once, forks one process per rank, runs every case of the plan on all of them."""

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


def run_rank(rank: int, world_size: int, cases: list[Any], folder: Path) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    for index, case in enumerate(cases):
        started = time.perf_counter()
        error = result = None
        try:
            module, _, name = case.function.partition(":")
            result = getattr(importlib.import_module(module), name)(dict(case.layout), **dict(case.arguments))
        except Exception:
            error = traceback.format_exc()
            (folder / f"case{index}.rank{rank}.error").write_text(error)
        errors: list[Any] = [error] * world_size
        if dist.is_initialized():  # a broken group raises here, which ends the launch
            dist.all_gather_object(errors, error)
        elif error:
            raise SystemExit(1)
        if rank == 0 and not any(errors):
            (folder / f"case{index}.pkl").write_bytes(pickle.dumps(result))
            print(f"{time.perf_counter() - started:6.2f} s  {case.function} {case}", flush=True)


def main() -> None:
    import torch

    import megarl.megatron.checkpoint  # noqa: F401  (imported before the ranks are forked, so that it costs once)

    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    world_size, cases = pickle.loads((folder / "plan.pkl").read_bytes())
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run_rank(rank, world_size, cases, folder)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    while children:
        pid, status = os.wait()
        children.remove(pid)
        if status:  # the others may wait for this rank for ever
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    main()
