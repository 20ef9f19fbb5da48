"""Differences between releases of Megatron-Core from 0.12 to 0.19, detected by accepted arguments, not by number.

What an older release cannot do is refused when the model is built; docs/version_matrix.md lists it. Megatron's errors
about settings, of every class and some without a message, become a ConfigError of a line.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import megarl
from megarl.errors import ConfigError, MegarlError
from megarl.replay.megatron_state import RELEASE


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has a parameter of this name."""
    return name in inspect.signature(function).parameters


TAKES_PADDING_MASK = takes(GPTModel.forward, "padding_mask")  # from 0.16 on, routers can leave padding uncounted


def for_stage(stage: int | None) -> dict[str, Any]:
    """Keyword arguments that name a virtual pipeline stage. 0.12 has none; its parallel state is set instead."""
    if takes(GPTModel.__init__, "vp_stage"):
        return {"vp_stage": stage}
    if stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    return {}


def copy_to_tensor_parallel(replicated: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor [S, H], with a gradient summed over the tensor-parallel group (which 0.12 always uses)."""
    argument = {"group": group} if takes(copy_to_tensor_model_parallel_region, "group") else {}
    return copy_to_tensor_model_parallel_region(replicated, **argument)


def padding_argument(config: TransformerConfig, mask: Tensor | None) -> dict[str, Tensor | None]:
    """Return the keyword argument that excludes padding, bool [1, S], from the routers' counts.

    ConfigError if it is needed but missing.
    """
    if TAKES_PADDING_MASK:
        return {"padding_mask": mask}
    if mask is not None:
        _refuse_counted_padding(config)
    return {}


def refuse_missing(config: TransformerConfig) -> None:
    """ConfigError if these settings need a later release."""
    kinds = config.moe_router_load_balancing_type
    if "global_aux_loss" in kinds and not hasattr(TopKRouter, "_apply_global_aux_loss"):
        raise ConfigError(
            f"megatron.moe_router_load_balancing_type = {kinds!r}: megatron-core {RELEASE} has no global_aux_loss; "
            "use aux_loss, or install megatron-core 0.16 to 0.19"
        )
    sizes = (config.tensor_model_parallel_size, config.context_parallel_size, config.pipeline_model_parallel_size)
    pads = max(sizes) > 1 or config.moe_token_dispatcher_type == "allgather"
    if pads and not TAKES_PADDING_MASK:
        _refuse_counted_padding(config)


def _refuse_counted_padding(config: TransformerConfig) -> None:
    coefficients = config.moe_aux_loss_coeff
    has_loss = any(coefficients if isinstance(coefficients, list) else [coefficients])
    counting = {
        "moe_router_load_balancing_type": has_loss and config.moe_router_load_balancing_type != "none",
        "moe_z_loss_coeff": bool(config.moe_z_loss_coeff),
        "moe_router_bias_update_rate": config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate,
    }
    for setting, counts in counting.items():
        if counts:
            raise ConfigError(
                f"megatron.{setting} = {getattr(config, setting)!r}: routers of megatron-core {RELEASE} count padding, "
                f"which this layout has; remove {setting}, or install megatron-core 0.16 to 0.19"
            )


_MEGATRON = Path(megatron.core.__file__).parent
_MEGARL = Path(megarl.__file__).parent
_DISTRIBUTED = Path(torch.distributed.__file__).parent
_SPOKEN = (AssertionError, ValueError, NotImplementedError, ImportError)
_DELIBERATE = (*_SPOKEN, TypeError)  # what Megatron raises on purpose


@contextmanager
def as_config_error(doing: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Turn an error that Megatron raises inside into a ConfigError: with message, place, and the user's settings.

    doing: completes "Megatron cannot"; settings: the [megatron] table. Other errors pass through: those raised in
    megarl, of memory and of communication. If the table is empty, only the types of _DELIBERATE are turned.
    """
    try:
        yield
    except Exception as error:  # any class: for an unknown optimizer, Megatron raises a plain Exception
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in reversed(frames) if _within(frame, _MEGATRON, _MEGARL)), frames[-1])
        is_other = (
            isinstance(error, (MegarlError, torch.OutOfMemoryError))
            or not _within(place, _MEGATRON)
            or any(_within(frame, _DISTRIBUTED) for frame in frames)
        )
        if is_other or not (settings or isinstance(error, _DELIBERATE)):
            raise
        table = f"; [megatron] sets {', '.join(settings)}" if settings else ""
        location = f"{Path(place.filename).relative_to(_MEGATRON)}:{place.lineno}"
        message = f"{error} ({location})"
        if not (str(error) and isinstance(error, _SPOKEN)):  # without meaning for a user: add the line of code
            message = f"{': '.join(filter(None, (type(error).__name__, str(error))))} ({location}: {place.line})"
        raise ConfigError(f"Megatron cannot {doing}: {message}{table}") from error


def _within(frame: traceback.FrameSummary, *folders: Path) -> bool:
    return any(folder in Path(frame.filename).parents for folder in folders)
