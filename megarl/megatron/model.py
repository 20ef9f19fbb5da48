"""Builds Megatron GPT models from a Hugging Face config: packed sequences, any TP/EP/PP layout, TE or local layers."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import ConfigError
from megarl.megatron.attention import PackedAttention, RMSNorm

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a Hugging Face config says about the model, in Megatron's terms."""

    family: str
    """``model_type`` of the Hugging Face config."""
    fields: Mapping[str, Any]
    """Values for ``TransformerConfig``."""
    vocab_size: int
    max_sequence_length: int
    rotary_base: float
    tied_embeddings: bool

    @property
    def num_layers(self) -> int:
        return self.fields["num_layers"]

    @property
    def num_experts(self) -> int:
        return self.fields["num_moe_experts"]

    @property
    def topk(self) -> int:
        return self.fields["moe_router_topk"]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based global indices of the MoE layers: column ``l`` of a routing trace belongs to layer moe_layers[l]."""
        return tuple(index for index, is_moe in enumerate(self.fields["moe_layer_freq"]) if is_moe)


def _qwen3_moe(hf: Mapping[str, Any]) -> ModelShape:
    """Qwen3-MoE: GQA with per-head q/k norms, softmax top-k routing, optional dense layers."""
    num_layers, step = hf["num_hidden_layers"], hf.get("decoder_sparse_step", 1)
    dense = set(hf.get("mlp_only_layers") or ())
    rope = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default" or hf.get("rope_scaling"):
        raise ConfigError(f"rope type {rope.get('rope_type')!r} of the model is not supported; expected 'default'")
    if hf.get("use_sliding_window"):
        raise ConfigError("the model uses sliding-window attention, which is not supported")
    normalised = hf.get("norm_topk_prob", False)
    return ModelShape(
        family="qwen3_moe",
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        rotary_base=float(rope["rope_theta"]),
        tied_embeddings=hf.get("tie_word_embeddings", False),
        fields={
            "num_layers": num_layers,
            "hidden_size": hf["hidden_size"],
            "num_attention_heads": hf["num_attention_heads"],
            "num_query_groups": hf["num_key_value_heads"],
            "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            "ffn_hidden_size": hf["intermediate_size"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "num_moe_experts": hf.get("num_experts") or hf["num_local_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            # softmax over the chosen logits equals softmax over all, renormalised over the chosen
            "moe_router_pre_softmax": not normalised,
            "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in range(num_layers)],
            "normalization": "RMSNorm",
            "layernorm_epsilon": hf["rms_norm_eps"],
            "qk_layernorm": True,
            "add_qkv_bias": hf.get("attention_bias", False),
        },
    )


SHAPES: Mapping[str, Callable[[Mapping[str, Any]], ModelShape]] = {"qwen3_moe": _qwen3_moe}
"""Hugging Face ``model_type`` -> reader of its config."""


def read_shape(model_path: str | Path) -> ModelShape:
    """The shape of the checkpoint in folder ``model_path``, from its config.json; ConfigError if it is unknown."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; model.path must be a folder with a Hugging Face checkpoint")
    hf = json.loads(path.read_text())
    reader = SHAPES.get(hf.get("model_type", ""))
    if reader is None:
        raise ConfigError(
            f"model type {hf.get('model_type')!r} in {path} is not supported; supported are {', '.join(sorted(SHAPES))}"
        )
    return reader(hf)


def transformer_config(shape: ModelShape, overrides: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config: the model's shape, what every megarl run needs, then the layout and the user's overrides.

    Fusions are off without Transformer Engine. The router computes in fp32, and there is no dropout, because
    log-probabilities of two passes over one batch must agree. What Megatron refuses is as it raises it (see
    ``refusals``).
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
        "attention_softmax_in_fp32": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": HAVE_TE,
        "calculate_per_token_loss": False,
        "variable_seq_lengths": False,
        "batch_p2p_comm": torch.cuda.is_available(),
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bias_activation_fusion": HAVE_TE,
        "bias_dropout_fusion": HAVE_TE,
        "apply_rope_fusion": HAVE_TE,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    values = {**defaults, **shape.fields, **overrides}
    if values["moe_token_dispatcher_type"] == "flex":
        _require_deep_ep()
    return TransformerConfig(**values)


def _require_deep_ep() -> None:
    if not torch.cuda.is_available() or importlib.util.find_spec("deep_ep") is None:
        raise ConfigError(
            'parallel.dispatcher = "flex" needs GPUs and the deep_ep package, expected both; use "alltoall"'
        )


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layers of one pipeline stage: Transformer Engine's where it is installed, else local ones for packed input."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=HAVE_TE, normalization=config.normalization, vp_stage=vp_stage
    )
    if HAVE_TE:
        return spec
    layers = copy.deepcopy(spec.layer_specs or [])
    for layer in layers:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm if spec.layer_norm else None)


def build_model(shape: ModelShape, config: TransformerConfig) -> list[GPTModel]:
    """The model chunks of this rank (one, or one per virtual stage), with Megatron's random initial weights.

    The vocabulary is padded up to a multiple of the tensor-parallel size; ``forward`` masks the padding.
    Needs ``parallel_state`` to be initialised.
    """
    stages = config.virtual_pipeline_model_parallel_size
    tp = parallel_state.get_tensor_model_parallel_world_size()
    chunks = []
    for stage in [None] if stages is None else range(stages):
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config, stage),  # type: ignore[arg-type]
            vocab_size=-(-shape.vocab_size // tp) * tp,
            max_sequence_length=shape.max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stages is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stages is None, vp_stage=stage),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rotary_base,  # type: ignore[arg-type]
            vp_stage=stage,
        )
        if config.moe_router_enable_expert_bias:
            _mend_expert_bias(chunk)
        chunks.append(chunk.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else chunk)
    return chunks


def _mend_expert_bias(chunk: GPTModel) -> None:
    """Let routers with an expert bias take a padding mask: 0.16.1 combines masks of [T] and [T, E]."""
    for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
        count = router._apply_expert_bias

        def by_token(routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None, count: Any = count) -> None:
            count(routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

        router._apply_expert_bias = by_token  # type: ignore[method-assign]
