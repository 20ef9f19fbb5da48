"""The ``[megatron]`` table: the fields that megarl sets itself, and Megatron's switches for speed on GPUs.

derived.toml (``DERIVED``) lists the fields that megarl sets itself. ``core/replay_blockers.py`` lists the fields that
bypass replay. ``megatron/policy.py`` checks all other keys against the installed version.
"""

from collections.abc import Mapping
from typing import Any

from megarl.config.tables import Tables
from megarl.files.texts import read_table

RELEASES = "0.12.3 to 0.19"
"""Of Megatron-Core, that megarl runs on."""
_DERIVED = read_table(__file__, "derived.toml").items()
DERIVED: Mapping[str, str] = {field: key for key, fields in _DERIVED for field in fields}
"""Megatron field set by megarl -> megarl key that decides the value."""


def gpu_defaults(config: Tables, *, on_gpu: bool, has_te: bool) -> Mapping[str, Any]:
    """Return switches for speed, which change no results and are off in Megatron; the ``[megatron]`` table wins.

    has_te: whether Transformer Engine is installed, whose layers fuse. With a single mini-batch, the weights are
    exported after every update, so no pass could hide the gather. The fused router is never on: routes are observed.
    """
    gathers = config.parallel.distributed_optimizer and config.train.mini_batches > 1
    decided = dict.fromkeys(("gradient_accumulation_fusion", "moe_permute_fusion"), on_gpu and has_te)
    decided |= {"overlap_grad_reduce": on_gpu, "overlap_param_gather": on_gpu and gathers}
    wanted = decided | {name: value for name, value in config.megatron.items() if name in decided}
    return {name: True for name, value in wanted.items() if value}
