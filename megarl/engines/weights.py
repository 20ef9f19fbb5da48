"""The tensors of a weight update: which ones an engine expects, in what form it holds them.

Every engine takes an update through ``buckets.Intake``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from megarl.core.fp8 import BLOCK, grid_of, is_fp8_weight, quantize_fp8, round_with_scale
from megarl.errors import ConfigError, WeightSyncError, describe
from megarl.files.hf_config import FAMILIES
from megarl.models.hf_folder import read_json
from megarl.models.names import is_fp32

Named = tuple[str, torch.Tensor]
CONVERT_BYTES, CACHE_BYTES = 32 << 20, 1 << 20
"""Of the tensors that are stacked, converted and checked at once on a GPU and on a CPU, unless one is more."""
FP8Form = Literal["off", "rounded", "blocks"]


def parts_at_once(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Yields the parts of tensors of one shape that are stacked and converted in one call."""
    step = max(1, (CONVERT_BYTES if tensors[0].is_cuda else CACHE_BYTES) // max(1, tensors[0].nbytes))
    return (slice(first, first + step) for first in range(0, len(tensors), step))


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How an engine holds its weights."""

    dtype: torch.dtype | None = None
    """Of what is neither in FP8 nor ``is_fp32``; None leaves each tensor in its own."""
    fp8: FP8Form = "off"
    """How linear weights are held. rounded: through FP8 blocks of 128 x 128 and back, for engines without FP8 kernels.
    blocks: as ``weight`` float8_e4m3fn and ``weight_scale_inv`` float32, as in FP8 checkpoints. Routers, norms,
    embeddings and the head stay as they are."""

    def dtype_of(self, name: str, stored: torch.dtype) -> torch.dtype:
        """The dtype of a tensor in this form, unless it is held in FP8."""
        return torch.float32 if is_fp32(name) else self.dtype or stored

    def held_bytes(self, name: str, tensor: torch.Tensor) -> int:
        """Bytes of a tensor in this form, with its scales."""
        if self.fp8 == "blocks" and is_fp8_weight(name):
            return tensor.numel() + torch.float32.itemsize * math.prod(grid_of(tensor.shape, BLOCK))
        return tensor.numel() * self.dtype_of(name, tensor.dtype).itemsize

    def fill(
        self, tensors: list[torch.Tensor], is_fp8: bool, held: torch.Tensor, scales: torch.Tensor | None = None
    ) -> None:
        """Writes tensors of one shape into ``held`` [n, *shape] in this form, and their scales into ``scales``."""
        if scales is not None:
            quantized, scale = quantize_fp8(torch.stack(tensors))
            held.copy_(quantized)
            scales.copy_(scale)
        elif is_fp8:
            round_with_scale(torch.stack(tensors), out=held)
        else:
            torch.stack(tensors, out=held)

    def write(self, tensors: Sequence[torch.Tensor], is_fp8: bool, places: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write tensors into places of any dtype and device: as they are, or those of one shape rounded through FP8.

        Return bool [n], whether all values of each are finite; the host does not wait for a device.
        """
        assert self.fp8 != "blocks", "scales need places of their own"
        if not is_fp8:
            torch._foreach_copy_([*places], [*tensors])
            return _are_finite(tensors)
        parts, scales = [*parts_at_once(tensors)], []
        held = tensors[0].new_empty(len(tensors[parts[0]]), *tensors[0].shape, dtype=torch.float32)
        rows = held.unbind()
        for part in parts:
            weights = torch.stack([*tensors[part]], out=held[: len(tensors[part])])
            scales.append(round_with_scale(weights, out=weights)[1])
            torch._foreach_copy_([*places[part]], rows[: len(weights)])
        return torch.cat(scales).flatten(1).isfinite().all(1)


def _are_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if tensors[0].is_cuda:
        return torch.stack([tensor.isfinite().all() for tensor in tensors])
    finite = torch.stack(torch._foreach_norm([*tensors])).isfinite()  # reads each value once; large ones may overflow
    return finite if finite.all() else torch.stack([tensor.isfinite().all() for tensor in tensors])


class _WithoutCopies(TorchFunctionMode):
    """While it is active, ``contiguous`` returns its tensor: transformers 5.16 and later end every split with it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def checkpoint_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Maps each tensor name of a checkpoint on disk to a view of the model's own memory.

    transformers fuses the experts of a layer into ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I]. The views
    are the per-expert matrices inside them: ``view.copy_(tensor)`` changes what the model computes with. The names come
    from the conversion that ``save_pretrained`` applies; tied tensors appear once, under their name in the checkpoint.

    Raises WeightSyncError if a tensor cannot be written in place, or if the views do not cover every parameter once.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    live = dict(model.named_parameters())  # a tied parameter is listed once
    live |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    with _WithoutCopies():
        views = revert_weight_conversion(model, {name: tensor.detach() for name, tensor in live.items()})

    storages = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    for name, view in views.items():
        if view.untyped_storage().data_ptr() not in storages:
            layout = f"{type(model).__name__} stores {name} in another layout than its checkpoint"
            raise WeightSyncError(f"{layout}, which cannot be updated in place: it needs an engine of its own")
    found, expected = (sum(t.numel() for t in tensors.values()) for tensors in (views, live))
    if found != expected:
        raise WeightSyncError(
            f"the checkpoint names of {type(model).__name__} cover {found} numbers, its parameters hold {expected}: "
            "transformers' conversion of this architecture is not understood"
        )
    return views


def read_model_config(folder: str | Path) -> PretrainedConfig:
    """transformers' config of a model folder. Of a type that it does not know, such as kimi_k2, that of its family."""
    hf = read_json(Path(folder) / "config.json")
    like = FAMILIES.get(str(hf.get("model_type")), {}).get("like")
    if like is None:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoConfig.for_model(like, **{key: hf[key] for key in hf.keys() - {"model_type", "auto_map"}})


def checkpoint_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Maps each tensor name of a checkpoint to its shape, from the config.json in ``directory`` alone.

    The names are those that transformers would write. No memory is allocated and no weights are read. Raises
    ConfigError if transformers cannot build the model.
    """
    try:
        config = read_model_config(directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(f"{directory}: transformers cannot build the model ({describe(error)})") from error
    return {name: tuple(view.shape) for name, view in checkpoint_views(model).items()}
