"""Megatron's switches for speed on GPUs: defaults, and reasons for switches that are off.

The ``[megatron]`` table wins. ``megarl doctor`` shows the switches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config import megatron_fields
from megarl.config.tables import Tables
from megarl.core.replay_blockers import REPLAY_BLOCKERS


@dataclass(frozen=True, slots=True)
class Switch:
    """A field of Megatron's dataclasses that changes speed but not results."""

    field: str
    on: bool
    reason: str
    """Effect of a switch that is on; obstacle of a switch that is off."""


def switches(config: Tables, *, on_gpu: bool, has_te: bool) -> tuple[Switch, ...]:
    """Decide each switch. has_te: whether Transformer Engine is installed."""
    sharded, mini_batches = config.parallel.distributed_optimizer, config.train.mini_batches
    no_te = None if has_te else "needs Transformer Engine"
    unsharded = None if sharded else "needs parallel.distributed_optimizer"
    single = None if mini_batches > 1 else "train.mini_batches is 1: the weights are exported after every update"
    router = "routes are observed, to compare them with the engine's"
    if config.train.replay != "none":
        router = next(b.reason for b in REPLAY_BLOCKERS if b.setting == "moe_router_fusion")
    decided = (
        ("overlap_grad_reduce", None, "gradients are reduced while the backward pass runs"),
        ("overlap_param_gather", unsharded or single, "weights are gathered while the next pass runs"),
        ("gradient_accumulation_fusion", no_te, "Transformer Engine's layers add to the fp32 gradients themselves"),
        ("moe_permute_fusion", no_te, "tokens are permuted in one kernel"),
        ("moe_router_fusion", router, ""),
    )
    result = []
    known_fields = {field for fields in megatron_fields.fields().values() for field in fields}
    for field, obstacle, meaning in decided:
        reason = obstacle or ("only on GPUs" if not on_gpu else meaning)
        if field in config.megatron:
            result.append(Switch(field, bool(config.megatron[field]), "set in [megatron]"))
        elif field in known_fields:
            result.append(Switch(field, on_gpu and obstacle is None, reason))
    return tuple(result)


def settings(config: Tables, *, on_gpu: bool, has_te: bool) -> Mapping[str, bool]:
    """Return switches that differ from Megatron's default, off, as keys of the ``[megatron]`` table."""
    return {switch.field: True for switch in switches(config, on_gpu=on_gpu, has_te=has_te) if switch.on}
