"""What is fp32 whatever the dtype of a run is: in transformers, Megatron, the local engine, syncs and folders alike."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from absent import SGLANG_PYTHON
from biased_models import SERVABLE
from local_engines import local_engine
from saves import save
from tiny_families import FAMILIES, write_family
from tiny_world import config, policy_of, safetensors_of, transformers_model

from megarl.convert.conversion import to_hf, to_megatron
from megarl.convert.job import Options
from megarl.core.fp8_names import is_fp8_weight
from megarl.engines.sglang.spec import CPU_SHIM
from megarl.engines.sglang.transports.folder import WeightFolder
from megarl.engines.weights import WeightForm, split_into_buckets
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints.checkpoint import FrozenModel
from megarl.megatron.hf_weights import save_hf
from megarl.megatron.model import build_model, transformer_config
from megarl.megatron.policy import layout_fields
from megarl.models.names import hf_shapes, is_fp32
from megarl.models.shapes import read_shape
from megarl.ops.plan.engine_memory import weight_bytes

WITH_BIASES = [name for name, (_, values) in FAMILIES.items() if "routed_scaling_factor" in values]
WITH_BIASES += ["minimax_m2", "hy_v3"]
NOT_IN_SGLANG = ("dots1", "solar_open")
NOT_BUILT_ON_A_CPU = ("deepseek_v32", "glm_moe_dsa", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
"""Its indexers ask for CUDA, and its delta nets for a platform that stores their states (docs/families.md)."""
PUBLISHED_KEYS = {
    "minimax_m2": {"use_routing_bias": True, "scoring_func": "sigmoid", "use_qk_norm": True, "rotary_dim": 8},
    "hy_v3": {"route_norm": True, "qk_norm": True, "first_k_dense_replace": 1},
}
"""Keys that SGLang reads and transformers does not write."""
GLOBAL_AUX_LOSS: dict[str, Any] = {
    "megatron__moe_router_load_balancing_type": "global_aux_loss",
    "megatron__moe_aux_loss_coeff": 1e-3,
}
Tensors = dict[str, torch.Tensor]


def fp32_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Names of the tensors in fp32; all others must be in bf16."""
    by_name = dict(tensors)
    assert {tensor.dtype for tensor in by_name.values()} <= {torch.float32, torch.bfloat16}
    return {name for name, tensor in by_name.items() if tensor.dtype == torch.float32}


def listed(names: Iterable[str]) -> set[str]:
    return {name for name in names if is_fp32(name)}


def bf16_but_for_the_list(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor if is_fp32(name) else tensor.bfloat16() for name, tensor in tensors.items()}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("model", FAMILIES)
def test_the_list_is_what_transformers_holds_in_fp32(model: str, models: dict[str, Path]) -> None:
    loaded = transformers_model(models[model], torch.bfloat16)
    expected = listed(hf_shapes(read_shape(models[model])))
    held = {name.replace("mlp.expert_bias", "mlp.e_score_correction_bias") for name in expected}  # Hunyuan's module
    # The class of MiniMax-M2 forgets to; megarl's local engine does not.
    assert fp32_of(loaded.state_dict().items()) == (set() if model == "minimax_m2" else held)
    assert bool(expected) == (model in WITH_BIASES)


@pytest.mark.parametrize("model", FAMILIES)
def test_the_list_is_what_megatron_makes_in_fp32_and_no_wrapper_casts_it(
    model: str, models: dict[str, Path], one_rank: None
) -> None:
    """With all that routers count; and parameters are bf16, router weights too."""
    more = GLOBAL_AUX_LOSS if read_shape(models[model]).moe_layers else {}
    settings = config(models[model], model__dtype="bf16", **more)
    policy = policy_of(settings)
    fields = {**layout_fields(settings), **settings.megatron}
    (bare,) = build_model(policy.shape, transformer_config(policy.shape, fields, torch.bfloat16))
    floating = {name: buffer for name, buffer in bare.named_buffers() if buffer.is_floating_point()}
    assert {name for name, buffer in floating.items() if buffer.dtype == torch.float32} == listed(floating)
    (chunk,) = policy.chunks
    held = {name.removeprefix("module.module."): tensor for name, tensor in chunk.named_buffers()}
    assert held.keys() == dict(bare.named_buffers()).keys()
    assert fp32_of((name, held[name]) for name in floating) == listed(floating)
    assert not fp32_of(chunk.named_parameters())
    ends = {name.rpartition(".")[2] for name in listed(floating)}
    counts = {"local_tokens_per_expert", "expert_bias"} if model in WITH_BIASES else set()
    counts |= {"global_tokens_per_expert", "ga_steps"} if policy.shape.moe_layers else set()
    is_yarn = policy.shape.fields.get("rope_type") == "yarn" or "yarn_rotary_scaling_factor" in policy.shape.fields
    assert ends == counts | ({"cos_cached", "sin_cached"} if is_yarn else set())


@pytest.mark.sglang
def test_the_list_is_what_sglang_holds_in_fp32(tmp_path: Path) -> None:
    """But for router weights of GLM, MiniMax and Hunyuan, and experts' biases of gpt-oss, which a policy in bf16 trains
    in bf16: nothing of them is lost."""
    more_keys = {"deepseek_v3": SERVABLE["deepseek_v3"], "gpt_oss": {"dtype": "bfloat16"}}  # SGLang reads its dtype
    more_keys["hy_v3"] = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
    wider = dict.fromkeys(("glm4_moe", "glm4_moe_lite", "minimax_m2", "hy_v3"), ".gate.weight")
    wider["gpt_oss"] = "_weight_bias"
    folders = {
        model: write_family(tmp_path / model, model, **more_keys.get(kind, {}))
        for model, (kind, _) in FAMILIES.items()
        if model not in (*NOT_IN_SGLANG, *NOT_BUILT_ON_A_CPU)
    }
    shapes = {model: hf_shapes(read_shape(folder)) for model, folder in folders.items()}
    for model, keys in PUBLISHED_KEYS.items():
        file = folders[model] / "config.json"
        hf = json.loads(file.read_text())
        file.write_text(json.dumps({**hf, **keys}))
    words = [SGLANG_PYTHON, Path(__file__).parents[1] / "engines" / "sglang_dtypes.py", *folders.values()]
    environment = os.environ | {"PYTHONPATH": str(CPU_SHIM), "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([*map(str, words)], check=True, env=environment, capture_output=True, text=True)
    for model, held in zip(folders, json.loads(done.stdout.splitlines()[-1]), strict=True):
        more = {name for name in held if model in wider and name.endswith(wider[model])}
        assert set(held) - more == listed(shapes[model]), model


@pytest.mark.parametrize("model", FAMILIES)
def test_a_policy_in_bf16_keeps_exports_and_saves_the_list_in_fp32(
    model: str, models: dict[str, Path], tmp_path: Path, one_rank: None
) -> None:
    source = models[model]
    expected = bf16_but_for_the_list(safetensors_of(source))
    settings = config(source, model__dtype="bf16")
    policy = policy_of(settings)
    assert_equal(dict(policy.export()), expected)  # before any pass
    save_hf(policy.chunks, policy.shape, source, tmp_path / "hf")
    assert_equal(safetensors_of(tmp_path / "hf"), expected)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    save(tmp_path / "run", 0, policy, {}, keep=1)
    frozen = FrozenModel(settings, None)
    for name, tensor in (*frozen.chunks[0].named_parameters(), *frozen.chunks[0].named_buffers()):
        tensor.data.zero_() if tensor.dim() else name
    checkpoint.load_weights(tmp_path / "run" / "step_0000000", frozen.chunks, frozen.shape)
    assert_equal(dict(frozen.export()), expected)


@pytest.mark.parametrize("model", WITH_BIASES)
def test_a_conversion_to_bf16_spares_the_list_in_both_directions(
    model: str, models: dict[str, Path], tmp_path: Path, one_rank: None
) -> None:
    source, to_bf16 = models[model], Options(dtype=torch.bfloat16, layers="local")
    expected = bf16_but_for_the_list(safetensors_of(source))
    to_megatron(source, tmp_path / "megatron", to_bf16)
    to_hf(tmp_path / "megatron", tmp_path / "hf", None, Options())
    assert_equal(safetensors_of(tmp_path / "hf"), expected)
    to_megatron(source, tmp_path / "wide", Options(layers="local"))
    to_hf(tmp_path / "wide", tmp_path / "narrow", None, to_bf16)
    assert_equal(safetensors_of(tmp_path / "narrow"), expected)


@pytest.mark.parametrize("model", FAMILIES)
def test_the_local_engine_in_bf16_holds_the_list_in_fp32(model: str, models: dict[str, Path]) -> None:
    engine = local_engine(models[model], dtype=torch.bfloat16)
    assert_equal(engine._views, bf16_but_for_the_list(safetensors_of(models[model])))


@pytest.mark.parametrize("fp8", ["off", "rounded", "blocks"])
@pytest.mark.parametrize("model", FAMILIES)
def test_every_form_of_an_update_carries_the_list_in_fp32(
    model: str, fp8: Any, models: dict[str, Path], tmp_path: Path
) -> None:
    """In buckets and in the folder of a version; as many bytes as planned."""
    stored, form = safetensors_of(models[model]), WeightForm(torch.bfloat16, fp8)
    buckets = list(split_into_buckets(stored.items(), 1 << 14, stored, form=form))
    assert len(buckets) > 1
    folder = WeightFolder(tmp_path, models[model], 1)
    for bucket in buckets:
        folder.add(bucket)
    sent = {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}
    assert_equal(safetensors_of(folder.finish()), sent)
    assert {name for name, tensor in sent.items() if is_fp32(name)} == listed(stored)
    plain = {name: tensor for name, tensor in stored.items() if fp8 == "off" or not is_fp8_weight(name)}
    assert_equal({name: sent[name] for name in plain}, bf16_but_for_the_list(plain))
    num_bytes = sum(bucket.flat.numel() for bucket in buckets)
    assert num_bytes == sum(form.held_bytes(name, tensor) for name, tensor in stored.items())
    assert num_bytes == weight_bytes(read_shape(models[model]), 2, fp8=fp8 == "blocks")
