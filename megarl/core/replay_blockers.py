"""Which settings of Megatron-Core let it route without asking the replay hook.

They are plain data, with the reasons in replay_blockers.toml, so replay, a configuration and ``megarl doctor`` can ask
without Megatron, torch or pydantic.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megarl.files.texts import read_table


def _names(value: Any) -> list[str]:
    """A setting that may be a string, an enum member, or a list of either, as a list of strings."""
    items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return [name for item in items for name in str(getattr(item, "name", item)).split(",")]


def _chooses_experts(settings: Mapping[str, Any]) -> bool:
    safe_types = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}
    return not safe_types.issuperset(_names(settings.get("moe_router_load_balancing_type", "aux_loss")))


def _drops_tokens(settings: Mapping[str, Any]) -> bool:
    factor = settings.get("moe_expert_capacity_factor")
    return factor is not None and factor >= 0  # a negative factor means no limit


def _captures_router(settings: Mapping[str, Any]) -> bool:
    kind = settings.get("cuda_graph_impl", "none")
    scope = settings.get("cuda_graph_scope")
    scope = _names(settings.get("cuda_graph_modules", "full") if scope is None else scope)  # its name from 0.18 on
    # Only Transformer Engine's graphs end at the attention: "local" captures the whole layer of a GPT model for any
    # scope, "full_iteration" everything, and an empty scope the whole layer.
    is_part_only = kind == "transformer_engine" and scope and {"attn", "mlp", "mamba"}.issuperset(scope)
    return kind != "none" and not is_part_only


class ReplayBlocker(NamedTuple):
    """A Megatron setting under which the experts in use are not those that the replay hook returned."""

    setting: str
    """Field of TransformerConfig."""
    reason: str
    """What Megatron does then; completes "replay cannot hold, because"."""


_TESTS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "moe_router_load_balancing_type": _chooses_experts,
    "moe_expert_capacity_factor": _drops_tokens,
    "moe_expert_rank_capacity_factor": lambda settings: settings.get("moe_expert_rank_capacity_factor") is not None,
    "moe_router_force_biased": lambda settings: settings.get("moe_router_force_biased") is not None,
    "mlp_chunks_for_training": lambda settings: settings.get("mlp_chunks_for_training", 1) > 1,
    "cuda_graph_impl": _captures_router,
}
"""Of the settings that bypass the hook with some values only."""
_REASONS = read_table(__file__)
assert _TESTS.keys() <= _REASONS.keys(), "replay_blockers.toml has no entry for a setting of _TESTS"
REPLAY_BLOCKERS = tuple(ReplayBlocker(*entry) for entry in _REASONS.items())
"""Every such setting of megatron-core 0.12 to 0.19."""


def replay_blockers(settings: Mapping[str, Any]) -> list[ReplayBlocker]:
    """The entries of REPLAY_BLOCKERS that bypass the hook with these settings (field -> value, absent means Megatron's
    default); ``vars(transformer_config)`` serves as settings too."""
    return [b for b in REPLAY_BLOCKERS if _TESTS.get(b.setting, lambda s, name=b.setting: s.get(name))(settings)]
