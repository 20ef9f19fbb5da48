"""Tiny checkpoints to be quantised, and what they have to become: an independent loop over blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_world import safetensors_of

BLOCK = (16, 16)
_COMMON: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": 32},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "num_experts": 8, "index_topk": 3, "index_n_heads": 2, "index_head_dim": 16},
}
"""Names w1 to w3, shared experts and their gate, latent attention, an indexer, a dense layer, a tied head; whole blocks
of 16."""


def write_family(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A random model; the first block of every second matrix is zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in sorted(name for name, weight in weights.items() if weight.dim() == 2)[::2]:
        weights[name][: BLOCK[0], : BLOCK[1]] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rounded_by_loops(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """float32 values of the blocks, in one division and one product each."""
    result = torch.zeros(weight.shape)
    for top in range(0, weight.shape[0], block[0]):
        for left in range(0, weight.shape[1], block[1]):
            where = (slice(top, top + block[0]), slice(left, left + block[1]))
            part = weight[where].float()
            largest = part.abs().max().item()
            if largest == 0.0:
                continue
            scale = torch.tensor(largest / 448.0, dtype=torch.float32)
            result[where] = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return result


def same_tensors(one: Path, other: Path) -> bool:
    first, second = safetensors_of(one), safetensors_of(other)
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))
        for name in first
    )
