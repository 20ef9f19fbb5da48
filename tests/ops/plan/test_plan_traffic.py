"""Bytes between ranks, by hand: four MoE layers, H = 32, K = 2, two key-value heads of 8, 64 slots, bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_worlds import config, write_config

from megarl.models.shapes import read_shape
from megarl.ops.plan.layout import count_rank, stages_of
from megarl.ops.plan.traffic import RankTraffic, rank_traffic, sync_traffic
from megarl.ops.plan.trainer_memory import rank_memory

LAYERS, H, K, KEYS, SLOTS, BF16, GATE = 4, 32, 2, 2 * 8, 64, 2, 4


def traffic(tmp_path: Path, **overrides: object) -> RankTraffic:
    """Of a rank of the first stage, of two ranks."""
    settings = config(write_config(tmp_path, "mixtral"), **overrides)
    shape, layout = read_shape(tmp_path), settings.check_world_size(2)
    stage = stages_of(settings, shape)[0]
    return rank_traffic(settings, shape, layout, stage, count_rank(shape, layout, stage))


def test_two_model_copies_exchange_gradients_and_weights(tmp_path: Path) -> None:
    """A rank gets half of the gradients in fp32, and half of the weights back; all twice without sharding.

    Of a mixture of experts Megatron gathers the weights twice, unless it gathers them beside the passes.
    """
    found, total = traffic(tmp_path), _parameters(tmp_path)
    assert (found.gradients, found.gathered_weights) == (4 * total // 2, 2 * BF16 * total // 2)
    assert traffic(tmp_path, train__mini_batches=2).gathered_weights == BF16 * total // 2
    assert (found.experts, found.tensor, found.pipeline, found.context) == (0, 0, 0, 0)
    whole = traffic(tmp_path, parallel__distributed_optimizer=False)
    assert (whole.gradients, whole.gathered_weights) == (2 * 4 * total // 2, 0)


def _parameters(folder: Path) -> int:
    settings, shape = config(folder), read_shape(folder)
    return count_rank(shape, settings.check_world_size(1), stages_of(settings, shape)[0]).total


@pytest.mark.parametrize(("granularity", "passes"), [("none", 2), ("full", 3)])
def test_half_of_the_rows_go_to_the_other_rank_s_experts_and_back(
    granularity: str, passes: int, tmp_path: Path
) -> None:
    full = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
    found = traffic(tmp_path, parallel__ep=2, **(full if granularity == "full" else {}))
    assert found.experts == passes * LAYERS * (SLOTS * K // 2) * (2 * H * BF16 + GATE)


def test_tensor_parallel_ranks_gather_and_scatter_around_attention(tmp_path: Path) -> None:
    """And their experts gather the rows of both: half of 64 x 2 rows are another rank's.

    Two collective calls of each layer in the forward pass, three in the backward pass; two of the embedding, and two in
    fp32 of the output layer.
    """
    found = traffic(tmp_path, parallel__tp=2)
    assert found.tensor == (5 * LAYERS * BF16 + 2 * BF16 + 2 * 4) * SLOTS * H // 2
    assert found.experts == 2 * LAYERS * (SLOTS * K // 2) * (2 * H * BF16 + GATE)


def test_the_first_stage_gets_gradients_from_the_second(tmp_path: Path) -> None:
    assert traffic(tmp_path, parallel__pp=2).pipeline == SLOTS * H * BF16
    assert traffic(tmp_path, parallel__pp=2, parallel__vpp=2).pipeline == 3 * SLOTS * H * BF16


def test_context_parallel_ranks_gather_keys_and_values(tmp_path: Path) -> None:
    assert traffic(tmp_path, parallel__cp=2).context == 2 * LAYERS * (2 * KEYS) * SLOTS * BF16


def test_a_rank_gathers_what_it_does_not_hold(tmp_path: Path) -> None:
    settings = config(write_config(tmp_path, "mixtral"), parallel__pp=2)
    shape, layout = read_shape(tmp_path), settings.check_world_size(2)
    first, second = (count_rank(shape, layout, stage) for stage in stages_of(settings, shape))
    found = sync_traffic(settings, shape, first)
    assert found.gathered == BF16 * second.total
    assert found.sent == 0  # the local engine is in the same process


def test_routes_in_memory(tmp_path: Path) -> None:
    """16 sequences of 32 tokens, N = 2, tp = 2: 128 rows of 4 layers and 2 experts for each mini-batch."""
    model, sizes = write_config(tmp_path, "mixtral"), {"parallel__tp": 2, "train__mini_batches": 2}
    shape = read_shape(model)

    def memory(replay: str, flips: str = "off") -> tuple[int, int, int]:
        settings = config(model, train__replay=replay, train__max_native_flip=flips, **sizes)
        layout = settings.check_world_size(2)
        found = rank_memory(settings, shape, layout, stages_of(settings, shape)[0], 4)
        return found.exchange, found.recorded, found.host_routes

    mini_batch = 8 * 32 // 2 * LAYERS * K
    assert memory("none") == (0, 0, 0)
    assert memory("r2") == (0, 2 * mini_batch, 0)
    assert memory("r3") == (2 * mini_batch, 0, 2 * 2 * mini_batch)
    assert memory("none", "learn") == memory("r3")  # the tripwire compares them
