"""Memory of the sampling engine on one GPU: weights, cache, and how many tokens and sequences the cache holds."""

from dataclasses import dataclass
from math import prod

from megarl.config import Config
from megarl.core.fp8_names import BLOCK, grid_of, is_fp8_weight
from megarl.models.names import Rule, dimensions, is_fp32, rules_of
from megarl.models.shapes import ModelShape
from megarl.ops.plan.trainer_memory import ELEMENT

DEFAULT_MEM_FRACTION = 0.85
"""Assumed if sglang.mem_fraction is not set; SGLang then chooses 0.8 to 0.9 by itself."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of a server, or on one rank of the trainer with the local engine."""

    weights: int
    cache: int  # keys and values
    cache_per_token: int
    tokens: int  # in the cache of a server
    sequences: int  # of maximum length, in the cache of a server at once

    @property
    def total(self) -> int:
        return self.weights + self.cache


def engine_memory(config: Config, shape: ModelShape) -> EngineMemory:
    """Return the memory of a server within ``mem_fraction`` of a GPU and ``max_total_tokens``, or of the local engine
    with a full batch.

    Without either limit, the cache holds one sequence of maximum length, the least that can work.
    """
    element, longest = ELEMENT[config.rollout.dtype], config.longest_sequence
    if not config.rollout.engine_kind.server:
        per_token = cache_bytes_per_token(shape, element, expanded=True)
        batch = min(config.rollout.max_batch_size, config.responses_per_step)
        tokens = batch * longest
        weights = weight_bytes(shape, ELEMENT["fp32"] if config.rollout.fp8_activations else element)
        return EngineMemory(weights, per_token * tokens, per_token, tokens, batch)
    settings, gib = config.sglang, config.launch.gpu_memory_gib
    weights = weight_bytes(shape, element, fp8=settings.fp8, tp=settings.tp)
    per_token = cache_bytes_per_token(shape, element, settings.tp)
    limits = [] if settings.max_total_tokens is None else [settings.max_total_tokens]
    if gib is not None:
        pool = int((settings.mem_fraction or DEFAULT_MEM_FRACTION) * gib * 2**30)
        limits.append(max(0, pool - weights) // per_token)
    tokens = min(limits, default=longest)
    return EngineMemory(weights, per_token * tokens, per_token, tokens, tokens // longest)


def cache_bytes_per_token(shape: ModelShape, element: int, tp: int = 1, *, expanded: bool = False) -> int:
    """Return the bytes of keys and values on one GPU, of all layers but those with linear attention.

    Grouped attention: 2 L max(kv_heads / tp, 1) head_dim e. Latent attention: L (kv_rank + rope + index_head_dim) e,
    whole on each GPU; ``expanded``: keys and values of all heads / tp, as in the trainer and in transformers before
    5.15.
    """
    fields = shape.fields
    if fields.get("multi_latent_attention") and expanded:
        width = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"] + fields["v_head_dim"]
        width *= fields["num_attention_heads"] // tp
    elif fields.get("multi_latent_attention"):
        width = fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"] + fields.get("dsa_indexer_head_dim", 0)
    else:
        width = 2 * max(fields["num_query_groups"] // tp, 1) * fields["kv_channels"]
    return (shape.num_layers - len(shape.linear_layers)) * width * element


def weight_bytes(shape: ModelShape, element: int, *, fp8: bool = False, tp: int = 1) -> int:
    """Return the bytes of weights on one of ``tp`` GPUs of a server; with tp = 1 also the bytes of an update.

    FP8: one byte for each value of a linear weight and four for each block of 128 x 128; all remaining weights in e
    bytes.
    """
    sizes = dimensions(shape)
    total = 0
    for rule in rules_of(shape):
        count = sum(1 for _ in rule.places(shape))
        for name, dims in zip(rule.hf, rule.dims, strict=True):
            dimensions_of = tuple(sizes[name_of] for name_of in dims.split())
            in_fp8 = fp8 and is_fp8_weight(name)
            size = (1 if in_fp8 else 4 if is_fp32(name) else element) * prod(dimensions_of)
            size += 4 * prod(grid_of(dimensions_of, BLOCK)) if in_fp8 else 0
            total += count * size // _shares(rule, name, shape, tp)
    return total


def _shares(rule: Rule, name: str, shape: ModelShape, tp: int) -> int:
    """Number of parts into which a server divides a tensor; keys and values have at most one part per head."""
    if rule.layout == "replicated" or "_a_proj" in name:
        return 1
    return min(tp, shape.fields["num_query_groups"]) if rule.layout == "qkv" and ".q_proj." not in name else tp
