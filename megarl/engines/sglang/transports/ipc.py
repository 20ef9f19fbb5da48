"""Weights through memory that the servers of the machine open: only handles are sent.

A server's rank opens memory of its own GPU alone: a trainer's rank on the GPU makes the handles. The ranks with handles
and the main rank, which talks to the servers, go through the buckets of an update in step:

    gather a bucket -> meet: exchange handles -> gather the next bucket, while the main rank sends -> meet: free

Servers on a CPU open shared memory of the main rank.
"""

import os
import shutil
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._utils import _rebuild_tensor_v2
from torch.multiprocessing import reductions

from megarl.config.process_environment import ALLOCATOR_VARIABLES, without_expandable_segments
from megarl.engines.sglang.transports.protocol import Buckets, Delivery, Handle, Rebuilt, Transport, send_handles
from megarl.engines.sglang.transports.sender import CPU
from megarl.engines.weights import Bucket, Intake, Named, WeightForm, checkpoint_shapes
from megarl.errors import MegarlError, WeightSyncError, refusal

SHARED_MEMORY = Path("/dev/shm")
MOST_READERS = 1 << 12
"""An upper bound on the readers of a bucket."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A rank's message to the other ranks at a meeting."""

    gpu: int
    handle: Handle | None
    confirmed: frozenset[int]
    """GPUs whose servers have confirmed the previous bucket."""
    failure: str


@dataclass(eq=False)
class SharedMemory(Transport):
    """Shared memory of a machine's ranks and servers, seen from a single rank.

    The rank with the fleet talks to the servers. The remaining ranks are ``Helper``.
    """

    gpus: Sequence[int] = (CPU,)
    """The servers' GPUs, as ``sglang.gpus`` counts them."""
    gpu: int = CPU
    """This rank's GPU."""
    gather: Callable[[_Turn], list[_Turn]] = lambda turn: [turn]
    """Returns the turns of all ranks: a collective call, which must raise if a rank is gone."""

    def __post_init__(self) -> None:
        self._failure: MegarlError | None = None
        self._open: Handle | None = None
        self.handles: dict[int, Handle] = {}
        """Of the current bucket, by GPU."""
        self.confirmed: set[int] = set()
        """GPUs whose servers have confirmed a bucket since the last meeting."""

    def stream(self, intake: Intake, tensors: Iterable[Named], delivery: Delivery | None) -> Buckets:
        """Yield each bucket after a meeting of all ranks. WeightSyncError on all ranks if a rank has failed.

        Two buckets on the host take at most half of the free shared memory.
        """
        if self.gpu == CPU:
            intake.max_bytes = min(intake.max_bytes, shutil.disk_usage(SHARED_MEMORY).free // 4)
        buckets = intake.buckets(tensors, empty_shared)
        rounds = self.rounds(buckets, (lambda: None) if delivery is None else delivery.wait)
        next(rounds)  # from here on an error in the generator reaches all ranks
        return rounds

    def rounds(self, buckets: Iterator[Bucket], settle: Callable[[], None]) -> Buckets:
        """Yield None, and then a bucket after every meeting. settle: waits until the last bucket is sent."""
        self._failure = self._open = None
        self.confirmed.clear()
        bucket = next_bucket = None
        try:
            while True:
                try:
                    yield bucket
                except MegarlError as error:  # all ranks gather the next bucket, and then meet
                    self._failure = error
                next_bucket = next(buckets, None)
                try:
                    settle()
                except MegarlError as error:
                    self._failure = error
                self._meet(next_bucket)
                bucket = next_bucket  # stays until the next meeting: earlier, servers may still read the bucket
                if bucket is None:
                    return
        finally:  # the traceback of an error keeps the tensors
            for unsent in {*filter(None, (bucket, next_bucket))}:
                if not unsent.flat.is_cuda:  # no more processes may open it; readers may continue
                    _file_of(unsent.flat).unlink(missing_ok=True)

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Send the handles of a bucket to all servers."""
        for member in delivery.receivers.each(lambda member: send_handles(member.sender, bucket, self.handles)):
            self.confirmed.update(member.sender.gpus)

    def _meet(self, bucket: Bucket | None) -> None:
        handle = None
        if bucket is not None and self._failure is None and self.gpu in self.gpus:
            try:
                handle = make_handle(bucket.flat)
            except RuntimeError as error:  # from CUDA
                self._failure = WeightSyncError(refusal("memory_not_shared", gpu=self.gpu, error=error))
        turns = self.gather(_Turn(self.gpu, handle, frozenset(self.confirmed), str(self._failure or "")))
        failures = [turn.failure for turn in turns if turn.failure]
        if self.gpu not in frozenset().union(*(turn.confirmed for turn in turns)):
            withdraw(self._open)
        self.confirmed.clear()
        self._open = handle
        if failures:
            withdraw(handle)
            failure = self._failure or WeightSyncError(failures[0])
            failure.second_hand |= self._failure is None
            raise failure
        self.handles = {turn.gpu: turn.handle for turn in turns if turn.handle is not None}


@dataclass(eq=False)
class Helper:
    """Makes handles for the servers on a rank's GPU, while the main rank talks to the servers."""

    transport: SharedMemory
    source: Path
    """Checkpoint folder with the model's config."""

    def update(self, tensors: Iterable[Named], version: int, form: WeightForm) -> None:
        """Join in ``Fleet.update`` of the main rank; WeightSyncError if the update fails."""
        intake = Intake.for_servers(checkpoint_shapes(self.source), version, form)
        deque(self.transport.stream(intake, tensors, None), maxlen=0)


def empty_shared(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes], in memory that foreign processes can open while the tensor lives; WeightSyncError without
    room."""
    if device.type == "cuda":
        with _fixed_segments():
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if (free := shutil.disk_usage(SHARED_MEMORY).free) < num_bytes:  # a write would end the process
        raise WeightSyncError(refusal("shared_memory", place=SHARED_MEMORY, free=free >> 20, needed=num_bytes >> 20))
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    for _ in range(MOST_READERS):  # the last of torch's readers removes the file, and killed readers stay counted
        storage._shared_incref()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    weakref.finalize(flat, _file_of(flat).unlink, missing_ok=True)
    return flat


def _file_of(flat: torch.Tensor) -> Path:
    _, name, _ = flat.untyped_storage()._share_filename_cpu_()
    return SHARED_MEMORY / name.decode().lstrip("/")


@contextmanager
def _fixed_segments() -> Iterator[None]:
    """Memory allocated inside keeps its address: CUDA IPC cannot share expandable segments."""
    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    if "expandable_segments" not in settings:
        yield
        return
    options = without_expandable_segments({ALLOCATOR_VARIABLES[0]: settings}).values()
    # torch up to 2.8 has the second function. Both functions forget missing options.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(",".join([*options, "expandable_segments:False"]))
    try:
        yield
    finally:
        change(settings)


def make_handle(flat: torch.Tensor) -> Handle:
    """Return a handle of the memory, uint8 [bytes], for another process. RuntimeError if CUDA refuses.

    On a GPU, one process must open the handle, or the caller must call ``withdraw``: torch keeps the memory until then.
    The handle names the GPU by its UUID, as SGLang does, because processes count GPUs differently.
    """
    if flat.is_cuda:
        rebuild, arguments = reductions.reduce_tensor(flat)
        return rebuild, (*arguments[:6], str(torch.cuda.get_device_properties(flat.device).uuid), *arguments[7:])
    storage = (torch.UntypedStorage, *flat.untyped_storage()._share_filename_cpu_(), torch.uint8)
    opened = Rebuilt((reductions.rebuild_storage_filename, storage))
    return _rebuild_tensor_v2, (opened, 0, (flat.numel(),), (1,), False, OrderedDict())


def withdraw(handle: Handle | None) -> None:
    """Undo ``make_handle`` for a handle without a reader, or with a dead reader."""
    if handle is not None and handle[0] is reductions.rebuild_cuda_tensor:
        *_, counter, offset, _, _ = handle[1]
        torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)
