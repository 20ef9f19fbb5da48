"""Weights, cache, traces and traffic of the engine against what really is allocated and sent."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_worlds import MODELS, config, write_config
from tiny_families import FAMILIES, write_family

from megarl.engines.buckets import split_into_buckets
from megarl.engines.sglang.transports.folder import WeightFolder
from megarl.engines.weights import WeightForm
from megarl.models.names import hf_shapes, rules_of
from megarl.models.shapes import ModelShape, read_shape
from megarl.ops.plan.engine_memory import cache_bytes_per_token, engine_memory, weight_bytes
from megarl.ops.plan.layout import count_rank, numel, stages_of
from megarl.ops.plan.traffic import step_traffic, sync_traffic, trace_of
from megarl.ops.plan.trainer_memory import whole_bytes
from megarl.routes import RoutingTrace, encode


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


def test_an_fp8_folder_is_as_large_as_planned(tmp_path: Path) -> None:
    """But for the headers of its safetensors files."""
    source = write_config(tmp_path / "model", "qwen3_moe", hidden_size=256, moe_intermediate_size=192)
    shape = read_shape(source)
    folder = WeightFolder(tmp_path / "weights", source, 0)
    for bucket in split_into_buckets(tensors_of(shape), 1 << 20, form=WeightForm(torch.bfloat16, "blocks")):
        folder.add(bucket)
    stored = sum(file.stat().st_size for file in folder.finish().glob("*.safetensors"))
    assert stored == pytest.approx(weight_bytes(shape, 2, fp8=True), rel=0.02)


def test_the_update_of_a_run_is_counted_once_for_each_server(tmp_path: Path) -> None:
    overrides = {"rollout__engine": "sglang", "sglang__fp8": True, "parallel__tp": 2}
    settings = config(write_config(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128), **overrides)
    shape = read_shape(tmp_path)
    count = count_rank(shape, settings.check_world_size(2), stages_of(settings, shape)[0])
    found = sync_traffic(settings, shape, count)
    assert found.sent == weight_bytes(shape, 2, fp8=True)
    # by hand: fc1 of the 8 experts of a layer is the largest that is gathered at once
    assert found.tensors_at_once == 2 * max(8 * 2 * 128 * 128, 30 * 128)


def test_the_experts_of_a_large_layer_are_not_gathered_all_at_once() -> None:
    """DeepSeek-V3: 256 experts, each 56 MiB in fc1. By hand: 256 MiB of them, or one of each expert-parallel rank."""
    shape = read_shape(MODELS / "DeepSeek-V3")
    fc1 = next(rule for rule in rules_of(shape) if rule.scope == "expert" and numel(rule, shape) == 2 * 2048 * 7168)
    assert whole_bytes(fc1, shape, 2, ep=1) == 256 << 20
    assert whole_bytes(fc1, shape, 2, ep=16) == 16 * 56 << 20
    embedding = 2 * shape.vocab_size * 7168
    for ep, at_once in ((1, embedding), (64, 64 * 56 << 20)):
        settings = config(MODELS / "DeepSeek-V3", parallel__ep=ep, rollout__prompts_per_step=ep)
        count = count_rank(shape, settings.check_world_size(ep), stages_of(settings, shape)[0])
        assert sync_traffic(settings, shape, count).tensors_at_once == at_once


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


@pytest.mark.parametrize(("experts", "topk"), [(64, 6), (256, 8), (384, 8)])
def test_traces_are_as_large_as_planned(experts: int, topk: int, tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, "qwen3_moe", num_experts=experts, num_experts_per_tok=topk))
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(experts)[:topk] for _ in range(3 * 1000)]).reshape(1000, 3, topk)
    trace = RoutingTrace(chosen, experts)
    planned = trace_of(shape)
    assert trace.experts.nbytes == 1000 * planned.memory
    short = len(base64.b64encode(encode(trace)))
    assert short == pytest.approx(1000 * planned.wire_short, rel=0.1)
    dense_too = np.zeros((1000, 4, topk), "<i4")
    assert len(base64.b64encode(dense_too.tobytes())) == pytest.approx(1000 * planned.wire_long, rel=0.01)


def test_routes_travel_only_where_they_are_replayed_watched_or_written(tmp_path: Path) -> None:
    """By hand: 16 responses of 32 tokens; 3 MoE layers, top-2; base64 of int32 for 4 layers is 43 bytes a token.

    Of two ranks each routes half of the tokens, and has drawn half of those.
    """
    model = write_config(tmp_path, "qwen3_moe")
    shape = read_shape(model)

    def routes(**overrides: Any) -> tuple[int, int]:
        settings = config(model, rollout__engine="sglang", parallel__tp=2, **overrides)
        layout = settings.check_world_size(2)
        stage = stages_of(settings, shape)[0]
        found = step_traffic(settings, shape, layout, stage, settings.longest_sequence)
        return found.routes, found.routes_per_rank

    fetched, unseen = (16 * 32 * 43, 16 * 32 * 3 * 2 // 4), {"train__max_native_flip": "off"}
    assert routes(sglang__urls=["http://a:1"]) == fetched
    for replay in ("none", "r2"):
        others = {"sglang__urls": ["http://a:1"], "train__replay": replay}
        assert routes(**others) == fetched  # the tripwire compares them
        assert routes(**others, **unseen) == (0, 0)
        assert routes(**others, **unseen, log__traces_every=5) == fetched
    assert routes(train__replay="none", megatron__moe_router_force_load_balancing=True) == (0, 0)  # no hook compares
