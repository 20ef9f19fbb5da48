"""Tiny checkpoints of every family that Megatron can be given, made by transformers.

Nothing is left at a value that hides a mistake: norms, biases and expert biases are random too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
_INDEXER: dict[str, Any] = {"index_topk": 3, "index_n_heads": 8, "index_head_dim": 8}
"""Fewer keys than the tests' sequences have; enough heads that no score is 0 by the relu of every head."""
_DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# As published ones say it, with other numbers.
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_VISION = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
    **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
_DELTA_NET: dict[str, Any] = {
    **_COMMON,
    **{"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 24, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "full_attention_interval": 2,
}
_QWEN3_5 = {key: value for key, value in _DELTA_NET.items() if key != "intermediate_size"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        {**_COMMON, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**_COMMON, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    ),
    "mixtral": ("mixtral", {**_COMMON, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "n_group": 4, "topk_group": 2}),
    "moonlight": (
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-5},
    ),
    "kimi_k2": ("deepseek_v3", {**_LATENT, "n_group": 1, "topk_group": 1, "rope_parameters": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": _DENSE_FIRST}),
    "deepseek_v32": (
        "deepseek_v32",
        {**_LATENT, **_INDEXER, "n_group": 4, "topk_group": 2, "num_experts": 8, "rope_parameters": YARN},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**_LATENT, **_INDEXER, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "indexer_rope_interleave": False}
        | {"indexer_types": ["full", "shared", "full", "shared"], "mlp_layer_types": _DENSE_FIRST}
        | {"num_experts_per_tok": 2},
    ),
    "glm4_moe": (
        "glm4_moe",
        {**_COMMON, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 1.5},
    ),
    "qwen3_next": ("qwen3_next", {**_DELTA_NET, "mlp_only_layers": [1]}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _QWEN3_5),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": _QWEN3_5,
            "vision_config": {k: v for k, v in _VISION.items() if k != "deepstack_visual_indexes"},
        },
    ),
    "dots1": (
        "dots1",
        {**_COMMON, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "solar_open": (
        "solar_open",
        {**_COMMON, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"attention_bias": True, "routed_scaling_factor": 1.5},
    ),
    "minimax_m2": (
        "minimax_m2",
        {**_COMMON, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "hy_v3": (
        "hy_v3",
        {**_COMMON, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "olmoe": ("olmoe", {**_COMMON, "num_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "text_config": {**_COMMON, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 12, "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2]}},
            "vision_config": _VISION,
        },
    ),
    "qwen3": ("qwen3", {**_COMMON, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", _COMMON),
    "llama": ("llama", {**_COMMON, "head_dim": 16, "rope_parameters": _LLAMA3}),
    "gpt_oss": (
        "gpt_oss",
        {**_COMMON, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 3}
        | {"rope_parameters": _YARN_OF_GPT_OSS, "swiglu_limit": 7.0},
    ),
}
"""Name -> (transformers' model type, its config)."""


def write_family(folder: Path, name: str, **changes: Any) -> Path:
    """A checkpoint with random weights, the same every time; ``changes`` are keys of its config. Returns ``folder``."""
    import torch
    from transformers import AutoConfig

    from megarl.engines.weights import auto_class
    from megarl.files.hf_config import family_entry

    kind, changed = FAMILIES[name]
    settings = {**changed, **changes}
    if "text_config" in changed:
        settings = {**changed, "text_config": {**changed["text_config"], **changes}}
    config = AutoConfig.for_model(kind, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = auto_class(config).from_config(config)
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                if "norm" in key:
                    is_centred = not tensor.any()
                    tensor.uniform_(0.5, 1.5).sub_(float(is_centred))
                elif "bias" in key:
                    tensor.normal_(std=0.1)
                elif "sinks" in key:
                    tensor.normal_()
    model.save_pretrained(folder, save_original_format=not family_entry(kind, "as_built"))
    if family_entry(kind, "turned"):
        turn_experts(folder)
    return folder


def turn_experts(folder: Path) -> None:
    """From the form in which transformers 5 saves such experts into that of published checkpoints, and back."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(turned, file, metadata={"format": "pt"})
