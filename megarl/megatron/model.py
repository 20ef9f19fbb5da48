"""Builds Megatron GPT models from a Hugging Face config: packed sequences, any TP/EP/PP layout, TE or local layers."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.errors import ConfigError
from megarl.megatron.attention import NormOverHeads, PackedAttention, RMSNorm
from megarl.megatron.versions import TAKES_PADDING_MASK, for_stage, refuse_missing
from megarl.models.shapes import ModelShape

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


def transformer_config(shape: ModelShape, overrides: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config: what every megarl run needs, the model's shape, then the layout and the user's overrides.

    The router computes in fp32, and there is no dropout, because log-probabilities of two passes must agree.
    """
    defaults: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": HAVE_TE,
        "batch_p2p_comm": torch.cuda.is_available(),
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bias_activation_fusion": HAVE_TE,
        "bias_dropout_fusion": HAVE_TE,
        "apply_rope_fusion": HAVE_TE,
    }
    values = {**defaults, **shape.fields, **overrides}
    has_deep_ep = torch.cuda.is_available() and importlib.util.find_spec("deep_ep") is not None
    if values["moe_token_dispatcher_type"] == "flex" and not has_deep_ep:
        raise ConfigError(
            'parallel.dispatcher = "flex" needs GPUs and the deep_ep package, expected both; use "alltoall"'
        )
    if values.get("multi_latent_attention"):
        config: TransformerConfig = MLATransformerConfig(**{**values, "apply_rope_fusion": False})  # a kernel for YaRN
    else:
        config = TransformerConfig(**values)
    refuse_missing(config)
    return config


def layer_spec(config: TransformerConfig, vp_stage: int | None, shape: ModelShape) -> TransformerBlockSubmodules:
    """Layers of one pipeline stage: Transformer Engine's where it is installed, else local ones for packed input."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=HAVE_TE, normalization=config.normalization, **for_stage(vp_stage)
    )
    if HAVE_TE:
        if shape.norm_over_heads:
            raise ConfigError(f"{shape.family}: its query and key norms are built without Transformer Engine only")
        return spec
    layers = copy.deepcopy(spec.layer_specs or [])
    for layer in layers:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            from megatron.core.post_training.modelopt.layers import Linear  # not in every release

            # In column-parallel ones, the gradient of the rotated keys would come from a rank's own heads only.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            norm = ModuleSpec(RMSNorm, params={"own_eps": shape.latent_norm_epsilon})
            attention.q_layernorm = attention.kv_layernorm = norm
        elif config.qk_layernorm and shape.norm_over_heads:
            attention.q_layernorm = ModuleSpec(NormOverHeads, params={"num_heads": config.num_attention_heads})
            attention.k_layernorm = ModuleSpec(NormOverHeads, params={"num_heads": config.num_query_groups})
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm if spec.layer_norm else None)


def build_model(shape: ModelShape, config: TransformerConfig) -> list[GPTModel]:
    """The model chunks of this rank (one, or one per virtual stage), with Megatron's random initial weights.

    The vocabulary is padded up to a multiple of the tensor-parallel size; ``forward`` masks the padding.
    """
    stages = config.virtual_pipeline_model_parallel_size
    tp = parallel_state.get_tensor_model_parallel_world_size()
    chunks = []
    for stage in [None] if stages is None else range(stages):
        named = for_stage(stage)
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config, stage, shape),  # type: ignore[arg-type]
            vocab_size=-(-shape.vocab_size // tp) * tp,
            max_sequence_length=shape.max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stages is None, **named),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stages is None, **named),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_percent=shape.rotary_percent,
            rotary_base=shape.rotary_base,  # type: ignore[arg-type]
            rope_scaling=shape.rope_factor is not None,
            rope_scaling_factor=shape.rope_factor or 1.0,
            **named,
        )
        if config.moe_router_enable_expert_bias and TAKES_PADDING_MASK:
            _fix_expert_bias(chunk)
        chunks.append(chunk.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else chunk)
    return chunks


def unwrap(chunk: torch.nn.Module) -> Any:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def _fix_expert_bias(chunk: GPTModel) -> None:
    """Make routers with an expert bias accept a padding mask: 0.16.1 combines masks of shapes [T] and [T, E]."""
    for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
        count = router._apply_expert_bias

        def by_token(routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None, count: Any = count) -> None:
            count(routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

        router._apply_expert_bias = by_token  # type: ignore[method-assign]
