"""Buckets: groups of tensors in one flat piece of memory, the unit in which weights are sent and written."""

import base64
import copy
import itertools
import pickle
import time
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import torch

from megarl.core.fp8 import SCALE
from megarl.models.hf_files import split_by_size
from megarl.rollout.weights import Named

Item = TypeVar("Item")

FUSED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Halves of a projection that SGLang's models with latent attention keep as one parameter."""


Handle = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments, which give a tensor where they are unpickled."""
Allocate = Callable[[int, torch.device], torch.Tensor]


class Rebuilt:
    """Is pickled as the result of a handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> Handle:
        return self._handle


def _empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Bucket:
    """Tensors back to back in one flat piece of memory, sorted by item size so that each one is aligned."""

    def __init__(self, tensors: Iterable[Named], allocate: Allocate = _empty) -> None:
        ordered = sorted(tensors, key=lambda item: -item[1].element_size())
        self.names = [name for name, _ in ordered]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered]
        self.shapes = [list(tensor.shape) for _, tensor in ordered]
        parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in ordered]
        self.flat = torch.cat(parts, out=allocate(sum(map(len, parts)), parts[0].device))
        """uint8 [bytes], a copy of the tensors, on their device."""

    def spare(self) -> Self:
        """Returns the bucket in host memory of this process alone; ``wait_for_copies`` before it is read."""
        if not (self.flat.is_cuda or self.flat.is_shared()):
            return self
        copied = copy.copy(self)
        copied.flat = torch.empty_like(self.flat, device="cpu", pin_memory=self.flat.is_cuda)
        copied.flat.copy_(self.flat, non_blocking=True)
        return copied

    def forget_payload(self) -> None:
        """Frees the pickle once all servers have received it; a later use makes it again."""
        self.__dict__.pop("payload", None)

    def places(self) -> Iterator[tuple[str, torch.dtype, torch.Size, int, int]]:
        """Yields (name, dtype, shape, first byte, end byte) of each tensor."""
        start = 0
        for name, dtype_name, sizes in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype, shape = getattr(torch, dtype_name), torch.Size(sizes)
            end = start + shape.numel() * dtype.itemsize
            yield name, dtype, shape, start, end
            start = end

    def tensors(self) -> Iterator[Named]:
        """Yields the tensors as views of the flat memory."""
        for name, dtype, shape, start, end in self.places():
            yield name, self.flat[start:end].view(dtype).view(shape)

    @cached_property
    def payload(self) -> str:
        """``payload_of`` the tensors themselves."""
        return self.payload_of(self.flat.cpu())

    def payload_of(self, flat: torch.Tensor | Rebuilt) -> str:
        """Base64 of the pickle that ``/update_weights_from_tensor`` takes as a "flattened_bucket".

        SGLang only reads attributes of the metadata, and refuses to unpickle most classes. Plain namespaces with the
        attribute names of its own class work with all releases.
        """
        places = [
            SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
            for name, dtype, shape, start, end in self.places()
        ]
        content = {"flattened_tensor": flat, "metadata": places}
        return base64.b64encode(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).decode()


def wait_for_copies() -> None:
    """Wait until the spares that were made of buckets on a GPU are complete."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


class Stopwatch:
    """Measures the seconds that an iterator needs to produce its items."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items unchanged."""
        started = time.perf_counter()
        for item in items:
            self.seconds += time.perf_counter() - started
            yield item
            started = time.perf_counter()
        self.seconds += time.perf_counter() - started


def split_into_buckets(
    tensors: Iterable[Named], max_bytes: int, names: Container[str] = (), allocate: Allocate = _empty
) -> Iterator[Bucket]:
    """Yields buckets of at most ``max_bytes``, or of one larger unit, in order; ``names`` are the checkpoint's."""
    units = split_by_size(_units(tensors, names), lambda unit: sum(tensor.nbytes for _, tensor in unit), max_bytes)
    return (Bucket(itertools.chain(*unit), allocate) for unit in units)


def _units(tensors: Iterable[Named], names: Container[str]) -> Iterator[list[Named]]:
    """Yields the tensors that must be in one request together: single ones, and the two halves of a fused projection.

    SGLang drops one half of ``FUSED`` that comes in a request without the other, and answers success.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        other = next((name.replace(*halves) for halves in itertools.permutations(FUSED) if halves[0] in name), None)
        if other is None or other.removesuffix(SCALE) not in names:
            yield [(name, tensor)]
        elif other in waiting:
            yield [(other, waiting.pop(other)), (name, tensor)]
        else:
            waiting[name] = tensor
    assert not waiting, f"{list(waiting)} came without their other half, which the checkpoint names"
