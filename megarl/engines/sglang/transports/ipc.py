"""Weights through memory that the servers of the same machine open: only handles are sent.

A server's rank opens memory of its own GPU alone, so each rank of the trainer that shares a GPU with one makes the
handles for it. These ranks and the main one, which talks to the servers, go through the buckets of an update in step:

    gather a bucket -> meet: exchange handles -> gather the next, while the main rank sends them -> meet: free the last

Servers on a CPU open shared memory of the main rank in the same way.
"""

import math
import os
import shutil
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch._utils import _rebuild_tensor_v2
from torch.multiprocessing import reductions

from megarl.config.process_environment import ALLOCATOR_VARIABLES, without_expandable_segments
from megarl.engines.buckets import Bucket, Intake, Staging
from megarl.engines.sglang.transports.payload import Handle, Rebuilt
from megarl.engines.weights import Named, WeightForm, checkpoint_shapes
from megarl.errors import MegarlError, WeightSyncError
from megarl.models.hf_files import bucket_bytes

CPU = -1
"""Stands for the GPU of servers that have none."""
SHARED_MEMORY = Path("/dev/shm")
MOST_READERS = 1 << 12
"""More processes than open one bucket."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a rank tells the others when they meet."""

    gpu: int
    handle: Handle | None
    taken: frozenset[int]
    """GPUs whose servers have confirmed the bucket before."""
    failure: str


@dataclass(eq=False)
class Exchange:
    """The ranks of one machine that share memory with its servers, seen from one of them."""

    gpus: Sequence[int] = (CPU,)
    """The servers' GPUs, as ``sglang.gpus`` counts them."""
    gpu: int = CPU
    """This rank's."""
    gather: Callable[[_Turn], list[_Turn]] = lambda mine: [mine]
    """Returns what every rank gives: a collective call, which must raise if one of them is gone."""
    taken: set[int] = field(default_factory=set)
    """The main rank notes here which GPUs' servers have confirmed a bucket."""
    settle: Callable[[], None] = lambda: None
    """On the main rank: waits for these servers, before each meeting."""

    def fit(self, num_bytes: int) -> int:
        """Returns the bytes of a bucket, or fewer so that two of them leave half of the shared memory free."""
        return num_bytes if self.gpu != CPU else min(num_bytes, shutil.disk_usage(SHARED_MEMORY).free // 4)

    def rounds(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, dict[int, Handle]]]:
        """Yields each bucket with its handles, by GPU. WeightSyncError on all ranks where one has failed."""
        self._failure: MegarlError | None = None
        self._open: Handle | None = None
        self.taken.clear()
        return self._rounds(buckets)

    def _rounds(self, buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, dict[int, Handle]]]:
        kept = bucket = None
        try:
            for bucket in buckets:
                self._settle()
                handles = self._meet(bucket)
                kept = bucket  # until the next meeting, before which the servers have not all confirmed
                yield bucket, handles
            self._settle()
            self._meet(None)
        finally:  # the traceback of an error keeps the tensors
            for made in {*filter(None, (kept, bucket))}:
                remove_file(made.flat)

    def fail(self, error: MegarlError, rounds: Iterator[object]) -> None:
        """Tell the other ranks at the next bucket, which they are waiting to gather with this one."""
        self._failure = error
        with suppress(MegarlError):
            next(rounds, None)

    def _settle(self) -> None:
        try:
            self.settle()
        except MegarlError as error:  # the meeting tells the others
            self._failure = error

    def _meet(self, bucket: Bucket | None) -> dict[int, Handle]:
        handle = None
        if bucket is not None and self._failure is None and self.gpu in self.gpus:
            try:
                handle = make_handle(bucket.flat)
            except RuntimeError as error:  # from CUDA
                self._failure = WeightSyncError(
                    f"memory of GPU {self.gpu} cannot be shared with the server on it ({error}); look for what forbids "
                    'CUDA IPC, such as containers with separate IPC namespaces, or set sglang.sync = "disk"'
                )
        turns = self.gather(_Turn(self.gpu, handle, frozenset(self.taken), str(self._failure or "")))
        failures = [turn.failure for turn in turns if turn.failure]
        if self.gpu not in frozenset().union(*(turn.taken for turn in turns)):
            withdraw(self._open)
        self.taken.clear()
        self._open = handle
        if failures:
            withdraw(handle)
            raise self._failure or _second_hand(failures[0])
        return {turn.gpu: turn.handle for turn in turns if turn.handle is not None}


@dataclass(eq=False)
class Helper:
    """A rank that makes handles for the servers on its GPU, which another rank talks to."""

    exchange: Exchange
    source: Path
    """Checkpoint folder with the model's config."""
    bucket_bytes: int
    """That of the main rank."""

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> dict[str, float]:
        """Takes part in ``Fleet.update`` of the main rank; WeightSyncError if it fails there."""
        most = bucket_bytes(sum(map(math.prod, self._shapes.values())), self.bucket_bytes)
        buckets = Intake(self._shapes, version, form, most, Staging(most, empty_shared)).buckets(tensors)
        deque(self.exchange.rounds(buckets), maxlen=0)
        return {}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return checkpoint_shapes(self.source)


def empty_shared(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes], in memory that other processes can open as long as this tensor is alive."""
    if device.type == "cuda":
        with _fixed_segments():
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if (free := shutil.disk_usage(SHARED_MEMORY).free) < num_bytes:  # a write would end the process
        raise WeightSyncError(
            f"{SHARED_MEMORY} has {free >> 20} MiB left, a bucket of weights takes {num_bytes >> 20} MiB: make it "
            'larger, or set another sglang.sync than "ipc"'
        )
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    for _ in range(MOST_READERS):  # torch counts readers, the last one removes the file, and a killed one stays counted
        storage._shared_incref()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    weakref.finalize(flat, _file_of(flat).unlink, missing_ok=True)
    return flat


def remove_file(flat: torch.Tensor) -> None:
    """Let no other process open this memory of the host; those that have may go on."""
    if not flat.is_cuda:
        _file_of(flat).unlink(missing_ok=True)


def _file_of(flat: torch.Tensor) -> Path:
    _, name, _ = flat.untyped_storage()._share_filename_cpu_()
    return SHARED_MEMORY / name.decode().lstrip("/")


@contextmanager
def _fixed_segments() -> Iterator[None]:
    """Memory that is allocated inside has its address for good: CUDA IPC cannot share expandable segments."""
    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    if "expandable_segments" not in settings:
        yield
        return
    others = without_expandable_segments({ALLOCATOR_VARIABLES[0]: settings}).values()
    # The second one until torch 2.8. Both forget what is not given.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(",".join([*others, "expandable_segments:False"]))
    try:
        yield
    finally:
        change(settings)


def make_handle(flat: torch.Tensor) -> Handle:
    """Returns what gives the same memory in another process. RuntimeError if CUDA refuses.

    On a GPU one process must open it, or ``withdraw`` is called: torch keeps the memory until then. The GPU is named by
    its UUID, as SGLang names it, because processes count GPUs differently.
    """
    if flat.is_cuda:
        rebuild, arguments = reductions.reduce_tensor(flat)
        uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:])
    storage = (torch.UntypedStorage, *flat.untyped_storage()._share_filename_cpu_(), torch.uint8)
    opened = Rebuilt((reductions.rebuild_storage_filename, storage))
    return _rebuild_tensor_v2, (opened, 0, (flat.numel(),), (1,), False, OrderedDict())


def withdraw(handle: Handle | None) -> None:
    """Undoes ``make_handle`` for a handle that nobody will open, or whose process has died."""
    if handle is not None and handle[0] is reductions.rebuild_cuda_tensor:
        *_, counter, offset, _, _ = handle[1]
        torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)


def _second_hand(message: str) -> WeightSyncError:
    error = WeightSyncError(message)
    error.second_hand = True
    return error
