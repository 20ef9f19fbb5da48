"""Megatron's switches for speed on GPUs, which change no results. The ``[megatron]`` table wins."""

from collections.abc import Mapping
from typing import Any

from megarl.config.tables import Tables


def settings(config: Tables, *, on_gpu: bool, has_te: bool) -> Mapping[str, Any]:
    """Return switches that differ from Megatron's default, off, as keys of the ``[megatron]`` table.

    has_te: whether Transformer Engine is installed, whose layers fuse. With a single mini-batch, the weights are
    exported after every update, so no pass could hide the gather. The fused router is never on: routes are observed.
    """
    gathers = config.parallel.distributed_optimizer and config.train.mini_batches > 1
    decided = {
        "overlap_grad_reduce": on_gpu,
        "overlap_param_gather": on_gpu and gathers,
        "gradient_accumulation_fusion": on_gpu and has_te,
        "moe_permute_fusion": on_gpu and has_te,
    }
    wanted = decided | {name: value for name, value in config.megatron.items() if name in decided}
    return {name: True for name, value in wanted.items() if value}
