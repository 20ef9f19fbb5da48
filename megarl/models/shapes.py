"""The one reader of config.json: the shape of a model in Megatron's terms, and that of its routes.

Light on purpose, without torch or pydantic: SGLang's processes and ``megarl plan`` read shapes too.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.models.hf_folder import read_dtype
from megarl.models.rope import latent_rope, llama3_factor, read_rope


@dataclass(frozen=True, slots=True)
class ModelShape:
    family: str  # key of ``names.FAMILIES``
    fields: Mapping[str, Any]
    """Values for ``TransformerConfig``, or ``MLATransformerConfig`` with ``multi_latent_attention``."""
    vocab_size: int
    max_sequence_length: int
    rotary_base: float
    tied_embeddings: bool
    rotary_percent: float = 1.0  # share of a head's dimensions that is rotated
    latent_norm_epsilon: float | None = None  # of latent queries, keys and values, where it is not that of other norms
    norm_over_heads: bool = False  # query and key norms run over all heads at once, not over each
    rope_factor: float | None = None  # of Llama 3.1's scaling of rotary frequencies; None without it

    @property
    def num_layers(self) -> int:
        return self.fields["num_layers"]

    @property
    def num_experts(self) -> int:  # 0 for a dense model
        return self.fields.get("num_moe_experts") or 0

    @property
    def topk(self) -> int:  # 0 for a dense model
        return self.fields.get("moe_router_topk", 0)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based global indices of the MoE layers: column ``l`` of a routing trace belongs to layer moe_layers[l]."""
        return tuple(index for index, is_moe in enumerate(self.fields.get("moe_layer_freq", ())) if is_moe)

    def describe(self) -> dict[str, Any]:
        """Plain data that a checkpoint stores, to recognise a checkpoint of another model."""
        return {**self.fields, "vocab_size": self.vocab_size, "tied_embeddings": self.tied_embeddings}


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Which layers of a model have experts, and how many: the shape of its routing traces. A dense model has none."""

    num_layers: int  # all decoder layers, dense ones included
    moe_layers: tuple[int, ...]  # 0-based indices of the L MoE layers
    num_experts: int  # E
    topk: int  # K

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_layers)) - set(self.moe_layers)))

    @staticmethod
    def of(hf: Mapping[str, Any]) -> "MoeShape":
        """Read any config with the names of the families below, of a dense model (``DENSE``) too.

        ConfigError if it is of neither.
        """
        if hf.get("model_type") in DENSE:
            return MoeShape(hf["num_hidden_layers"], (), 0, 0)
        experts = next((hf[name] for name in _EXPERT_COUNTS if hf.get(name)), 0)
        topk = hf.get("num_experts_per_tok")
        if not experts or not topk:
            *names, last = _EXPERT_COUNTS
            raise ConfigError(
                f"model type {hf.get('model_type')!r} has no experts: its config.json names neither "
                f"{', '.join(names)} nor {last} together with num_experts_per_tok"
            )
        num_layers, dense = hf["num_hidden_layers"], set(hf.get("mlp_only_layers") or ())
        first = hf.get("first_k_dense_replace") or 0
        step = hf.get("decoder_sparse_step") or hf.get("moe_layer_freq") or 1
        offset = 1 if hf.get("decoder_sparse_step") else 0  # Qwen counts layers from 1, DeepSeek from 0
        layers = (i for i in range(first, num_layers) if i not in dense and (i + offset) % step == 0)
        return MoeShape(num_layers, tuple(layers), experts, topk)

    @staticmethod
    def of_megatron(config: Any) -> "MoeShape":
        """Read Megatron's ``TransformerConfig``; without experts it has no MoE layers."""
        count, frequency = config.num_layers, config.moe_layer_freq
        is_moe = frequency if isinstance(frequency, list) else [index % frequency == 0 for index in range(count)]
        layers = tuple(index for index, moe in enumerate(is_moe) if moe) if config.num_moe_experts else ()
        return MoeShape(count, layers, config.num_moe_experts or 0, config.moe_router_topk if layers else 0)


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""E under the names of Qwen and OLMoE, of Mixtral, and of DeepSeek and GLM-4."""


Part = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Reads a part of the fields from a config."""


def _layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"the model's activation is {activation!r}, expected 'silu'")
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "ffn_hidden_size": hf["intermediate_size"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
    }


def _grouped_attention(norm: str = "", bias: str = "", has_norm: bool = False, has_bias: bool = False) -> Part:
    """Keys of the config that switch query and key norms and biases on, and what holds without them."""

    def read(hf: Mapping[str, Any]) -> dict[str, Any]:
        kind = read_rope(hf)["rope_type"]
        if kind not in ("default", "llama3"):
            raise ConfigError(f"rope type {kind!r} of the model is not supported; expected 'default' or 'llama3'")
        return {
            "num_query_groups": hf["num_key_value_heads"],
            "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            "qk_layernorm": hf.get(norm, has_norm),
            "add_qkv_bias": hf.get(bias, has_bias),
        }

    return read


def _llama_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise ConfigError(
            f"the model has attention_bias {hf.get('attention_bias')} and mlp_bias {hf.get('mlp_bias')}, expected false"
        )
    return _grouped_attention()(hf)


def _softmax_experts(width: str, normalised: bool = False) -> Part:
    # A softmax over the chosen logits equals one over all logits, normalised again over the chosen.
    return lambda hf: {
        **_experts(hf, width),
        "moe_router_pre_softmax": not (normalised or hf.get("norm_topk_prob", False)),
    }


def _experts(hf: Mapping[str, Any], width: str) -> dict[str, Any]:
    moe = MoeShape.of(hf)
    return {
        "moe_ffn_hidden_size": hf[width],
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.topk,
        "moe_layer_freq": [int(layer in moe.moe_layers) for layer in range(moe.num_layers)],
    }


def _sigmoid_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3's router: sigmoid scores, a bias for the choice alone, expert groups, shared experts."""
    topk, groups, chosen = hf["num_experts_per_tok"], hf.get("n_group") or 1, hf.get("topk_group") or 1
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or not hf.get("norm_topk_prob", True) or topk < 2:
        raise ConfigError(
            f"the model's router has scoring_func {hf.get('scoring_func', 'sigmoid')!r}, norm_topk_prob "
            f"{hf.get('norm_topk_prob', True)} and top-{topk}; expected 'sigmoid', true and at least 2 experts"
        )
    if groups > 1 and topk // chosen != 2:  # the model ranks groups by 2 experts, Megatron by topk // topk_group
        raise ConfigError(
            f"the model chooses {topk} experts from {chosen} groups, expected twice as many experts as groups: "
            "Megatron ranks groups by another number of experts"
        )
    return {
        **_experts(hf, "moe_intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor") or 1.0,
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0) or None,
    }


def _gated_shared_expert(hf: Mapping[str, Any]) -> dict[str, Any]:
    width = hf["shared_expert_intermediate_size"]
    return {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": True}


def _latent_attention(hf: Mapping[str, Any]) -> dict[str, Any]:
    if hf.get("attention_bias") or not hf.get("rope_interleave", True):
        raise ConfigError(
            f"the model has attention_bias {hf.get('attention_bias')} and rope_interleave {hf.get('rope_interleave')}, "
            "expected false and true"
        )
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        **latent_rope(hf),
    }


_QWEN3 = _grouped_attention(bias="attention_bias", has_norm=True)
_DEEPSEEK_V3 = (_latent_attention, _sigmoid_experts)  # Moonlight too, which has no compressed queries
SHAPES: Mapping[str, tuple[Part, ...]] = {
    "qwen3_moe": (_QWEN3, _softmax_experts("moe_intermediate_size")),
    "qwen3": (_QWEN3,),
    "qwen2": (_grouped_attention(has_bias=True),),
    "llama": (_llama_attention,),
    "qwen2_moe": (
        _grouped_attention(bias="qkv_bias", has_bias=True),
        _softmax_experts("moe_intermediate_size"),
        _gated_shared_expert,
    ),
    "mixtral": (_grouped_attention(), _softmax_experts("intermediate_size", normalised=True)),
    "olmoe": (_QWEN3, _softmax_experts("intermediate_size")),
    "glm4_moe": (_grouped_attention("use_qk_norm", "attention_bias"), _sigmoid_experts),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}
"""Hugging Face ``model_type`` -> readers of what its config adds to the common fields."""
DENSE = ("llama", "qwen2", "qwen3")
"""Those without experts."""
_LACKING = {
    "qwen3_next": "megarl packs sequences, and the gated delta net of Megatron-Core up to 0.16.1 takes no packed ones",
}
"""Model types that the tested releases of Megatron cannot build, and why."""


def read_shape(model_path: str | Path) -> ModelShape:
    """The shape of the checkpoint in folder ``model_path``, from its config.json; ConfigError if it is unknown."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, expected a folder with a Hugging Face checkpoint")
    try:
        hf = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}), expected the config of a Hugging Face model") from error
    if not isinstance(hf, dict):
        raise ConfigError(f"{path} holds no JSON object, expected the config of a Hugging Face model")
    kind = hf.get("model_type", "")
    if kind not in SHAPES:
        why = f" ({_LACKING[kind]})" if kind in _LACKING else ""
        known = ", ".join(sorted(SHAPES))
        raise ConfigError(f"model type {kind!r} in {path} is not supported{why}; supported are {known}")
    for name in _SIZES:
        if not isinstance(hf.get(name), int) or hf[name] < 1:
            raise ConfigError(f"{path}: {name} is {hf.get(name)!r}, expected a number of at least 1")
    read_dtype(hf)
    try:
        return _read(hf, "deepseek_v3" if kind == "kimi_k2" else kind)
    except KeyError as error:
        raise ConfigError(f"{path} lacks {error}, which a {kind} model has") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} is no config of a {kind} model: {error}") from error


def _read(hf: Mapping[str, Any], family: str) -> ModelShape:
    if hf.get("use_sliding_window") or (family == "mixtral" and hf.get("sliding_window")):
        raise ConfigError("the model uses sliding-window attention, which is not supported")
    if family == "olmoe" and hf.get("clip_qkv"):
        raise ConfigError(f"the model clips queries, keys and values at {hf['clip_qkv']}, which is not supported")
    rope, fields = read_rope(hf), _layers(hf)
    for part in SHAPES[family]:
        fields |= part(hf)
    rotated = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    return ModelShape(
        family,
        fields,
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        rotary_base=float(rope.get("rope_theta", 10000.0)),
        tied_embeddings=hf.get("tie_word_embeddings", False),
        rotary_percent=rotated if family == "glm4_moe" else 1.0,
        latent_norm_epsilon=1e-6 if family == "deepseek_v3" else None,  # in the model's code, not rms_norm_eps
        norm_over_heads=family == "olmoe",
        rope_factor=llama3_factor(rope),
    )


_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
"""Sizes that every config must have."""
