"""The live parameters of a transformers model under the names that they have in a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from megarl.errors import WeightSyncError


def checkpoint_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Maps each tensor name of a checkpoint on disk to the piece of memory in ``model`` that it belongs to.

    transformers fuses the experts of a layer into ``gate_up_proj`` [E, 2 I, H] and ``down_proj`` [E, H, I]; the views
    are the per-expert matrices inside of them, so that ``view.copy_(tensor)`` changes what the model computes with.
    The names come from the conversion that ``save_pretrained`` applies. Tied tensors appear once, under the name that
    the checkpoint has. Raises WeightSyncError if a tensor cannot be written in place, or if the views do not cover
    the parameters exactly once.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    live = dict(model.named_parameters())  # a tied parameter is listed once
    live |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    views = revert_weight_conversion(model, {name: tensor.detach() for name, tensor in live.items()})

    storages = {tensor.untyped_storage().data_ptr() for tensor in live.values()}
    for name, view in views.items():
        if view.untyped_storage().data_ptr() not in storages:
            raise WeightSyncError(
                f"{type(model).__name__} stores {name} in another layout than its checkpoint, which cannot be updated "
                "in place: this architecture needs an engine of its own"
            )
    found, expected = (sum(t.numel() for t in tensors.values()) for tensors in (views, live))
    if found != expected:
        raise WeightSyncError(
            f"the checkpoint names of {type(model).__name__} cover {found} numbers, its parameters hold {expected}: "
            "transformers' conversion of this architecture is not understood"
        )
    return views


def checkpoint_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Maps each tensor name of a checkpoint of this model to its shape; ``directory`` holds its config.json.

    Nothing is allocated or read: the names are those that transformers would write.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(view.shape) for name, view in checkpoint_views(model).items()}
