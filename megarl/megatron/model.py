"""Builds Megatron GPT models from a Hugging Face config: packed sequences, any TP/EP/PP layout, TE or local layers."""

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import is_te_min_version
from torch.nn.functional import silu

from megarl.errors import ConfigError, refusal, refuse_if
from megarl.files.texts import read_table
from megarl.megatron.versions import require_release
from megarl.models.shapes import ModelShape
from megarl.stand_ins.attention import NormOverHeads, PackedAttention, RMSNorm
from megarl.stand_ins.sparse_attention import SparseAttention, SparseLatentAttention
from megarl.stand_ins.te import uses_te


def transformer_config(shape: ModelShape, overrides: Mapping[str, Any], dtype: torch.dtype) -> TransformerConfig:
    """Megatron's config: defaults of every run, the model's shape, then the layout and the user's overrides.

    The router computes in fp32, and there is no dropout, because log-probabilities of two passes must agree.
    ConfigError for settings beyond the machine or the release of Megatron.
    """
    require_release()
    has_te = uses_te(shape)
    defaults: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "moe_grouped_gemm": has_te,
        **_pipeline_messages(overrides),
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bias_activation_fusion": has_te,
        "bias_dropout_fusion": has_te and not shape.fields.get("add_bias_linear"),  # refused for TE's experts
        "apply_rope_fusion": has_te,
    }
    values = {**read_table(__file__), **defaults, **shape.fields, **overrides}
    values["activation_func"] = {"silu": silu, "quick_gelu": quick_gelu}[values["activation_func"]]
    yarn = {name: values.pop(name) for name in shape.fields if name.startswith("yarn_")}
    has_deep_ep = torch.cuda.is_available() and importlib.util.find_spec("deep_ep") is not None
    refuse_if(values["moe_token_dispatcher_type"] == "flex" and not has_deep_ep, ConfigError, "pipeline_flex")
    if values.get("multi_latent_attention"):
        return MLATransformerConfig(**{**values, "apply_rope_fusion": False})  # a kernel for YaRN
    if yarn:
        values["apply_rope_fusion"] = False  # the kernel for packed sequences drops the attention factor
    config = TransformerConfig(**values)
    vars(config).update(yarn)  # no fields of the class, but read by GPTModel
    return config


def _pipeline_messages(overrides: Mapping[str, Any]) -> dict[str, bool]:
    """Return how pipeline stages exchange tensors; ConfigError for settings that swap messages.

    Messages between two ranks are matched by their order alone. In the interleaved schedule with two stages,
    activations and gradients go to one rank, and a batch of both is swapped.
    """
    interleaved = overrides.get("virtual_pipeline_model_parallel_size") is not None
    if interleaved and overrides["pipeline_model_parallel_size"] == 2 and overrides.get("batch_p2p_comm"):
        raise ConfigError("megatron.batch_p2p_comm swaps activations and gradients at pp = 2 with vpp, expected false")
    on_gpu = torch.cuda.is_available()
    overlapped = on_gpu and interleaved and not overrides.get("batch_p2p_comm")  # Megatron takes one of the two
    return {"batch_p2p_comm": on_gpu and not interleaved, "overlap_p2p_comm": overlapped}


class _LatentAttention(MLASelfAttention):
    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Give no norm to queries projected in a single step, where Megatron adds a norm from 0.19 on."""
        resolved = super()._resolve_qk_norm_config(submodules)  # type: ignore[misc]
        return {**resolved, "linear_q_proj": submodules.linear_q_proj}


def _te_attends(config: TransformerConfig) -> bool:
    """Whether Transformer Engine attends as the model does: sinks of packed sequences came with 2.12.

    Its attention across ranks as Megatron asks for it, in a ring, has neither sinks nor windows.
    """
    has_sinks = config.softmax_type != "vanilla"
    if config.context_parallel_size > 1:
        return not has_sinks and config.window_size is None
    return not has_sinks or is_te_min_version("2.12.0")


def layer_spec(config: TransformerConfig, vp_stage: int | None, shape: ModelShape) -> TransformerBlockSubmodules:
    """Return the layers of a pipeline stage: Transformer Engine's if usable, or local layers for packed input.

    ConfigError for a stage that begins with a layer without an indexer, in a model of sparse attention.
    """
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=uses_te(shape), normalization=config.normalization, vp_stage=vp_stage
    )
    layers: list[Any] = [copy.deepcopy(layer) for layer in spec.layer_specs or []]
    for layer in layers if isinstance(config, MLATransformerConfig) and config.q_lora_rank is None else ():
        layer.submodules.self_attention.module = _LatentAttention
    first = get_transformer_layer_offset(config, vp_stage)
    if uses_te(shape):
        for layer in [] if _te_attends(config) else layers:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
        _place_delta_nets(layers, shape, first)
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=spec.layer_norm)
    if layers and shape.indexer_layers and first not in shape.indexer_layers:
        raise ConfigError(refusal("first_without_indexer", layer=first, indexers=[*shape.indexer_layers]))
    for layer in layers:
        _use_local_parts(layer, config, shape)
    _place_delta_nets(layers, shape, first)
    norm_class: Any = RMSNorm if spec.layer_norm else None  # a class, although 0.16 and before annotate a module
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm_class)


def _use_local_parts(layer: Any, config: TransformerConfig, shape: ModelShape) -> None:
    """Give a local layer attention for packed sequences, and the model's norms."""
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if isinstance(config, MLATransformerConfig):
        from megatron.core.post_training.modelopt.layers import Linear  # not in every release

        # In column-parallel ones, the gradient of the rotated keys would come from a rank's own heads only.
        attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        norm = ModuleSpec(RMSNorm, params={"own_eps": shape.latent_norm_epsilon})
        attention.kv_layernorm = norm
        attention.q_layernorm = IdentityOp if config.q_lora_rank is None else norm  # 0.19 refuses an unused one
        if shape.indexer_layers:
            attention.core_attention = ModuleSpec(SparseAttention, params={"shape": shape})
            layer.submodules.self_attention.module = SparseLatentAttention
    elif config.qk_layernorm and shape.norm_over_heads:
        attention.q_layernorm = ModuleSpec(NormOverHeads, params={"num_heads": config.num_attention_heads})
        attention.k_layernorm = ModuleSpec(NormOverHeads, params={"num_heads": config.num_query_groups})
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm


def _place_delta_nets(layers: list[Any], shape: ModelShape, first: int) -> None:
    """Replace the attention of linear layers, and keep its projections: local ones, or Transformer Engine's.

    first: the number of the stage's first layer.
    """
    for layer in (layers[index - first] for index in shape.linear_layers if first <= index < first + len(layers)):
        from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules  # not in every release

        from megarl.stand_ins.delta_net import PackedDeltaNet

        linear = layer.submodules.self_attention.submodules
        submodules = GatedDeltaNetSubmodules(linear.linear_qkv, RMSNorm, linear.linear_proj)
        layer.submodules.self_attention = ModuleSpec(PackedDeltaNet, submodules=submodules)
        layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"


def build_model(shape: ModelShape, config: TransformerConfig) -> list[GPTModel]:
    """Return the rank's model chunks, one per virtual stage, with Megatron's random initial weights.

    The vocabulary is padded up to a multiple of the tensor-parallel size; ``forward`` masks the padding.
    """
    stages = config.virtual_pipeline_model_parallel_size
    tp = parallel_state.get_tensor_model_parallel_world_size()
    # Megatron's output layer would ask for apex's kernel without calling it: ``forward`` replaces the computation.
    fused = uses_te(shape) and config.gradient_accumulation_fusion
    config.gradient_accumulation_fusion = config.gradient_accumulation_fusion and not fused
    chunks = []
    for stage in [None] if stages is None else range(stages):
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config, stage, shape),  # type: ignore[arg-type]
            vocab_size=-(-shape.vocab_size // tp) * tp,
            max_sequence_length=shape.max_sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stages is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stages is None, vp_stage=stage),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="yarn" if hasattr(config, "yarn_rotary_scaling_factor") else "rope",
            rotary_percent=shape.rotary_percent,
            rotary_base=shape.rotary_base,  # type: ignore[arg-type]
            rope_scaling=shape.rope_factor is not None,
            rope_scaling_factor=shape.rope_factor or 1.0,
            vp_stage=stage,
        )
        _fix_biases(chunk, config)
        if config.moe_router_enable_expert_bias:
            _fix_expert_bias(chunk)
        if config.multi_latent_attention and uses_te(shape):
            _fix_latents(chunk, shape)
        for module in chunk.modules() if fused else ():
            if hasattr(module, "fuse_wgrad_accumulation"):
                vars(module)["fuse_wgrad_accumulation"] = True
        chunks.append(chunk.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else chunk)
    return chunks


def _fix_biases(chunk: GPTModel, config: TransformerConfig) -> None:
    """Correct how Megatron treats sinks and the biases of experts.

    They are each rank's own, but not marked so, or marked as a copy: the norm of the gradients would count one rank's,
    and sequence parallelism would sum gradients of different experts. Experts of local layers add their output bias in
    place, to what autograd takes for a view of the product.
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith("softmax_offset") or (".experts." in name and "bias" in name):
            marks = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
            vars(parameter).update(marks, sequence_parallel=False)
    for module in chunk.modules() if config.add_bias_linear else ():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.register_forward_hook(lambda _, __, result: (result[0].clone(), result[1]))


def _fix_expert_bias(chunk: GPTModel) -> None:
    """Make routers with an expert bias accept a padding mask: 0.16.1 combines masks of shapes [T] and [T, E]."""
    for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
        count = router._apply_expert_bias

        def by_token(routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None, count: Any = count) -> None:
            count(routing_map, None if padding_mask is None else padding_mask.reshape(-1, 1))

        router._apply_expert_bias = by_token


def _fix_latents(chunk: GPTModel, shape: ModelShape) -> None:
    """Correct two things in Transformer Engine's latent attention.

    The norms inside of the up-projections have a separate epsilon. The down-projections are whole on every
    tensor-parallel rank, but marked as shards: the norm of the gradients would count each copy.
    """
    for layer in chunk.decoder.layers:
        for name in ("q", "kv"):
            up, down = (getattr(layer.self_attention, f"linear_{name}_{way}_proj", None) for way in ("up", "down"))
            if up is None or down is None:  # a model without compressed queries
                continue
            up.eps = shape.latent_norm_epsilon
            down.weight.tensor_model_parallel = down.parallel_mode is not None


def release_after_use(model: torch.nn.Module) -> None:
    """Let all token dispatchers of a new model drop the tensors of a pass after the last method.

    Megatron's dispatchers keep tensors of a layer's pass until the layer's next pass: probabilities with their graph,
    routing maps, permutations. The graph of a recomputed layer holds all activations of the layer. With activation
    checkpointing, the activations of every MoE layer would stay in memory, as if without recomputation.
    """
    for module in model.modules():
        if isinstance(module, BaseMoELayer):
            _release_after_use(module.token_dispatcher)


def _release_after_use(dispatcher: Any) -> None:
    last = dispatcher.combine_postprocess
    # The flex dispatcher leaves the tensors to a manager.
    managers = dispatcher, getattr(dispatcher, "_comm_manager", None)
    holders = [vars(holder) for holder in managers if holder is not None]
    constants = [set(_tensors_of(holder)) for holder in holders]

    def combine(*arguments: Any, **options: Any) -> Any:
        output = last(*arguments, **options)
        for holder, constant in zip(holders, constants, strict=True):
            holder.update(dict.fromkeys(set(_tensors_of(holder)) - constant))
        return output

    dispatcher.combine_postprocess = combine


def _tensors_of(holder: dict[str, Any]) -> list[str]:
    return [name for name, value in holder.items() if isinstance(value, torch.Tensor)]
