"""Tiny MoE models with any router on any layout, and the same weights in all of them.

Every parameter is drawn whole from a seed made of its name in Megatron's sharded state dict, and each rank takes the
slice that the state dict says it holds. Gradients are put together the same way. Nothing of megarl's own name map is
involved, so the two check each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dispatch_probe import TopTwo
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from tiny_world import RECOMPUTE, config, join

from megarl.config import Config
from megarl.megatron.model import build_model, layer_spec, transformer_config
from megarl.megatron.policy import check_fields, layout_fields
from megarl.models.shapes import ModelShape
from megarl.replay.megatron_state import unwrap

NUM_LAYERS, NUM_EXPERTS, VOCAB = 4, 8, 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre_softmax": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.7},
    "fp64": {"moe_router_dtype": "fp64"},
    "sigmoid_bias": {**SIGMOID, "moe_router_topk_scaling_factor": 2.5},
    "grouped": {**SIGMOID, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "shared": {"moe_shared_expert_intermediate_size": 16},
    "dense_first": {"moe_layer_freq": [0, 1, 1, 1]},
    "every_other": {"moe_layer_freq": [0, 1, 0, 1]},
    "top1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top3": {"moe_router_topk": 3},
}
"""Router variants: fields of TransformerConfig on top of softmax over the two largest of eight logits, in fp32."""

LAYOUTS: dict[str, tuple[int, tuple[tuple[str, Any], ...]]] = {
    name: (ranks, tuple(sorted({**dict(sizes), **more}.items())))
    for name, ranks, sizes, more in [
        ("single", 1, [], {}),
        ("dp2", 2, [], {}),
        ("ep2", 2, [("ep", 2)], {}),
        ("tp2", 2, [("tp", 2)], {}),
        ("tp2 ep2 etp1", 2, [("tp", 2), ("ep", 2), ("etp", 1)], {}),
        ("cp2", 2, [("cp", 2)], {}),
        ("pp2", 2, [("pp", 2)], {}),
        ("pp2 uneven", 2, [("pp", 2)], {"num_layers_in_first_pipeline_stage": 1}),
        ("pp2 custom", 2, [("pp", 2)], {"pipeline_model_parallel_layout": "Et|tttL"}),
        ("pp2 vpp2", 2, [("pp", 2), ("vpp", 2)], {}),
        ("pp2 vpp2 custom", 2, [("pp", 2), ("vpp", 2)], {"pipeline_model_parallel_layout": "Et|tt|t|L"}),
        ("dp4", 4, [], {}),
        ("ep4", 4, [("ep", 4)], {}),
        ("tp4", 4, [("tp", 4)], {}),
        ("cp4", 4, [("cp", 4)], {}),
        ("pp4", 4, [("pp", 4)], {}),
        ("tp2 ep2 etp2", 4, [("tp", 2), ("ep", 2), ("etp", 2)], {}),
        ("tp2 ep4 etp1", 4, [("tp", 2), ("ep", 4), ("etp", 1)], {}),
        ("tp2 pp2 ep2 etp1", 4, [("tp", 2), ("pp", 2), ("ep", 2), ("etp", 1)], {}),
        ("cp2 ep2", 4, [("cp", 2), ("ep", 2)], {}),
        ("cp2 tp2 ep2 etp1", 4, [("cp", 2), ("tp", 2), ("ep", 2), ("etp", 1)], {}),
        ("cp2 pp2 vpp2", 4, [("cp", 2), ("pp", 2), ("vpp", 2)], {}),
        ("pp2 vpp2 ep2", 4, [("pp", 2), ("vpp", 2), ("ep", 2)], {}),
    ]
}
"""Name -> (ranks, [parallel] table with, where a layout needs them, fields of Megatron)."""


@dataclass(frozen=True)
class Variant:
    """One point of the matrix besides the layout."""

    recompute: str = "none"
    dispatcher: str = "alltoall"
    router: str = "softmax"
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.recompute}-{self.dispatcher}-{self.router}-{self.precision}"


def shape_of(router: str) -> ModelShape:
    fields: dict[str, Any] = {
        "num_layers": NUM_LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 8,
        "ffn_hidden_size": 32,
        "moe_ffn_hidden_size": 16,
        "num_moe_experts": NUM_EXPERTS,
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "moe_layer_freq": [1] * NUM_LAYERS,
        "moe_router_bias_update_rate": 0.0,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
    }
    return ModelShape("matrix", {**fields, **ROUTERS[router]}, VOCAB, 64, 10000.0, False)


@dataclass
class MatrixModel:
    """A model as a training loop holds it, without an optimizer."""

    settings: Config
    shape: ModelShape
    chunks: list[torch.nn.Module]
    router: TopTwo = field(default_factory=TopTwo)


def settings_of(layout: Mapping[str, Any], variant: Variant) -> Config:
    """The layout's [parallel] table and, where it has them, fields of the [megatron] table."""
    parallel = {name: value for name, value in layout.items() if not name.startswith(("num_layers", "pipeline"))}
    table = {f"megatron__{name}": value for name, value in layout.items() if name not in parallel}
    return config(
        "unused",  # type: ignore[arg-type]
        parallel,
        recompute=RECOMPUTE[variant.recompute],
        parallel__dispatcher=variant.dispatcher,
        model__dtype=variant.precision,
        parallel__distributed_optimizer=False,
        **table,
    )


def fields_of(settings: Config, variant: Variant, **more: Any) -> TransformerConfig:
    given = check_fields(settings.megatron)[TransformerConfig]
    fields = {**layout_fields(settings), **given, **more}
    return transformer_config(shape_of(variant.router), fields, DTYPES[variant.precision])


def build(settings: Config, variant: Variant, **more: Any) -> MatrixModel:
    """The model on this rank's share of the layout, with ``more`` fields of TransformerConfig; process groups exist."""
    dtype, shape = DTYPES[variant.precision], shape_of(variant.router)
    fields = fields_of(settings, variant, **more)
    chunks: Sequence[torch.nn.Module] = build_model(shape, fields)
    if dtype is not torch.float32:
        chunks = [Float16Module(fields, chunk) for chunk in chunks]
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = [
        DistributedDataParallel(fields, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    no_sync: list[Any] = [chunk.no_sync for chunk in wrapped]
    fields.finalize_model_grads_func = finalize_model_grads
    fields.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    fill(wrapped)
    return MatrixModel(settings, shape, list(wrapped), router_of(variant.router, wrapped))


def build_alone(variant: Variant, **more: Any) -> MatrixModel:
    """The model on one rank, whose process groups are made."""
    settings = settings_of({}, variant)
    join(settings)
    return build(settings, variant, **more)


def build_bare(variant: Variant, prediction_layers: int = 0, **more: Any) -> Any:
    """A GPTModel on one rank, not in DistributedDataParallel, whose hooks Python does not copy."""
    settings = settings_of({}, variant)
    join(settings)
    predicting = {"mtp_num_layers": prediction_layers, "mtp_loss_scaling_factor": 0.1} if prediction_layers else {}
    fields = fields_of(settings, variant, **predicting, **more)
    spec: Any = layer_spec(fields, None, shape_of(variant.router))
    block = get_gpt_mtp_block_spec(fields, spec, use_transformer_engine=False) if prediction_layers else None
    torch.manual_seed(0)
    model = GPTModel(
        config=fields,
        transformer_layer_spec=spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
        mtp_block_spec=block,
    )
    fill([model])
    return model


def shards(chunks: Sequence[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """Everything a checkpoint would hold, as the pieces of this rank."""
    for chunk in chunks:
        state = unwrap(chunk).sharded_state_dict()
        apply_factories(state)
        yield from (value for value in _leaves(state) if isinstance(value, ShardedTensor))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _place(shard: ShardedTensor) -> tuple[slice, ...]:
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return tuple(slice(start, start + size) for start, size in zip(shard.global_offset, sizes, strict=True))


def fill(chunks: Sequence[torch.nn.Module]) -> None:
    """Give every parameter and buffer values that depend on its name alone."""
    with torch.no_grad():
        for shard in shards(chunks):
            generator = torch.Generator().manual_seed(zlib.crc32(shard.key.encode()))
            whole = torch.randn(shard.global_shape, generator=generator)
            whole = 1.0 + 0.1 * whole if "norm" in shard.key else 0.15 * whole
            shard.data.copy_(whole[_place(shard)].reshape(shard.data.shape))


def gradients(chunks: Sequence[torch.nn.Module]) -> dict[str, np.ndarray]:
    """The whole gradient of every parameter by name, on every rank; copies on several ranks must agree."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.to(p.dtype)  # type: ignore[attr-defined]
    mine = [
        (s.key, tuple(s.global_shape), _place(s), s.data.detach().float().numpy().copy())
        for s in shards(chunks)
        if "bias" not in s.key
    ]
    for p, weight in zip(parameters, weights, strict=True):
        p.data = weight
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    found: dict[str, np.ndarray] = {}
    for key, shape, place, part in (piece for of_rank in ranks for piece in of_rank):
        whole = found.setdefault(key, np.full(shape, np.nan, np.float32))
        target = whole[place]
        part = part.reshape(target.shape)
        held = ~np.isnan(target)
        np.testing.assert_allclose(part[held], target[held], rtol=1e-6, atol=1e-9, err_msg=f"copies of {key}")
        whole[place] = part
    holes = [key for key, whole in found.items() if np.isnan(whole).any()]
    assert not holes, f"no rank holds all of {holes}"
    return found


class VariantRouter(TopTwo):
    """What a router variant does by itself, written down from its definition."""

    def __init__(self, router: str, biases: dict[int, torch.Tensor]) -> None:
        fields = shape_of(router).fields
        self.topk = fields["moe_router_topk"]
        self.sigmoid = fields.get("moe_router_score_function") == "sigmoid"
        self.before = fields["moe_router_pre_softmax"]
        self.groups = fields.get("moe_router_num_groups")
        self.group_topk = fields.get("moe_router_group_topk")
        self.scaling = fields.get("moe_router_topk_scaling_factor") or 1.0
        self.biases = biases

    def choose(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        scores = logits.sigmoid() + self.biases[layer] if self.sigmoid else logits
        if self.groups:
            by_group = scores.reshape(len(scores), self.groups, -1)
            value = by_group.sort(2, descending=True).values[..., : self.topk // self.group_topk].sum(2)
            kept = torch.zeros_like(value, dtype=torch.bool).scatter(1, value.topk(self.group_topk).indices, True)
            scores = by_group.masked_fill(~kept[..., None], float("-inf")).reshape(scores.shape)
        return scores.topk(self.topk, dim=1).indices

    def gates(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        if self.sigmoid:
            chosen = torch.where(experts, logits.sigmoid(), 0.0)
            return self.scaling * chosen / chosen.sum(1, keepdim=True)
        if self.before:
            return self.scaling * torch.where(experts, logits.softmax(1), 0.0)
        return self.scaling * logits.masked_fill(~experts, float("-inf")).softmax(1)


def router_of(router: str, chunks: Sequence[torch.nn.Module]) -> VariantRouter:
    """The oracle for the routers of this rank, with copies of their expert biases."""
    biases = {}
    for chunk in chunks:
        for layer in unwrap(chunk).decoder.layers:
            bias = getattr(getattr(layer.mlp, "router", None), "expert_bias", None)
            if bias is not None:
                biases[layer.layer_number - 1] = bias.detach().float().clone()
    return VariantRouter(router, biases)
