"""The tensors of a weight update: the names that an engine expects, and the form of its weights.

Every engine takes an update through ``buckets.Intake``.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from megarl.core.fp8 import BLOCK, SCALE, grid_of, is_fp8_weight, quantize_fp8, round_to_fp32
from megarl.errors import ConfigError, WeightSyncError, describe
from megarl.files.hf_config import FAMILIES
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
    covered, expected = (sum(t.numel() for t in tensors.values()) for tensors in (views, live))
    if covered != expected:
        raise WeightSyncError(
            f"the checkpoint names of {type(model).__name__} cover {covered} numbers, its parameters hold {expected}: "
            "transformers' conversion of this architecture is not understood"
        )
    return views


def read_model_config(folder: str | Path) -> PretrainedConfig:
    """transformers' config of a model folder; for a type unknown to transformers, such as kimi_k2, the family's
    config."""
    hf = read_json(Path(folder) / "config.json")
    family = FAMILIES.get(str(hf.get("model_type")), {}).get("like")
    if family is None:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoConfig.for_model(family, **{key: hf[key] for key in hf.keys() - {"model_type", "auto_map"}})


@cache
def checkpoint_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Map each tensor name of a checkpoint to its shape, from the config.json in ``directory`` alone.

    The names are transformers' own. No memory is allocated and no weights are read. ConfigError if transformers cannot
    build the model.
    """
    try:
        config = read_model_config(directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(f"{directory}: transformers cannot build the model ({describe(error)})") from error
    return {name: tuple(view.shape) for name, view in checkpoint_views(model).items()}
