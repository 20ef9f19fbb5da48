"""What cannot divide, and what cannot fit: ConfigError before a job is in a queue."""

from __future__ import annotations

from megarl.config import Config, Layout
from megarl.core.fp8 import BLOCK
from megarl.errors import ConfigError
from megarl.models.shapes import ModelShape
from megarl.plan.engine import EngineMemory, cut_widths, fp8_widths

TRAINER_RESERVE = 3 << 30
SERVER_RESERVE = 3 << 30
"""Bytes that CUDA, NCCL, workspaces and fragmentation take on a GPU beside what is reckoned: a guess, not measured."""


def check_division(config: Config, shape: ModelShape, layout: Layout) -> None:
    """Refuse a layout that cuts heads, experts or widths into unequal parts, and sequences beyond the positions."""
    fields = shape.fields
    wanted = [
        ("num_attention_heads", fields["num_attention_heads"], "parallel.tp", layout.tp),
        ("intermediate_size", fields["ffn_hidden_size"] if _has_dense(shape) else 0, "parallel.tp", layout.tp),
        ("experts", shape.num_experts, "parallel.ep", layout.ep),
        ("the experts' intermediate size", fields.get("moe_ffn_hidden_size") or 0, "parallel.etp", layout.etp),
        (
            "the shared experts' intermediate size",
            fields.get("moe_shared_expert_intermediate_size") or 0,
            "parallel.tp",
            layout.tp,
        ),
    ]
    if not fields.get("multi_latent_attention"):
        wanted.append(("num_key_value_heads", fields["num_query_groups"], "parallel.tp", layout.tp))
    for name, size, key, parts in wanted:
        _divides(name, size, key, parts)
    if layout.ep > 1 and not shape.num_experts:
        raise ConfigError(f"parallel.ep: found {layout.ep} for a model without experts, expected 1; remove it")
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > shape.max_sequence_length:
        raise ConfigError(
            f"rollout.max_response_tokens: found prompts and responses of up to {longest} tokens, expected at most the "
            f"model's max_position_embeddings = {shape.max_sequence_length}; lower it or data.max_prompt_tokens"
        )


def check_servers(config: Config, shape: ModelShape) -> None:
    """Refuse servers that cannot cut the model, or that have other GPUs than the machine."""
    if not config.rollout.engine_kind.server:
        return
    settings, fields, tp = config.sglang, shape.fields, config.sglang.tp
    _divides("num_attention_heads", fields["num_attention_heads"], "sglang.tp", tp)
    groups = fields.get("num_query_groups") or 0
    if groups % tp and tp % groups:
        raise ConfigError(
            f"sglang.tp: found {tp} for {groups} key-value heads, expected a divisor or a multiple of them"
        )
    for name, width in cut_widths(shape):
        _divides(name, width, "sglang.tp", tp)
    for name, width in fp8_widths(shape, tp) if settings.fp8 else ():
        if width % BLOCK[0]:
            raise ConfigError(
                f"sglang.tp: found {tp} with sglang.fp8 = true, which leaves a GPU {width} of {name}, expected a "
                f"multiple of {BLOCK[0]}; lower sglang.tp, or set sglang.fp8 = false"
            )
    on_trainer = settings.gpus and not config.launch.apart
    if on_trainer and max(settings.gpus) >= config.launch.ranks_per_node:
        raise ConfigError(
            f"sglang.gpus: found {max(settings.gpus)} on nodes with launch.ranks_per_node = "
            f"{config.launch.ranks_per_node} GPUs, expected 0 to {config.launch.ranks_per_node - 1}"
        )


def _has_dense(shape: ModelShape) -> bool:
    return len(shape.moe_layers) < shape.num_layers


def _divides(name: str, size: int, key: str, parts: int) -> None:
    if size % parts:
        raise ConfigError(f"{key}: found {parts}, expected a divisor of the model's {name} = {size}")


def check_engine(engine: EngineMemory, longest: int) -> None:
    """Refuse a server whose cache does not hold one sequence."""
    if engine.sequences < 1:
        raise ConfigError(
            f"sglang.mem_fraction: a server's GPU holds {engine.weights / 2**30:.1f} GiB of weights and then "
            f"{engine.tokens} tokens of cache, expected at least one sequence of {longest}; raise sglang.mem_fraction, "
            "sglang.tp or sglang.max_total_tokens"
        )


def check_gpu(what: str, found: int, gib: float | None, advice: str) -> None:
    """Refuse ``found`` bytes, the reserve included, on a GPU of ``gib``."""
    if gib is not None and found > gib * 2**30:
        raise ConfigError(
            f"launch.gpu_memory_gib: {what} needs {found / 2**30:.1f} GiB, expected at most {gib:g}; {advice}"
        )
