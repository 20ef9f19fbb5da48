"""How Megatron-LM spells its arguments: facts read in its public repository, for the names that megarl's pages use.

Most arguments are made from the fields of dataclasses there. Those of TransformerConfig are in the installed
megatron-core and computed here; the rest was read at the commits below.
"""

from __future__ import annotations

import dataclasses

from megatron.core.transformer.transformer_config import TransformerConfig

ARGUMENTS_COMMIT = "001b00c2734d8f0fad096fe48a382fedf755d321"
"""NVIDIA/Megatron-LM, megatron/training/arguments.py."""
WRITTEN_BY_HAND = frozenset(
    (
        *("--cuda-graph-scope", "--lr", "--moe-aux-loss-coeff", "--moe-layer-freq", "--moe-router-load-balancing-type"),
        *("--no-load-optim", "--no-load-rng", "--num-experts", "--num-layers-per-virtual-pipeline-stage"),
        *("--padded-vocab-size", "--seq-length", "--use-distributed-optimizer", "--vocab-file", "--vocab-size"),
    )
)
"""Of the names there, those that pages and examples use."""
NOT_MADE_FROM_FIELDS = frozenset(
    (
        *("activation_func", "apply_rope_fusion", "batch_p2p_comm", "bias_activation_fusion", "bias_dropout_fusion"),
        *("cuda_graph_scope", "gated_linear_unit", "gradient_accumulation_fusion", "masked_softmax_fusion"),
        *("moe_aux_loss_coeff", "moe_layer_freq", "moe_router_load_balancing_type", "moe_token_dropping"),
        *("moe_router_topk_limited_devices", "num_moe_experts", "params_dtype", "pipeline_dtype", "softmax_scale"),
        *("variable_seq_lengths", "virtual_pipeline_model_parallel_size", "window_size"),
    )
)
"""Fields of TransformerConfig that arguments.py leaves out: no argument, one written by hand, or another name."""

CONFIGS_COMMITS = ("008e9cdb53e75bbf9733d0089a5c9bf14553ca1c", "2318cfcb3094b2b978ed3c6ab7b2ccbeb7174844")
"""megatron/training/config/training_config.py, and resilience_config.py for the rerun state machine."""
FROM_OTHER_CONFIGS = frozenset(
    (
        *("--ckpt-format", "--dist-ckpt-strictness", "--finetune", "--load", "--micro-batch-size", "--rerun-mode"),
        *("--train-iters", "--use-checkpoint-args"),
    )
)


FROM_LATER_RELEASES = frozenset(
    {"--moe-router-force-biased", "--moe-expert-rank-capacity-factor", "--mlp-chunks-for-training"}
)
"""Made from fields that TransformerConfig has from megatron-core 0.17 and 0.18 on."""


def made_from_transformer_config() -> set[str]:
    """Megatron-LM's rule: the field's name with hyphens, "no" or "disable" before what is on; metadata goes first."""
    names: set[str] = set()
    for field in dataclasses.fields(TransformerConfig):
        if field.name in NOT_MADE_FROM_FIELDS:
            continue
        hyphens = field.name.replace("_", "-")
        plain = [f"--no-{hyphens}", f"--disable-{hyphens}"] if field.default is True else [f"--{hyphens}"]
        names |= set(field.metadata.get("argparse_meta", {}).get("arg_names", plain))
    return names


def known() -> set[str]:
    return made_from_transformer_config() | WRITTEN_BY_HAND | FROM_OTHER_CONFIGS | FROM_LATER_RELEASES
