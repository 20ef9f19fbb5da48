"""Writes checkpoints, also while training continues."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from megarl.errors import SaveError
from megarl.files.bounded_process import signal_after_parent
from megarl.files.outputs import partial_of
from megarl.files.writing import sha256_of
from megarl.megatron.checkpoints.folders import clear_partial, explained, publish
from megarl.megatron.checkpoints.state import ForkedQueue, checkpoint_metadata, run_state, writer
from megarl.megatron.policy import Policy

_CHECK_S = 0.5
"""Seconds between two checks of the writing processes."""


class Saver:
    """Writes checkpoints in a forked process of each rank, from a copy of the memory, while training continues.

    One at a time. A checkpoint gets manifest and name when all ranks have written.
    """

    def __init__(self, folder: Path, keep: int, run: str = "", keep_every: int = 0) -> None:
        """run: the name of the run, for the manifests; keep, keep_every: which checkpoints stay."""
        self._folder, self._keep, self._run, self._keep_every = folder, keep, run, keep_every
        self._calls = AsyncCallsQueue()
        self._pending: Path | None = None

    def begin(self, step: int, policy: Policy, loop: Mapping[str, Any]) -> None:
        """Start to write checkpoint ``step``, after the previous one is complete; a collective call.

        ``loop`` is what the training loop needs to resume: small, equal on all ranks, and plain data. Only the entry
        "untrained", if any, is of each rank, and may be large.
        """
        self.poll(wait=True)
        path = clear_partial(self._folder, step, self._run)
        folder = partial_of(path)
        options: dict[str, Any] = checkpoint_metadata("content_metadata") | writer()
        filesystem_async._results_queue = ForkedQueue()
        self._written = ForkedQueue()
        with explained(path):
            state = run_state(policy, step, loop)
            request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **options)
            assert request is not None  # as it is for a synchronous save
            if (write := request.async_fn) is not None:
                write = partial(_write_until_parent_ends, os.getpid(), write, folder, self._written)
                request = request._replace(async_fn=write)
            self._calls.schedule_async_request(request)
        self._pending = path

    def poll(self, *, wait: bool = False) -> Path | None:
        """Return the checkpoint that has just become complete, equal on all ranks, or None; a collective call.

        SaveError if it could not be written; ``on_all_ranks`` says whether every rank raises it.
        """
        if (path := self._pending) is None:
            return None
        try:
            with explained(path):
                if not self._calls.maybe_finalize_async_calls(blocking=wait):
                    return None
            publish(path, self._run, dict(self._written.drain()), self._keep, self._keep_every)
        except SaveError as error:
            self._pending = None
            error.on_all_ranks = isinstance(error.__cause__, CheckpointException) or dist.get_world_size() == 1
            raise
        self._pending = None
        return path

    def abandon(self) -> None:
        """Kill the rank's writer; the next start removes the partial folder."""
        for call in self._calls.async_calls:
            caller: Any = call.async_caller  # whose base class has no ``process``
            if caller.process is not None:
                caller.process.kill()
                caller.process.join()
        self._calls.async_calls.clear()
        self._pending = None


def _write_until_parent_ends(
    trainer: int, write: Callable[..., None], folder: Path, written: ForkedQueue, *arguments: Any
) -> None:
    """In the forked process: write, but end with the trainer, and end if one of the writer's own children dies.

    Megatron would wait for the results of a dead child forever; so the save fails instead."""
    _end_with_parent(trainer)
    os.register_at_fork(after_in_child=partial(_end_with_parent, os.getpid()))
    threading.Thread(target=_end_with_a_child, daemon=True).start()
    write(*arguments)
    for file in folder.glob(f"__{dist.get_rank()}_*.distcp"):
        written.put((file.name, (file.stat().st_size, sha256_of(file))))


def _end_with_parent(parent: int) -> None:
    signal_after_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def _end_with_a_child() -> None:
    while True:
        time.sleep(_CHECK_S)
        for child in psutil.Process().children():
            with suppress(ChildProcessError):  # Megatron has waited for it already
                ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if ended is not None and ended.si_status != 0:
                    os._exit(1)
