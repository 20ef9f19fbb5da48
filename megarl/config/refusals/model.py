"""Rules on the model's config.json: experts, routes, sizes that tensor parallelism divides, and memory of a GPU.

Amounts of memory are what `megarl plan` computes, in bytes.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megarl.config.root import Config, Layout
from megarl.config.tables.base import Row

if TYPE_CHECKING:  # the configuration is below the models
    from megarl.models.shapes import ModelShape

GIB = 2**30


def for_model(config: Config, shape: "ModelShape", can_compare: bool) -> Iterator[Row]:
    """Yield rules on experts, routes and cache. can_compare: whether the engine's routes and the routers are both
    seen."""
    replay, flip = config.train.replay, config.train.max_native_flip
    every, ep = config.log.traces_every, config.parallel.ep
    yield (
        config.rollout.fp8_kv_cache and shape.fields.get("multi_latent_attention"),
        f"rollout.fp8_kv_cache: found true with the {shape.family} model in model.path: FP8 engines keep its latents, "
        "the local engine keeps keys and values",
        "set it to false",
    )
    for key, is_set in (("train.max_native_flip", isinstance(flip, float)), ("log.traces_every", every)):
        yield (
            shape.moe_layers and is_set and not can_compare,
            f"{key}: found without routes to compare or write: the engine returns none, or a setting in [megatron] "
            "hides the routers (see `megarl doctor`)",
            "remove it",
        )
    watched = "no routers to watch; remove it (train.max_k3 watches the engines)"
    for is_set, message, because in (
        (replay != "none", f'train.replay: found "{replay}", expected "none"', "no routes to replay"),
        (isinstance(flip, float), f"train.max_native_flip: found {flip}", watched),
        (every, f"log.traces_every: found {every}, expected 0", "no routes to write"),
        (ep > 1, f"parallel.ep: found {ep}, expected 1", "no experts; remove it"),
    ):
        dense = f"the {shape.family} model in model.path is dense, and has {because}"
        yield not shape.moe_layers and is_set, f"{message}: {dense}"


def for_layout(config: Config, shape: "ModelShape", layout: Layout) -> Iterator[Row]:
    """Yield rules on the division of heads, experts and widths, and on the model's positions."""
    yield _uneven("num_attention_heads", shape.fields["num_attention_heads"], "parallel.tp", layout.tp)
    if not shape.fields.get("multi_latent_attention"):
        yield _uneven("num_key_value_heads", shape.fields["num_query_groups"], "parallel.tp", layout.tp)
    yield _uneven("experts", shape.num_experts, "parallel.ep", layout.ep)
    yield (
        shape.num_experts and shape.fields.get("add_bias_linear") and layout.etp > 1,
        f"parallel.etp: found {layout.etp} (by default parallel.tp), expected 1: experts with biases are not cut",
    )
    for name, width in _cut_widths(shape):
        key, num = ("parallel.etp", layout.etp) if name.startswith("the experts") else ("parallel.tp", layout.tp)
        yield _uneven(name, width, key, num)
    yield (
        config.longest_sequence > shape.max_sequence_length,
        f"rollout.max_response_tokens: found prompts and responses of up to {config.longest_sequence} tokens, expected "
        f"at most the model's max_position_embeddings = {shape.max_sequence_length}",
        "lower it or data.max_prompt_tokens",
    )


def for_servers(config: Config, shape: "ModelShape", fp8_block: int) -> Iterator[Row]:
    """Yield rules on the division of the model over servers, and on the reach of CUDA IPC."""
    if not config.rollout.engine_kind.server:
        return
    settings, fields, tp = config.sglang, shape.fields, config.sglang.tp
    yield _uneven("num_attention_heads", fields["num_attention_heads"], "sglang.tp", tp)
    groups = fields.get("num_query_groups") or 0
    yield (
        groups % tp and tp % groups,
        f"sglang.tp: found {tp} for {groups} key-value heads, expected a divisor or a multiple of them",
    )
    for name, width in _cut_widths(shape):
        yield _uneven(name, width, "sglang.tp", tp)
    for name, width in _fp8_widths(shape, tp) if settings.fp8 else ():
        yield (
            width % fp8_block,
            f"sglang.tp: found {tp} with sglang.fp8 = true, which leaves a GPU {width} of {name}, expected a multiple "
            f"of {fp8_block}",
            "lower sglang.tp, or set sglang.fp8 = false",
        )
    last, ranks = max(settings.gpus, default=0), config.launch.ranks_per_node
    yield (
        last >= ranks and config.weight_sync == "ipc",  # never apart
        f"sglang.gpus: found {last} on nodes with launch.ranks_per_node = {ranks} GPUs of the trainer and weights sent "
        f"by CUDA IPC, expected 0 to {ranks - 1}",
        'set sglang.sync = "distributed" if they share no GPU',
    )


def _uneven(name: str, size: int, key: str, num: int) -> Row:
    return size % num, f"{key}: found {num}, expected a divisor of the model's {name} = {size}"


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
    yield (
        reference is None,
        f"model.reference: {path} holds no config.json; expected a Hugging Face checkpoint folder",
    )
    for name, value in (reference or {}).items():
        yield (
            value != policy[name],
            f"model.reference: {path} has {name} {value}, the policy {policy[name]}; expected the same architecture",
        )


def for_cache(weights: int, tokens: int, sequences: int, longest: int) -> Iterator[Row]:
    """Yield the rule that a server's cache holds one sequence of maximum length."""
    yield (
        sequences < 1,
        f"sglang.mem_fraction: a server's GPU holds {weights / GIB:.1f} GiB of weights and then {tokens} tokens of "
        f"cache, expected at least one sequence of {longest}",
        "raise sglang.mem_fraction, sglang.tp or sglang.max_total_tokens",
    )


def for_gpus(limit_gib: float | None, needs: Iterable[tuple[str, int, str]]) -> Iterator[Row]:
    """Yield the rule that a GPU has enough memory for each holder: (holder, bytes, remedy)."""
    if limit_gib is None:
        return
    for holder, amount, remedy in needs:
        yield (
            amount > limit_gib * GIB,
            f"launch.gpu_memory_gib: {holder} needs {amount / GIB:.1f} GiB, expected at most {limit_gib:g}",
            remedy,
        )
