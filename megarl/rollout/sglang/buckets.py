"""What is sent to a server in one go: the tensors of an update in the form that it computes with, and in buckets.

each_exactly_once -> WeightForm -> buckets -> Bucket: one flat piece of memory and the places of its tensors
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Literal, TypeVar

import torch

from megarl.core.fp8 import is_fp8_weight, quantize_fp8, round_through_fp8
from megarl.errors import WeightSyncError

Named = tuple[str, torch.Tensor]
FP8Form = Literal["off", "rounded", "blocks"]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How an engine holds its weights."""

    dtype: torch.dtype
    """Of everything that is not in FP8."""
    fp8: FP8Form = "off"
    """rounded: linear weights through FP8 blocks of 128 x 128 and back, for engines without FP8 kernels. blocks: as
    ``weight`` float8_e4m3fn and ``weight_scale_inv`` float32, as FP8 checkpoints have them. Routers, norms, embeddings
    and the head stay as they are."""

    def of(self, tensors: Iterable[Named]) -> Iterator[Named]:
        """The tensors in this form, in their order; a scale follows its weight."""
        for name, tensor in tensors:
            held = tensor.detach()
            if self.fp8 == "blocks" and is_fp8_weight(name):
                quantized, scale = quantize_fp8(held)
                yield name, quantized
                yield f"{name}_scale_inv", scale
                continue
            if self.fp8 == "rounded" and is_fp8_weight(name):
                held = round_through_fp8(held.float())
            yield name, held.to(self.dtype)


class Bucket:
    """Some tensors behind each other in one flat piece of memory; the largest items first, so that all are aligned."""

    def __init__(self, tensors: Iterable[Named]) -> None:
        ordered = sorted(tensors, key=lambda item: -item[1].element_size())
        self.names = [name for name, _ in ordered]
        self.dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in ordered]
        self.shapes = [list(tensor.shape) for _, tensor in ordered]
        self.flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in ordered])
        """uint8 [bytes], on the device of the tensors; a copy of them."""

    def cpu(self) -> Bucket:
        """The same in the memory of the host; itself if it is there."""
        if self.flat.device.type == "cpu":
            return self
        copy = object.__new__(Bucket)
        copy.names, copy.dtypes, copy.shapes, copy.flat = self.names, self.dtypes, self.shapes, self.flat.cpu()
        return copy

    def forget_payload(self) -> None:
        """Let go of the pickle, once all servers have had it; a later use makes it again."""
        self.__dict__.pop("payload", None)

    def places(self) -> Iterator[tuple[str, torch.dtype, torch.Size, int, int]]:
        """(name, dtype, shape, first byte, byte behind the last) of each tensor."""
        start = 0
        for name, dtype_name, sizes in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype, shape = getattr(torch, dtype_name), torch.Size(sizes)
            yield name, dtype, shape, start, start + shape.numel() * dtype.itemsize
            start += shape.numel() * dtype.itemsize

    def tensors(self) -> Iterator[Named]:
        """Views into the flat memory."""
        for name, dtype, shape, start, end in self.places():
            yield name, self.flat[start:end].view(dtype).view(shape)

    @cached_property
    def payload(self) -> str:
        """Base64 of the pickle that ``/update_weights_from_tensor`` takes as a "flattened_bucket", by value.

        Servers read only names of SGLang's own class from the places, and refuse to unpickle most classes: plain
        namespaces do for all releases.
        """
        places = [
            SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
            for name, dtype, shape, start, end in self.places()
        ]
        content = {"flattened_tensor": self.cpu().flat, "metadata": places}
        return base64.b64encode(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).decode()


class Stopwatch:
    """The seconds that somebody else's iterator takes for its items."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items as they are."""
        iterator = iter(items)
        while True:
            started = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - started
            yield item


def buckets(tensors: Iterable[Named], max_bytes: int) -> Iterator[Bucket]:
    """Tensors in their order, in groups of at most ``max_bytes``, or of one larger tensor."""
    held: list[Named] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > max_bytes:
            yield Bucket(held)
            held, size = [], 0
        held.append((name, tensor))
        size += nbytes
    if held:
        yield Bucket(held)


def each_exactly_once(tensors: Iterable[Named], shapes: Mapping[str, tuple[int, ...]], version: int) -> Iterator[Named]:
    """The tensors as they come, provided that they are those of ``shapes`` (name -> shape), each once and finite.

    A server answers "success" to names that it does not know and to updates that lack some, and dies of wrong shapes:
    WeightSyncError here instead, at the latest when the last tensor has been taken.
    """
    outstanding = set(shapes)
    for name, tensor in tensors:
        if name not in shapes:
            raise WeightSyncError(f"{name} is unknown to the served model: send the names of its HF checkpoint")
        if name not in outstanding:
            raise WeightSyncError(f"{name} arrived twice in one update (version {version})")
        if tuple(tensor.shape) != shapes[name]:
            raise WeightSyncError(f"{name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
        if not torch.isfinite(tensor).all():
            raise WeightSyncError(f"{name} holds NaN or infinite values: look at the trainer's weights")
        outstanding.remove(name)
        yield name, tensor
    if outstanding:
        raise WeightSyncError(
            f"{len(outstanding)} of {len(shapes)} tensors are missing from the update to version {version}, for "
            f"example {', '.join(sorted(outstanding)[:3])}: send every tensor of the checkpoint"
        )
