"""Weights and cache of the engine against what really is allocated and sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from plan_worlds import MODELS, config, write_config
from tiny_families import FAMILIES, write_family

from megarl.engines.weights import WeightForm, split_into_buckets
from megarl.models.names import hf_shapes, rules_of
from megarl.models.shapes import ModelShape, read_shape
from megarl.ops.plan.engine_memory import cache_bytes_per_token, engine_memory, weight_bytes
from megarl.ops.plan.layout import numel
from megarl.ops.plan.trainer_memory import whole_bytes


def tensors_of(shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """A whole model under Hugging Face names, all ones."""
    return ((name, torch.ones(size)) for name, size in hf_shapes(shape).items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_an_update_is_as_large_as_its_buckets(family: str, fp8: bool, tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, family, hidden_size=192))
    form = WeightForm(torch.bfloat16, "blocks" if fp8 else "off")
    sent = [bucket.flat.numel() for bucket in split_into_buckets(tensors_of(shape), 1 << 18, form=form)]
    assert sum(sent) == weight_bytes(shape, 2, fp8=fp8)


def test_the_experts_of_a_large_layer_are_not_gathered_all_at_once() -> None:
    """DeepSeek-V3: 256 experts, each 56 MiB in fc1. By hand: 256 MiB of them, or one of each expert-parallel rank."""
    shape = read_shape(MODELS / "DeepSeek-V3")
    fc1 = next(rule for rule in rules_of(shape) if rule.scope == "expert" and numel(rule, shape) == 2 * 2048 * 7168)
    assert whole_bytes(fc1, shape, 2, ep=1) == 256 << 20
    assert whole_bytes(fc1, shape, 2, ep=16) == 16 * 56 << 20


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "moonlight"])
def test_the_cache_of_the_local_engine_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(write_family(tmp_path, family), dtype=torch.float32)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(torch.ones(3, 20, dtype=torch.int64), past_key_values=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    expanded = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 15)  # then it keeps latents
    assert held == 3 * 20 * cache_bytes_per_token(read_shape(tmp_path), 4, expanded=expanded)


def test_the_cache_of_a_server() -> None:
    """Qwen3-30B-A3B: 2 x 48 x 4 x 128 x 2 bytes, a head each from tp = 4 on; DeepSeek-V3: 61 x 576 x 2 on all."""
    qwen, deepseek = (read_shape(MODELS / name) for name in ("Qwen3-30B-A3B", "DeepSeek-V3"))
    assert [cache_bytes_per_token(qwen, 2, tp) for tp in (1, 2, 4, 8)] == [98304, 49152, 24576, 24576]
    assert [cache_bytes_per_token(deepseek, 2, tp) for tp in (1, 8)] == [70272, 70272]


def test_servers_share_weights_but_for_what_each_needs_whole() -> None:
    shape = read_shape(MODELS / "Qwen3-30B-A3B")
    whole = weight_bytes(shape, 2)
    routers = 48 * 128 * 2048 * 2
    norms = 2 * (48 * (2 * 2048 + 2 * 128) + 2048)
    assert weight_bytes(shape, 2, tp=4) == (whole - routers - norms) // 4 + routers + norms


def test_a_server_caches_what_its_share_of_the_gpu_leaves(tmp_path: Path) -> None:
    overrides = {"rollout__engine": "sglang", "sglang__mem_fraction": 0.5, "launch__gpu_memory_gib": 1.0}
    settings, shape = config(write_config(tmp_path, "qwen3_moe"), **overrides), read_shape(tmp_path)
    found = engine_memory(settings, shape)
    assert found.tokens == ((1 << 29) - weight_bytes(shape, 2)) // cache_bytes_per_token(shape, 2)
    assert found.sequences == found.tokens // 32
    assert found.total <= 1 << 29
    capped = config(tmp_path, **overrides, sglang__max_total_tokens=100)
    assert engine_memory(capped, shape).tokens == 100
