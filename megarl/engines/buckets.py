"""Buckets: the tensors of a weight update, checked and converted into one flat piece of memory.

Every engine takes an update through ``Intake``.
"""

import copy
import itertools
import math
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from megarl.core.fp8 import SCALE
from megarl.engines.weights import Named, WeightForm
from megarl.errors import WeightSyncError
from megarl.models.hf_files import bucket_bytes, split_by_size

Place = tuple[str, torch.dtype, torch.Size, int, int]
"""Name, dtype, shape, first byte and end byte of a tensor."""
Allocate = Callable[[int, torch.device], torch.Tensor]

BUCKET_BYTES = 256 << 20
"""Most bytes of a bucket for servers."""
FUSED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Halves of a projection: a single parameter in SGLang's models with latent attention."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_AS_IT_IS = WeightForm()


def _empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class Bucket:
    """Tensors back to back in one flat piece of memory, in the form of an engine; the item sizes align every tensor."""

    def __init__(self, tensors: Iterable[Named], allocate: Allocate = _empty, form: WeightForm = _AS_IT_IS) -> None:
        sources = dict(tensors)
        pieces = [piece for name, tensor in sources.items() for piece in form.pieces(name, tensor)]
        self.places, total = list[Place](), 0
        for name, dtype, shape in sorted(pieces, key=lambda piece: -piece[1].itemsize):
            begin, total = total, total + math.prod(shape) * dtype.itemsize
            self.places.append((name, dtype, torch.Size(shape), begin, total))
        self.flat = allocate(total, next(iter(sources.values())).device)
        """uint8 [bytes], a copy of the tensors, on their device."""
        views = dict(self.tensors())
        for name, tensor in sources.items():
            form.fill(tensor.detach(), name, views[name], views.get(name + SCALE))
        self.finite = torch.stack([_is_finite(view) for view in views.values()])
        """bool [tensors], whether all values are finite."""
        self.ready = torch.cuda.Event() if self.flat.is_cuda else None
        """Event after the work that fills a bucket on a GPU; None: the bucket is full."""
        if self.ready is not None:
            self.ready.record()

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.places]

    def tensors(self) -> Iterator[Named]:
        """Yields the tensors as views of the flat memory."""
        for name, dtype, shape, start, end in self.places:
            yield name, self.flat[start:end].view(dtype).view(shape)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On a GPU, work inside waits for this bucket alone, not for the work that makes the next bucket."""
        if self.ready is None:
            yield
            return
        stream = torch.cuda.Stream(self.flat.device)
        stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def sum_bytes(self) -> int:
        """Return the sum of all bytes: other weights have another sum."""
        with self.beside():
            return int(self.flat.sum(dtype=torch.int64))

    def on_host(self) -> Self:
        """Return the bucket itself; for a bucket on a GPU, a copy in pinned host memory."""
        if self.ready is None:
            return self
        with self.beside():
            return self._over(
                torch.empty_like(self.flat, device="cpu", pin_memory=True).copy_(self.flat, non_blocking=True)
            )

    def spare(self) -> Self:
        """Return a copy in new host memory."""
        return self.on_host() if self.ready is not None else self._over(self.flat.clone())

    def _over(self, flat: torch.Tensor) -> Self:
        copied = copy.copy(self)
        copied.flat, copied.ready = flat, None
        return copied


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """bool []. A weight in FP8 has a scale, which is not finite if the weight is not."""
    is_fp8 = tensor.dtype == torch.float8_e4m3fn
    return tensor.new_ones((), dtype=torch.bool) if is_fp8 else tensor.isfinite().all()


def split_into_buckets(
    tensors: Iterable[Named],
    max_bytes: int,
    names: Container[str] = (),
    allocate: Allocate = _empty,
    form: WeightForm = _AS_IT_IS,
) -> Iterator[Bucket]:
    """Yield buckets of at most ``max_bytes``, or of one larger unit, in order; ``names``: tensors of the checkpoint."""
    units = split_by_size(_units(tensors, names), lambda unit: sum(itertools.starmap(form.held_bytes, unit)), max_bytes)
    return (Bucket(itertools.chain(*unit), allocate, form) for unit in units)


def _units(tensors: Iterable[Named], names: Container[str]) -> Iterator[list[Named]]:
    """Yield the tensors of each request: single tensors, and the two halves of a fused projection together.

    SGLang drops one half of ``FUSED`` that arrives without the second half, and reports success.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        half = next((half for half in FUSED if half in name), None)
        other = name.replace(half, FUSED[1 - FUSED.index(half)]) if half else ""
        if other not in names:
            yield [(name, tensor)]
        elif other in waiting:
            yield [(other, waiting.pop(other)), (name, tensor)]
        else:
            waiting[name] = tensor
    assert not waiting, f"{list(waiting)} came without their other half, which the checkpoint names"


@dataclass
class Intake:
    """One weight update: the tensors of a checkpoint, each exactly once, become buckets in an engine's form."""

    shapes: Mapping[str, tuple[int, ...]]
    version: int
    form: WeightForm
    max_bytes: int
    """Bytes of a bucket, or of one larger tensor."""

    @classmethod
    def for_servers(cls, shapes: Mapping[str, tuple[int, ...]], version: int, form: WeightForm) -> Self:
        """Return the intake of an update for servers, with buckets of a sixteenth of the model."""
        return cls(shapes, version, form, bucket_bytes(sum(map(math.prod, shapes.values())), BUCKET_BYTES))

    def buckets(self, tensors: Iterable[Named], allocate: Allocate = _empty) -> Generator[Bucket, None, None]:
        """Yield the buckets; WeightSyncError unless the tensors are exactly ``shapes``, each once and finite.

        Names and shapes are checked before a tensor enters a bucket: SGLang reports success for unknown names and
        incomplete updates, and a wrong shape ends the server. Missing and non-finite tensors are reported after the
        last bucket, so that the host waits for the device once.
        """
        names, finite = list[str](), [torch.ones(0, dtype=torch.bool)]
        for bucket in split_into_buckets(self._check(tensors), self.max_bytes, self.shapes, allocate, self.form):
            names += bucket.names
            finite.append(bucket.finite)
            yield bucket
        whole = torch.cat([flags.to(finite[-1].device) for flags in finite]).tolist()
        if bad := [name.removesuffix(SCALE) for name, ok in zip(names, whole, strict=True) if not ok]:
            raise WeightSyncError(
                f"{len(bad)} of {len(self.shapes)} tensors hold NaN or infinite values, for example {bad[0]}: "
                "look at the trainer's weights"
            )

    def _check(self, tensors: Iterable[Named]) -> Iterator[Named]:
        outstanding = dict(self.shapes)
        for name, tensor in tensors:
            if (expected := outstanding.pop(name, None)) is None:
                twice = f"arrived twice in one update (version {self.version})"
                unknown = "is unknown to the engine's model: send the names of its HF checkpoint"
                raise WeightSyncError(f"{name} {twice if name in self.shapes else unknown}")
            if tensor.shape != expected:
                raise WeightSyncError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
            if tensor.dtype not in _DTYPES:
                raise WeightSyncError(f"{name} is {tensor.dtype}, expected one of {_DTYPES}")
            yield name, tensor
        if outstanding:
            raise WeightSyncError(
                f"{len(outstanding)} of {len(self.shapes)} tensors are missing from the update to version "
                f"{self.version}, for example {', '.join(sorted(outstanding)[:3])}: send every tensor of the checkpoint"
            )
