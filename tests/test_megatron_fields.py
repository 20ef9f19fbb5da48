"""The [megatron] table: its fields and values, those that bypass replay, and which switches for speed are on."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
from run_configs import parsed as config

from megarl.config import file as config_file
from megarl.config import megatron_fields
from megarl.core.replay_blockers import REPLAY_BLOCKERS, replay_blockers
from megarl.errors import ConfigError
from megarl.megatron.policy import check_fields


@pytest.fixture(scope="module")
def real_dataclasses():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    return {c.__name__: c for c in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)}


def test_every_plain_default_of_megatron_passes_its_own_type_check(real_dataclasses):
    checked = 0
    for real in real_dataclasses.values():
        for field in dataclasses.fields(real):
            if isinstance(field.default, (bool, int, float, str)) and not isinstance(field.default, enum.Enum):
                check_fields({field.name: field.default})
                checked += 1
    for good in ({"moe_aux_loss_coeff": [0.1, 1]}, {"moe_router_dtype": "fp32"}, {"offload_modules": ["moe_act"]}):
        assert good in check_fields(good).values()
    assert checked > 200


def test_named_settings_exist_in_megatron(real_dataclasses):
    known = {field.name for owner in real_dataclasses.values() for field in dataclasses.fields(owner)}
    assert set(megatron_fields.DERIVED) <= known
    assert set(megatron_fields.DERIVED.values()) <= set(config_file.keys())
    transformer = real_dataclasses["TransformerConfig"].__dataclass_fields__
    later = {"moe_router_force_biased", "moe_expert_rank_capacity_factor", "mlp_chunks_for_training"}  # from 0.17 on
    assert {blocker.setting for blocker in REPLAY_BLOCKERS} - later <= set(transformer)


def test_a_key_goes_to_every_dataclass_that_has_it():
    found = check_fields({"bf16": True, "bucket_size": 7, "moe_z_loss_coeff": 1})
    assert {owner.__name__: values for owner, values in found.items()} == {
        "TransformerConfig": {"bf16": True, "moe_z_loss_coeff": 1},
        "DistributedDataParallelConfig": {"bucket_size": 7},
        "OptimizerConfig": {"bf16": True},
    }


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"moe_router_topk": 2.0}, "found 2.0, expected int"),
        ({"moe_router_topk": True}, "found True, expected int"),
        ({"moe_router_dtype": "bf16"}, "found 'bf16'"),
        ({"offload_modules": [1]}, "found [1]"),
        ({"attention_backend": "flsh"}, "one of flash, fused"),
        ({"init_method": "normal"}, "expected Optional[Callable]"),
        ({"_cpu_offloading_context": "x"}, "no field"),
        ({"no_such_thing_at_all_xyz": 1}, "megarl doctor"),
        ({"clip_grads": 1.0}, "did you mean clip_grad"),
    ],
)
def test_bad_keys_and_values_are_refused(bad, expected):
    with pytest.raises(ConfigError) as caught:
        check_fields(bad)
    assert expected in str(caught.value)
    assert next(iter(bad)) in str(caught.value)


def test_names_become_values_that_the_real_dataclasses_take(real_dataclasses):
    import torch
    from megatron.core.transformer.enums import AttnBackend

    table = {
        "attention_backend": "unfused",
        "autocast_dtype": "bfloat16",
        "window_size": [4, 0],
        "exp_avg_dtype": "float16",
    }
    checked = check_fields(table)
    values = checked[real_dataclasses["TransformerConfig"]]
    assert values == {"attention_backend": AttnBackend.unfused, "autocast_dtype": torch.bfloat16, "window_size": (4, 0)}
    config = real_dataclasses["TransformerConfig"](num_layers=2, hidden_size=8, num_attention_heads=2, **values)
    assert config.attention_backend is AttnBackend.unfused
    assert checked[real_dataclasses["OptimizerConfig"]] == {"exp_avg_dtype": torch.float16}


def test_blockers_read_a_live_transformer_config(real_dataclasses):
    """The run-time check passes vars(config): Megatron has then turned scopes into lists of enum members."""
    make = real_dataclasses["TransformerConfig"]
    common = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 4}
    common |= {"moe_ffn_hidden_size": 8, "add_bias_linear": False}

    def settings_hit(**settings):
        return [blocker.setting for blocker in replay_blockers(vars(make(**common, **settings)))]

    assert settings_hit() == []
    assert settings_hit(moe_router_fusion=True) == ["moe_router_fusion"]
    assert settings_hit(moe_expert_capacity_factor=1.5) == ["moe_expert_capacity_factor"]
    assert settings_hit(moe_expert_capacity_factor=-1.0) == []
    assert settings_hit(moe_router_load_balancing_type="sinkhorn") == ["moe_router_load_balancing_type"]
    graphs = {"cuda_graph_impl": "transformer_engine"}
    assert settings_hit(**graphs) == ["cuda_graph_impl"]
    names = {"cuda_graph_scope", "cuda_graph_modules"} & set(
        vars(real_dataclasses["TransformerConfig"])["__dataclass_fields__"]
    )
    for name in names:
        assert settings_hit(**graphs, **{name: ["moe_router"]}) == ["cuda_graph_impl"]
        assert settings_hit(**graphs, **{name: ["attn"]}) == []
    assert names
    for name in ("cuda_graph_scope", "cuda_graph_modules"):
        for scope, is_hit in (("moe", True), ("", True), ("attn,mlp", False)):
            assert bool(replay_blockers({**graphs, name: scope})) == is_hit
        for kind in ("local", "full_iteration"):  # these capture the whole layer, whatever the scope
            assert [b.setting for b in replay_blockers({"cuda_graph_impl": kind, name: "attn"})] == ["cuda_graph_impl"]


ALL = {"overlap_grad_reduce", "overlap_param_gather", "gradient_accumulation_fusion", "moe_permute_fusion"}
SEVERAL = {"train__mini_batches": 4}


def on(has_te: bool = True, on_gpu: bool = True, **overrides: Any) -> set[str]:
    return set(megatron_fields.gpu_defaults(config(**overrides), on_gpu=on_gpu, has_te=has_te))


def test_what_is_on_is_fields_of_megatron_and_the_megatron_table_wins():
    assert on(**SEVERAL) == ALL
    assert on() == ALL - {"overlap_param_gather"}
    assert on(**SEVERAL, parallel__distributed_optimizer=False) == ALL - {"overlap_param_gather"}
    assert on(**SEVERAL, has_te=False) == {"overlap_grad_reduce", "overlap_param_gather"}
    assert on(**SEVERAL, on_gpu=False) == set()
    assert on(**SEVERAL, train__replay="none") == ALL
    own = {"megatron__overlap_grad_reduce": False, "megatron__moe_permute_fusion": False}
    assert on(**SEVERAL, **own) == ALL - {"overlap_grad_reduce", "moe_permute_fusion"}
    assert on(on_gpu=False, megatron__overlap_param_gather=True) == {"overlap_param_gather"}
    assert any(check_fields(megatron_fields.gpu_defaults(config(**SEVERAL), on_gpu=True, has_te=True)).values())
