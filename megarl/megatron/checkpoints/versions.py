"""Differences between checkpoints of Megatron-Core 0.12 to 0.19, detected by accepted arguments, not by number."""

import io
import os
import pickle
import queue
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import exchange_utils
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint import filesystem

from megarl.megatron.versions import takes


def checkpoint_metadata(name: str = "metadata") -> dict[str, dict[str, Any]]:
    """Return the keyword argument that shards optimizer state for loading in any layout; empty for 0.12.

    A new dict at every call, because Megatron writes the current process groups into it.
    """
    if not takes(DistributedOptimizer.sharded_state_dict, "metadata"):
        return {}
    if not hasattr(DistributedOptimizer, "sharded_param_state_fully_reshardable"):
        return {name: {"distrib_optim_sharding_type": "fully_sharded_model_space"}}
    return {name: {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}}


def writer() -> dict[str, Any]:
    """The keyword argument that asks for Megatron's own writer; from 0.17 on, the default is another package's."""
    return {"async_strategy": "mcore"} if takes(dist_checkpointing.save, "async_strategy") else {}


def write_errors_are_told_to_all() -> bool:
    """Return whether Megatron tells all ranks of a failed background writer; since 0.14."""
    return "failures_occurred" in save_state_dict_async_finalize.__code__.co_varnames


class ForkedQueue:
    """A queue from forked processes to their parent, through a file: no writer blocks, and the file ends with the
    processes.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open as long as the queue)
        self._read = 0

    def put(self, item: Any) -> None:
        self._file.write(pickle.dumps(item))

    def drain(self) -> Iterator[Any]:
        with suppress(queue.Empty):
            while True:
                yield self.get_nowait()

    def get_nowait(self) -> Any:
        waiting = os.fstat(self._file.fileno()).st_size - self._read
        if not waiting:
            raise queue.Empty
        data = io.BytesIO(os.pread(self._file.fileno(), waiting, self._read))
        item = pickle.load(data)
        self._read += data.tell()
        return item


@cache
def adapt_libraries() -> None:
    """Supply what checkpoints of older releases expect of numpy and torch; called before the first read or write."""
    if "product" in exchange_utils._shard_size.__code__.co_names and not hasattr(np, "product"):  # to 0.15; numpy 2
        np.__dict__["product"] = np.prod
    if takes(filesystem._write_item, "serialization_format"):  # torch 2.8
        writer = filesystem_async.FileSystemWriterAsync.write_preloaded_data
        if "serialization_format" not in writer.__code__.co_consts:  # 0.12
            torch_save = filesystem.SerializationFormat.TORCH_SAVE
            filesystem_async._write_item = partial(filesystem._write_item, serialization_format=torch_save)
