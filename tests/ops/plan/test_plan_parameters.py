"""Counts of parameters: of tiny models against transformers, of large ones against what their makers publish."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from plan_worlds import MODELS, config, write_config
from tiny_families import FAMILIES

from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape
from megarl.ops.plan.layout import count_model, count_rank, stages_of


@pytest.mark.parametrize("family", FAMILIES)
def test_the_total_is_that_of_the_checkpoint_and_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from megarl.engines.weights import auto_class
    from megarl.files.hf_config import is_beside_text

    shape = read_shape(write_config(tmp_path, family))
    assert count_model(shape).total == sum(prod(size) for size in hf_shapes(shape).values())
    kind, settings = FAMILIES[family]
    settings = AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        model = auto_class(settings).from_config(settings)
    biases = sum(b.numel() for name, b in model.named_buffers() if "e_score_correction_bias" in name)
    assert count_model(shape).total == biases + sum(
        parameter.numel() for name, parameter in model.named_parameters() if not is_beside_text(kind, name)
    )


@pytest.mark.parametrize(
    ("name", "total", "active", "without_embeddings"),
    [
        # model cards: total, activated, "non-embedding"
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9, 29.9e9),
        ("Qwen3-235B-A22B", 235e9, 22e9, 234e9),
        # model card: "671B total parameters with 37B activated", without 14B of its prediction layer
        ("DeepSeek-V3", 671e9, 37e9, None),
        # Moonlight's card, table: "total 15.29B, activated 2.24B", both without embedding and output layer
        ("Moonlight-16B-A3B", 16e9, None, 15.29e9),
        # model card: "106 billion total parameters and 12 billion active"
        ("GLM-4.5-Air", 106e9, None, None),
    ],
)
def test_large_models_have_the_sizes_that_are_published(
    name: str, total: float, active: float | None, without_embeddings: float | None
) -> None:
    found = count_model(read_shape(MODELS / name))
    assert found.total == pytest.approx(total, rel=0.01)
    if active:
        assert found.active == pytest.approx(active, rel=0.02)
    if without_embeddings:
        assert found.total - found.embeddings == pytest.approx(without_embeddings, rel=0.001)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_of_every_stage_together_hold_the_model(family: str, tmp_path: Path) -> None:
    """With pp alone nothing is cut: stages add up, but for the copy of a tied embedding, and the expert biases."""
    shape = read_shape(write_config(tmp_path, family))
    settings = config(tmp_path, parallel__pp=2)
    stages = stages_of(settings, shape)
    counts = [count_rank(shape, settings.check_world_size(2), stage) for stage in stages]
    copies = shape.vocab_size * shape.fields["hidden_size"] if shape.tied_embeddings else 0
    biases = sum(count.buffers for count in counts) // 2  # a bias and its counter
    held = biases if shape.fields.get("moe_router_enable_expert_bias") else 0
    assert sum(count.total for count in counts) + held == count_model(shape).total + copies


def test_tensor_parallel_ranks_pad_the_vocabulary_and_keep_norms_whole(tmp_path: Path) -> None:
    """By hand: V = 31 on 2 ranks is 16 rows each; H = 32, 2 layers of attention 32 x (4 + 2 + 2) x 16 / 2 + output."""
    settings = config(write_config(tmp_path, "mixtral", vocab_size=31, num_hidden_layers=1), parallel__tp=2)
    shape = read_shape(tmp_path)
    (stage,) = stages_of(settings, shape)
    count = count_rank(shape, settings.check_world_size(2), stage)
    vocabulary, norms, router = 2 * 16 * 32, 3 * 32, 8 * 32
    attention = 32 * (4 + 2 + 2) * 8 // 2 + 32 * 32 // 2
    assert count.dense == vocabulary + norms + router + attention
    assert count.expert == 8 * 3 * 32 * 40 // 2


def test_interleaved_chunks_take_turns_and_the_last_stage_may_be_uneven(tmp_path: Path) -> None:
    settings = config(write_config(tmp_path, "mixtral", num_hidden_layers=8), parallel__pp=2, parallel__vpp=2)
    stages = stages_of(settings, read_shape(tmp_path))
    assert [stage.chunks for stage in stages] == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    uneven = {"megatron__num_layers_in_last_pipeline_stage": 1}
    settings = config(write_config(tmp_path, "mixtral", num_hidden_layers=5), parallel__pp=3, **uneven)
    assert [len(stage.layers) for stage in stages_of(settings, read_shape(tmp_path))] == [2, 2, 1]
