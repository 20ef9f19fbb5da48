"""Rules on the model's config.json: experts, routes, sizes that tensor parallelism divides, and memory of a GPU.

Amounts of memory are what `megarl plan` computes, in bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.config.root import Config, Layout
from megarl.config.tables.base import Row, row

if TYPE_CHECKING:  # the configuration is below the models
    from megarl.models.shapes import ModelShape

GIB = 2**30


def for_model(config: Config, shape: "ModelShape", can_compare: bool) -> Iterator[Row]:
    """Yield rules on experts, routes and cache. can_compare: whether the engine's routes and the routers are both
    seen."""
    every, watches = config.log.traces_every, isinstance(config.train.max_native_flip, float)
    has_latents, family = shape.fields.get("multi_latent_attention"), shape.family
    yield config.row("fp8_latents", config.rollout.fp8_kv_cache and has_latents, family=family)
    yield config.row("no_indexer", config.train.replay_indexer and not shape.indexer_layers, family=family)
    for key, is_set in (("train.max_native_flip", watches), ("log.traces_every", every)):
        yield config.row("no_routes_to_compare", shape.moe_layers and is_set and not can_compare, key=key)
    for name, is_set in (
        ("dense_replay", config.train.replay != "none"),
        ("dense_router_shift", config.train.resolved_objective.router_shift_floor),
        ("dense_native_flip", watches),
        ("dense_traces", every),
        ("dense_ep", config.parallel.ep > 1),
    ):
        yield config.row(name, not shape.moe_layers and is_set, family=family)


def for_layout(config: Config, shape: "ModelShape", layout: Layout) -> Iterator[Row]:
    """Yield rules on the division of heads, experts and widths, and on the model's positions."""
    yield _uneven("num_attention_heads", shape.fields["num_attention_heads"], "parallel.tp", layout.tp)
    yield _uneven("linear_num_key_heads", shape.fields.get("linear_num_key_heads", 0), "parallel.tp", layout.tp)
    if not shape.fields.get("multi_latent_attention"):
        yield _uneven("num_key_value_heads", shape.fields["num_query_groups"], "parallel.tp", layout.tp)
    yield _uneven("experts", shape.num_experts, "parallel.ep", layout.ep)
    has_biases = shape.num_experts and shape.fields.get("add_bias_linear")
    yield row("etp_of_biases", has_biases and layout.etp > 1, etp=layout.etp)
    for name, width in _cut_widths(shape):
        key, num = ("parallel.etp", layout.etp) if name.startswith("the experts") else ("parallel.tp", layout.tp)
        yield _uneven(name, width, key, num)
    longest, positions = config.longest_sequence, shape.max_sequence_length
    yield row("max_positions", longest > positions, longest=longest, positions=positions)


def for_servers(config: Config, shape: "ModelShape", fp8_block: int) -> Iterator[Row]:
    """Yield rules on the division of the model over servers, and on the reach of CUDA IPC."""
    if not config.rollout.engine_kind.server:
        return
    settings, fields, tp = config.sglang, shape.fields, config.sglang.tp
    yield _uneven("num_attention_heads", fields["num_attention_heads"], "sglang.tp", tp)
    groups = fields.get("num_query_groups") or 0
    yield config.row("key_value_heads", groups % tp and tp % groups, groups=groups)
    for name, width in _cut_widths(shape):
        yield _uneven(name, width, "sglang.tp", tp)
    for name, width in _fp8_widths(shape, tp) if settings.fp8 else ():
        yield config.row("fp8_blocks", width % fp8_block, of=name, width=width, block=fp8_block)
    last, most = max(settings.gpus, default=0), config.launch.ranks_per_node - 1
    yield config.row("ipc_gpus", last > most and config.weight_sync == "ipc", last=last, most=most)  # never apart


def _uneven(name: str, size: int, key: str, num: int) -> Row:
    return row("uneven", size % num, key=key, num=num, of=name, size=size)


def _cut_widths(shape: "ModelShape") -> Iterator[tuple[str, int]]:
    """Yield (name, width) of the gated layers that tensor parallelism divides."""
    fields = shape.fields
    if len(shape.moe_layers) < shape.num_layers:
        yield "intermediate_size", fields["ffn_hidden_size"]
    if shape.num_experts:
        yield "the experts' intermediate size", fields["moe_ffn_hidden_size"]
    if fields.get("moe_shared_expert_intermediate_size"):
        yield "the shared experts' intermediate size", fields["moe_shared_expert_intermediate_size"]


def _fp8_widths(shape: "ModelShape", tp: int) -> Iterator[tuple[str, int]]:
    """Yield (name, width on one of ``tp`` GPUs) of matrices that SGLang takes in whole blocks of 128 x 128 only.

    Read in SGLang 0.5.23: joined matrices (queries, keys and values; gate and up) and matrices divided by tp.
    """
    fields = shape.fields
    for name, width in _cut_widths(shape):
        yield name, width // tp
    heads, groups = fields["num_attention_heads"], fields.get("num_query_groups")
    if groups:
        yield "the queries", heads * fields["kv_channels"] // tp
        yield "the keys", max(groups // tp, 1) * fields["kv_channels"]
    elif tp > 1:
        yield "the queries", heads * (fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"]) // tp
        yield "the values", heads * fields["v_head_dim"] // tp


def for_reference(path: str, reference: Mapping[str, Any] | None, policy: Mapping[str, Any]) -> Iterator[Row]:
    """Yield rules on the model of model.reference. reference: its shape by field, None without a config.json."""
    yield row("no_reference", reference is None, path=path)
    for name, value in (reference or {}).items():
        yield row("other_reference", value != policy[name], path=path, field=name, value=value, expected=policy[name])


def for_cache(weights: int, tokens: int, sequences: int, longest: int) -> Iterator[Row]:
    """Yield the rule that a server's cache holds one sequence of maximum length."""
    yield row("small_cache", sequences < 1, gib=weights / GIB, tokens=tokens, longest=longest)


def for_gpus(limit_gib: float | None, needs: Iterable[tuple[str, int, str]]) -> Iterator[Row]:
    """Yield the rule that a GPU has enough memory for each holder: (holder, bytes, remedy)."""
    if limit_gib is None:
        return
    for holder, amount, remedy in needs:
        facts = {"holder": holder, "gib": amount / GIB, "limit": limit_gib, "remedy": remedy}
        yield row("gpu_memory", amount > limit_gib * GIB, **facts)
