"""Buckets: groups of tensors in one flat piece of memory, the unit in which weights are sent and written."""

from __future__ import annotations

import base64
import copy
import pickle
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import TypeVar

import torch

from megarl.models.hf_files import split_by_size
from megarl.rollout.weights import Named

Item = TypeVar("Item")


class Bucket:
    """Tensors back to back in one flat piece of memory, sorted by item size so that each one is aligned."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        ordered = sorted(tensors, key=lambda item: -item[1].element_size())
        self.names = [name for name, _ in ordered]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered]
        self.shapes = [list(tensor.shape) for _, tensor in ordered]
        self.flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in ordered])
        """uint8 [bytes], a copy of the tensors, on their device."""

    def cpu(self) -> Bucket:
        """Returns the bucket in host memory; itself if it is there already."""
        if self.flat.device.type == "cpu":
            return self
        copied = copy.copy(self)
        copied.flat = self.flat.cpu()
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
        """Base64 of the pickle that ``/update_weights_from_tensor`` takes as a "flattened_bucket".

        SGLang only reads attributes of the metadata, and refuses to unpickle most classes. Plain namespaces with the
        attribute names of its own class work with all releases.
        """
        places = [
            SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
            for name, dtype, shape, start, end in self.places()
        ]
        content = {"flattened_tensor": self.cpu().flat, "metadata": places}
        return base64.b64encode(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).decode()


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


def split_into_buckets(tensors: Iterable[Named], max_bytes: int) -> Iterator[Bucket]:
    """Yields buckets of at most ``max_bytes``, or of one larger tensor; the tensors keep their order."""
    return map(Bucket, split_by_size(tensors, lambda item: item[1].nbytes, max_bytes))
