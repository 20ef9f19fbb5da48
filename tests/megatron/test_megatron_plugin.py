"""The plug-in kit: rows of every layout counted out one by one, the loss of a step, metrics, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases_replay import World
from tiny_world import experts_of

from megarl.errors import ConfigError, ReplayError, UnknownNameError
from megarl.plugin import (
    OBJECTIVES,
    MoeShape,
    RoutingTrace,
    StepLoss,
    TokenColumns,
    policy_loss,
    reduce_metrics,
    stack_routes,
)
from megarl.replay.layout import local_rows

SHAPE = MoeShape(num_layers=5, moe_layers=(1, 3, 4), num_experts=64, topk=2)


def numbered(*lead: int) -> torch.Tensor:
    """Experts [*lead, L, K] that say their token (from 1 on) and layer."""
    token = torch.arange(1, int(np.prod(lead)) + 1).view(*lead, 1, 1)
    return token * 10 + torch.tensor(SHAPE.moe_layers)[:, None].expand(3, 2)


def zigzag(slots: list[int], cp: tuple[int, int]) -> list[int]:
    """What a context-parallel rank has of one sequence."""
    size, rank = cp
    if size == 1:
        return slots
    chunk = len(slots) // (2 * size)
    return [slots[piece * chunk + i] for piece in (rank, 2 * size - 1 - rank) for i in range(chunk)]


LAYOUTS = [
    ((tp, tp_rank), (cp, cp_rank)) for tp in (1, 2) for cp in (1, 2) for tp_rank in range(tp) for cp_rank in range(cp)
]


@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_rows_of_a_padded_batch(tp: tuple[int, int], cp: tuple[int, int]) -> None:
    b, s = 3, 8
    mask = torch.ones(b, s, dtype=torch.bool)
    mask[1, 6:] = False
    ids = torch.arange(100, 100 + b * s).view(b, s)
    found = local_rows(SHAPE, (4, 1), tp, cp, numbered(b, s), mask, ids)
    held = zigzag(list(range(s)), cp)
    share = len(held) // tp[0]
    wanted = [(n, t) for t in held[tp[1] * share : (tp[1] + 1) * share] for n in range(b)]  # s first
    assert found.token_ids is not None
    assert found.present is not None
    assert found.token_ids.tolist() == [int(ids[place]) for place in wanted]
    assert found.present.tolist() == [bool(mask[place]) for place in wanted]
    assert found.experts[..., 0].tolist() == [[(n * s + t + 1) * 10 + layer for layer in (4, 1)] for n, t in wanted]


@pytest.mark.parametrize("tail", [0, 8])
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_rows_of_packed_sequences(tp: tuple[int, int], cp: tuple[int, int], tail: int) -> None:
    """Sequences are padded to multiples of 2 cp tp; a last one may be padding alone."""
    lengths, multiple = [3, 8, 5], 2 * cp[0] * tp[0]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    padded_lengths = [-(-length // multiple) * multiple for length in lengths] + [tail] * (tail > 0)
    padded = torch.tensor([0, *padded_lengths]).cumsum(0)
    mask = torch.ones(16, dtype=torch.bool)
    mask[4] = False
    ids, gates = torch.arange(16), numbered(16) / 3
    found = local_rows(SHAPE, (1, 3, 4), tp, cp, numbered(16), mask, ids, bounds.int(), padded.int(), gates)
    assert torch.equal(found.gates, found.experts / 3)  # type: ignore[arg-type]
    held: list[int] = []
    for start, length, whole in zip(bounds.tolist(), [*lengths, 0], padded_lengths, strict=False):
        held += zigzag([start + t if t < length else -1 for t in range(whole)], cp)
    share = len(held) // tp[0]
    wanted = held[tp[1] * share : (tp[1] + 1) * share]
    assert found.present is not None
    assert found.token_ids is not None
    assert found.present.tolist() == [token not in (-1, 4) for token in wanted]
    there = [token for token in wanted if token not in (-1, 4)]
    assert found.token_ids[found.present].tolist() == there
    assert found.experts[found.present][:, 0, 0].tolist() == [(token + 1) * 10 + 1 for token in there]


def test_a_stage_without_moe_layers_has_rows_without_columns() -> None:
    assert local_rows(SHAPE, (), (1, 0), (1, 0), numbered(2, 4)).experts.shape == (8, 0, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((numbered(16),), r"experts are \[16, 3, 2\], expected \[b, s, L, K\]; packed sequences need cu_seqlens"),
        ((numbered(2, 8), None, None, torch.tensor([0, 16])), r"expected \[T, L, K\] with cu_seqlens"),
        ((numbered(2, 8)[:, :, :2],), "have 2 layers, expected all 3 MoE layers .*without dense and exempt ones"),
        ((numbered(2, 8), None, torch.ones(16)), r"token_ids is \[16\], expected \[2, 8\]"),
        ((numbered(2, 7),), "do not divide as Megatron divides them: lengths are .7"),
        ((numbered(16), None, None, torch.tensor([0, 8])), "cu_seqlens end at 8, expected 16"),
        ((numbered(16), None, None, torch.tensor([0, 6, 16])), "lengths are .6"),
        ((numbered(16), None, None, torch.tensor([0, 8, 16]), torch.tensor([0, 4, 16])), "at least as long"),
    ],
)
def test_what_cannot_be_the_rows_of_a_micro_batch(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        local_rows(SHAPE, SHAPE.moe_layers, (2, 0), (2, 0), *given)


@pytest.mark.parametrize(("frequency", "layers"), [(2, (0, 2, 4)), (1, (0, 1, 2, 3, 4)), ([0, 1, 0, 1, 1], (1, 3, 4))])
def test_the_shape_of_megatrons_configurations(frequency: Any, layers: tuple[int, ...]) -> None:
    fields = {"num_layers": 5, "moe_router_topk": 2, "moe_layer_freq": frequency}
    assert MoeShape.of_megatron(SimpleNamespace(**fields, num_moe_experts=8)) == MoeShape(5, layers, 8, 2)
    assert MoeShape.of_megatron(SimpleNamespace(**fields, num_moe_experts=None)) == MoeShape(5, (), 0, 0)


def test_rows_of_the_model_are_those_of_the_trainer(world: World) -> None:
    for micro, routes in zip(world.micros, world.routes, strict=True):
        batch = micro.batch
        found = world.replay.rows(experts_of(batch), batch.routed_mask, batch.tokens, batch.cu_seqlens)
        there = found.present
        assert there is not None
        assert torch.equal(there, torch.ones_like(there) if routes.present is None else routes.present)
        assert torch.equal(found.experts[there], routes.experts[there])
        assert torch.equal(found.token_ids[there], routes.token_ids[there])  # type: ignore[index]
    before = world.run()
    with world.replay.replay(
        [
            world.replay.rows(experts_of(m.batch), m.batch.routed_mask, m.batch.tokens, m.batch.cu_seqlens)
            for m in world.micros
        ],
        min_agreement=0.0,
    ) as seen:
        replayed = world.run()
    assert seen.compared_tokens == len(world.micros)
    assert not all(torch.equal(a, b) for a, b in zip(before, replayed, strict=True))


def traces() -> list[RoutingTrace]:
    experts = [np.tile(np.arange(length)[:, None, None] + np.arange(2), (1, 3, 1)) for length in (3, 5)]
    return [RoutingTrace(experts[0], 64, np.arange(3) < 2), RoutingTrace(experts[1], 64)]


def test_traces_stack_into_batches() -> None:
    experts, present = stack_routes(traces(), 6)
    assert experts.shape == (2, 6, 3, 2)
    assert present.tolist() == [[True, True, False, False, False, False], [True] * 5 + [False]]
    assert experts[1, 4].tolist() == [[4, 5]] * 3
    packed, there = stack_routes(traces())
    assert torch.equal(packed[there], experts[present])
    assert there.tolist() == [True, True, False, True, True, True, True, True]
    wide = stack_routes([RoutingTrace(np.array([[[299, 3]]]), 300)], 1)[0]
    assert (wide.dtype, wide.flatten().tolist()) == (torch.int16, [299, 3])
    with pytest.raises(ReplayError, match="has 5 tokens, expected at most seq_length = 4"):
        stack_routes(traces(), 4)
    with pytest.raises(ReplayError, match="traces of 2 models"):
        stack_routes([*traces(), RoutingTrace(np.array([[[1, 3]]]), 64)], 6)
    with pytest.raises(ReplayError, match="traces of 0 models"):
        stack_routes([], 6)


def padded_batch(b: int = 6, s: int = 7) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(b, s, generator=draw) < 0.5
    mask[2] = False  # a sequence without a loss token
    names = ("logprobs", "old_logprobs", "rollout_logprobs")
    batch = {name: -torch.rand(b, s, generator=draw).double() - 1 for name in names}
    return {**batch, "advantages": torch.randn(b, s, generator=draw).double(), "loss_mask": mask}


@pytest.mark.parametrize("name", ["minirl", "grpo", "dapo"])
def test_the_loss_of_a_step_does_not_depend_on_its_micro_batches(name: str, one_rank: None, world: World) -> None:
    batch = padded_batch()
    whole, _ = policy_loss(OBJECTIVES[name], TokenColumns.of_padded(batch["logprobs"], batch))
    pieces = [{key: column[rows] for key, column in batch.items()} for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    loss = StepLoss.of(OBJECTIVES[name], [piece["loss_mask"] for piece in pieces])
    assert loss.denominators.num_sequences == 5
    assert loss.denominators.num_tokens == int(batch["loss_mask"].sum())
    found = [loss(TokenColumns.of_padded(piece["logprobs"], piece)) for piece in pieces]
    averaged = torch.stack([value for value, _ in found]).mean()  # as Megatron does, on one rank
    torch.testing.assert_close(averaged, whole)
    assert reduce_metrics([statistics for _, statistics in found])["loss"] == pytest.approx(float(whole))
    bounds = [torch.arange(0, piece["loss_mask"].numel() + 1, 7) for piece in pieces]
    assert StepLoss.of(OBJECTIVES[name], [piece["loss_mask"].flatten() for piece in pieces], bounds) == loss


MASK = padded_batch()["loss_mask"]
NEEDY = next(row for row in OBJECTIVES.values() if row.beforehand)


@pytest.mark.parametrize(
    ("objective", "masks", "bounds", "error", "message"),
    [
        (
            "minirl",
            [MASK, MASK.float()],
            None,
            ConfigError,
            r"loss mask 1 is torch.float32, expected torch.bool, .*mask",
        ),
        (
            "minirl",
            [MASK.flatten()],
            None,
            ConfigError,
            r"loss mask 0 is \[42\], expected \[b, s\]; packed \[T\] ",
        ),
        ("grpoo", [MASK], None, UnknownNameError, r"objective .grpoo. is unknown; did you mean grpo "),
        ("minirl", [], None, ConfigError, "no loss masks: give those of all micro-batches"),
        ("minirl", [MASK.flatten()] * 2, [torch.tensor([0, 42])], ConfigError, "1 cu_seqlens for 2 loss masks"),
        ([], [MASK], None, ConfigError, r'objective is a list, expected a row, such as OBJECTIVES\["minirl"\]'),
        (NEEDY, [MASK], None, ConfigError, "must know all tokens of the step beforehand"),
    ],
)
def test_what_a_loss_of_a_step_refuses(
    objective: Any, masks: Any, bounds: Any, error: type[Exception], message: str, world: World
) -> None:
    with pytest.raises(error, match=message):
        StepLoss.of(objective, masks, bounds)
    assert StepLoss.of("minirl", [MASK]) == StepLoss.of(OBJECTIVES["minirl"], [MASK])
    assert reduce_metrics([]) == {}
