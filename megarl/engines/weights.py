"""The tensors of a weight update: the names that an engine expects, the form of its weights, and buckets.

Every engine takes an update through ``Intake``, which checks the tensors and converts them into buckets, flat pieces of
memory.
"""

import copy
import itertools
import math
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from megarl.core.fp8 import quantize_fp8, round_to_fp32
from megarl.core.fp8_names import BLOCK, SCALE, grid_of, is_fp8_weight
from megarl.engines import BUCKET_BYTES
from megarl.errors import ConfigError, WeightSyncError, describe, refusal, reworded
from megarl.files.hf_config import FAMILIES, family_entry, flatten, hf_name, is_beside_text, is_turned
from megarl.models.hf_files import split_by_size
from megarl.models.hf_folder import read_json
from megarl.models.names import is_fp32

Named = tuple[str, torch.Tensor]
FP8Form = Literal["off", "rounded", "blocks"]


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How an engine holds its weights."""

    dtype: torch.dtype | None = None
    """dtype of tensors that are neither in FP8 nor ``is_fp32``; None: unchanged."""
    fp8: FP8Form = "off"
    """Form of linear weights. rounded: through FP8 blocks of 128 x 128 and back, for engines without FP8 kernels.
    blocks: as ``weight`` float8_e4m3fn and ``weight_scale_inv`` float32, as in FP8 checkpoints. Routers, norms,
    embeddings and the head keep their dtype."""

    def pieces(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(Name, dtype, shape) of a tensor [rows, columns] or [rows] in this form, and of its scales."""
        if self.fp8 == "blocks" and is_fp8_weight(name):
            scales = (name + SCALE, torch.float32, grid_of(tensor.shape, BLOCK))
            return [(name, torch.float8_e4m3fn, tensor.shape), scales]
        return [(name, torch.float32 if is_fp32(name) else self.dtype or tensor.dtype, tensor.shape)]

    def held_bytes(self, name: str, tensor: torch.Tensor) -> int:
        """Bytes of a tensor [rows, columns] or [rows] in this form, with its scales."""
        return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self.pieces(name, tensor))

    def fill(self, tensor: torch.Tensor, name: str, place: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Write a tensor [rows, columns] or [rows] into ``place`` of equal shape in this form, and its scales."""
        if scales is not None:
            quantized, scale = quantize_fp8(tensor)
            place.copy_(quantized)
            scales.copy_(scale)
        elif self.fp8 == "rounded" and is_fp8_weight(name):
            place.copy_(round_to_fp32(tensor))
        else:
            place.copy_(tensor)


class _WithoutCopies(TorchFunctionMode):
    """While active, ``contiguous`` returns its tensor: transformers 5.16 and later end every split with
    ``contiguous``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def checkpoint_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Maps each tensor name of a checkpoint on disk to a view of the model's own memory.

    transformers fuses the experts of a layer into ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I]. The views
    are the per-expert matrices inside them: ``view.copy_(tensor)`` changes what the model computes with. The names come
    from the conversion that ``save_pretrained`` applies; tied tensors appear once, under their name in the checkpoint.
    Of a larger model, only the tensors of the text model are listed.

    Raises WeightSyncError if a tensor cannot be written in place, or if the views do not cover every parameter once.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    live = dict(model.named_parameters())  # a tied parameter is listed once
    live |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    kind = getattr(model.config, "checkpoint_type", model.config.model_type)
    hidden = model.config.get_text_config().hidden_size
    views = {name: tensor.detach() for name, tensor in live.items()}
    with _WithoutCopies():
        views = views if family_entry(kind, "as_built") else revert_weight_conversion(model, views)

    storages = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    for name, view in views.items():
        if view.untyped_storage().data_ptr() not in storages:
            raise WeightSyncError(refusal("layout_of_tensor", kind=type(model).__name__, name=name))
    covered, expected = (sum(t.numel() for t in tensors.values()) for tensors in (views, live))
    if covered != expected:
        raise WeightSyncError(refusal("names_of_checkpoint", model=type(model), covered=covered, expected=expected))
    turned = {name: view.transpose(1, 2) for name, view in views.items() if is_turned(kind, name, view.shape, hidden)}
    names = {name: hf_name(kind, name) if model.config.model_type != kind else name for name in views}
    return {names[name]: turned.get(name, view) for name, view in views.items() if not is_beside_text(kind, name)}


def read_model_config(folder: str | Path) -> PretrainedConfig:
    """transformers' config of a model folder; for a type unknown to transformers, such as kimi_k2, that of the family
    that it is like, with the type as ``checkpoint_type``."""
    hf = read_json(Path(folder) / "config.json")
    kind = family = str(hf.get("model_type"))
    while family not in CONFIG_MAPPING and "like" in FAMILIES.get(family, {}):
        family = FAMILIES[family]["like"]
    if family == kind:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if kind == "minimax_m2" and (width := hf.get("rotary_dim")):  # which the class of transformers does not read
            config.rope_parameters["partial_rotary_factor"] = width / config.head_dim
        return config
    kept = {key: value for key, value in flatten(hf).items() if key not in ("model_type", "auto_map")}
    return AutoConfig.for_model(family, **kept, checkpoint_type=kind)


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class that builds the model of a config: of text, or of images and text."""
    return AutoModelForImageTextToText if family_entry(config.model_type, "text") else AutoModelForCausalLM


@cache
def checkpoint_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Map each tensor name of a checkpoint to its shape, from the config.json in ``directory`` alone.

    The names are transformers' own. No memory is allocated and no weights are read. ConfigError if transformers cannot
    build the model.
    """
    prefix = f"{directory}: transformers cannot build the model ("
    with reworded(Exception, ConfigError, prefix, ")", describe):  # transformers raises many kinds
        config = read_model_config(directory)
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
    return {name: tuple(view.shape) for name, view in checkpoint_views(model).items()}


Place = tuple[str, torch.dtype, torch.Size, int, int]
"""Name, dtype, shape, first byte and end byte of a tensor."""
Allocate = Callable[[int, torch.device], torch.Tensor]

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
            host = torch.empty_like(self.flat, device="cpu", pin_memory=True)
            return self._over(host.copy_(self.flat, non_blocking=True))

    def spare(self) -> Self:
        """Return a copy in new host memory."""
        return self.on_host() if self.ready is not None else self._over(self.flat.clone())

    def _over(self, flat: torch.Tensor) -> Self:
        copied = copy.copy(self)
        copied.flat, copied.ready = flat, None
        return copied


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """bool []. A weight in FP8 has a scale, which is not finite if the weight is not."""
    return tensor.new_ones((), dtype=torch.bool) if tensor.dtype == torch.float8_e4m3fn else tensor.isfinite().all()


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
        """Return the intake of an update for servers, with buckets of a sixteenth of a model in float32.

        Sending then overlaps with all but a small fraction of the work.
        """
        sixteenth = sum(map(math.prod, shapes.values())) // 4
        return cls(shapes, version, form, min(BUCKET_BYTES, max(8 << 20, sixteenth)))

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
            raise WeightSyncError(refusal("weights_not_finite", num=len(bad), total=len(self.shapes), first=bad[0]))

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
            num, total, names = len(outstanding), len(self.shapes), ", ".join(sorted(outstanding)[:3])
            raise WeightSyncError(refusal("weights_missing", num=num, total=total, version=self.version, names=names))
