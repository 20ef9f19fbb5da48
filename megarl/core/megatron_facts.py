"""Which settings of Megatron-Core let it route without asking the replay hook.

They are plain data, so replay, a configuration and ``megarl doctor`` can ask without Megatron, torch or pydantic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _names(value: Any) -> list[str]:
    """A setting that may be a string, an enum member, or a list of either, as a list of strings."""
    items = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return [part for item in items for part in str(getattr(item, "name", item)).split(",")]


def _chooses_experts(settings: Mapping[str, Any]) -> bool:
    known = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}
    return not known.issuperset(_names(settings.get("moe_router_load_balancing_type", "aux_loss")))


def _drops_tokens(settings: Mapping[str, Any]) -> bool:
    factor = settings.get("moe_expert_capacity_factor")
    return factor is not None and factor >= 0  # a negative factor means no limit


def _captures_router(settings: Mapping[str, Any]) -> bool:
    kind = settings.get("cuda_graph_impl", "none")
    scope = settings.get("cuda_graph_scope")
    scope = _names(settings.get("cuda_graph_modules", "full") if scope is None else scope)  # its name from 0.18 on
    # Only Transformer Engine's graphs end at the attention: "local" captures the whole layer of a GPT model for any
    # scope, "full_iteration" everything, and an empty scope the whole layer.
    parts = kind == "transformer_engine" and scope and {"attn", "mlp", "mamba"}.issuperset(scope)
    return kind != "none" and not parts


@dataclass(frozen=True, slots=True)
class ReplayBlocker:
    """A Megatron setting under which the experts in use are not those that the replay hook returned."""

    setting: str
    """Field of TransformerConfig."""
    reason: str
    """What Megatron does then; completes "replay cannot hold, because"."""
    test: Callable[[Mapping[str, Any]], bool] | None = None
    """See ``hit``; default whether the setting is true."""

    def hit(self, settings: Mapping[str, Any]) -> bool:
        """Whether these settings (field -> value, absent means Megatron's default) bypass the hook."""
        return bool(self.test(settings) if self.test else settings.get(self.setting))


_REPEATS = "repeats the captured routes and never calls the replay hook again"
REPLAY_BLOCKERS: tuple[ReplayBlocker, ...] = (
    ReplayBlocker("moe_router_fusion", "the fused top-k kernel returns before the replay hook is asked"),
    ReplayBlocker(
        "moe_router_load_balancing_type",
        "sinkhorn, and every balancing that is not an auxiliary loss, chooses experts without the replay hook",
        _chooses_experts,
    ),
    ReplayBlocker(
        "moe_expert_capacity_factor",
        "tokens over an expert's capacity are dropped after the replay hook, so replayed experts vanish",
        _drops_tokens,
    ),
    ReplayBlocker(
        "moe_expert_rank_capacity_factor",
        "tokens over a rank's capacity are dropped after the replay hook (0.18 and later), so replayed experts vanish",
        lambda settings: settings.get("moe_expert_rank_capacity_factor") is not None,
    ),
    ReplayBlocker(
        "moe_router_force_load_balancing",
        "router logits are replaced by random ones, so replayed experts get random gate weights",
    ),
    ReplayBlocker(
        "moe_router_force_biased",
        "router logits are biased at random (0.17 and later), so replayed experts get random gate weights",
        lambda settings: settings.get("moe_router_force_biased") is not None,
    ),
    ReplayBlocker(
        "overlap_moe_expert_parallel_comm",
        "the combined 1F1B schedule interleaves two micro-batches, so a pass no longer meets its rows in order",
    ),
    ReplayBlocker(
        "mlp_chunks_for_training",
        "the router is asked for each chunk of a micro-batch (0.18 and later), so a pass no longer meets all its rows",
        lambda settings: settings.get("mlp_chunks_for_training", 1) > 1,
    ),
    ReplayBlocker("cuda_graph_impl", f"a CUDA graph over the router {_REPEATS}", _captures_router),
    ReplayBlocker("enable_cuda_graph", f"a CUDA graph over the layer {_REPEATS}"),
    ReplayBlocker("external_cuda_graph", f"a CUDA graph over the layer {_REPEATS}"),
)
"""Every such setting of megatron-core 0.12 to 0.19 (read in transformer/moe/router.py, moe_utils.py, moe_layer.py,
transformer_layer.py and the schedules)."""


def replay_blockers(settings: Mapping[str, Any]) -> list[ReplayBlocker]:
    """The entries of REPLAY_BLOCKERS that these settings hit; ``vars(transformer_config)`` serves as settings too."""
    return [blocker for blocker in REPLAY_BLOCKERS if blocker.hit(settings)]
