"""What stands at the tokens of an environment reaches no coefficient, no loss, no metric and no weight: bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from train_world import World, fixed_advantages, take_step, training, weights_of

from megarl.core.choices.parts import NON_NEGATIVE_ADVANTAGES, Factor, Objective, Penalty
from megarl.core.choices.table import OBJECTIVES
from megarl.core.metrics import Stat
from megarl.core.objectives import Coefficients, coefficients, gather_facts, policy_loss
from megarl.core.objectives.columns import Denominators, TokenColumns
from megarl.core.types import Rollout

ROWS = sorted(name for name, row in OBJECTIVES.items() if not (row.needs_ref_logprobs or row.needs_topk))
KL_ROWS = {
    f"grpo {kl}": replace(OBJECTIVES["grpo"], penalties=(Penalty(kl, coef=0.1),))
    for kl in ("k1", "k2", "k3", "unbiased")
}
CTPO = OBJECTIVES["ctpo"]
GAP = replace(CTPO, factors=(*CTPO.factors, Factor("old_mu", scope="sequence_sum", high=5.0)))
LITERAL = replace(CTPO, prefix_grad=True)
ALL = {**{name: OBJECTIVES[name] for name in ROWS}, **KL_ROWS, "ctpo literal": LITERAL, "ctpo gap": GAP}
"""All that need no reference, and what masked tokens could reach besides: a penalty, sums over later tokens, gaps."""

TURNS = [[5, 3, 4, 2, 6], [2, 1, 1, 1, 1, 1, 1], [7, 9], [3, 2, 40, 3], [4, 12, 1, 30, 2]]
"""By sequence: prompt, turn, observation, turn, ..."""


def multi_turn_columns(dtype: torch.dtype, objective: Objective, seed: int = 0) -> TokenColumns:
    """Sequences of ``TURNS``, in which tokens leave windows and every ratio differs from 1."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.cat([torch.full((size,), i % 2 == 1) for turns in TURNS for i, size in enumerate(turns)])
    lengths = torch.tensor([sum(turns) for turns in TURNS])
    total = int(lengths.sum())

    def noise(scale: float) -> Tensor:
        return (scale * torch.randn(total, generator=generator)).to(dtype)

    old = (-3 * torch.rand(total, generator=generator) - 2.0).to(dtype)
    per_sequence = torch.tensor([1.0, -1.5, 0.5, -0.25, 2.0], dtype=dtype)
    if objective.advantage in NON_NEGATIVE_ADVANTAGES:
        per_sequence = per_sequence.abs()
    return TokenColumns(
        logprobs=old + noise(0.1),
        old_logprobs=old,
        rollout_logprobs=old + noise(0.1),
        advantages=per_sequence.repeat_interleave(lengths),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, *lengths.tolist()]).cumsum(0),
        ref_logprobs=old + noise(0.2),
        router_drift=noise(0.2).abs(),
    )


def random_garbage(column: Tensor) -> Tensor:
    return 10 * torch.randn(column.shape, generator=torch.Generator().manual_seed(9)).to(column.dtype)


GARBAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "random": random_garbage,
    **{
        str(value): lambda column, value=value: torch.full_like(column, value)
        for value in (-math.inf, math.inf, math.nan)
    },
    "1e30": lambda column: torch.full_like(column, 1e30),
    "zero": torch.zeros_like,
}
COLUMNS = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs", "router_drift")


def bits(tensor: Tensor) -> Tensor:
    """Equal only where the very same float stands, its sign of zero included."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_same_metrics(found: dict[str, Stat], expected: dict[str, Stat]) -> None:
    assert found.keys() == expected.keys()
    for name, stat in expected.items():
        assert torch.equal(bits(found[name].sums), bits(stat.sums)), name
        assert torch.equal(bits(found[name].maxima), bits(stat.maxima)), name


def loss_of(objective: Objective, columns: TokenColumns) -> tuple[Tensor, Tensor, Coefficients, dict[str, Stat]]:
    """Loss, its gradient, coefficients and metrics, as an update finds them."""
    logprobs = columns.logprobs.clone().requires_grad_()
    watched = replace(columns, logprobs=logprobs)
    facts = gather_facts(objective, [watched])
    counts = Denominators.of(columns.loss_mask, columns.cu_seqlens, columns.rollout_logprobs)
    loss, metrics = policy_loss(objective, watched, counts, facts=facts)
    loss.backward()
    assert logprobs.grad is not None
    return loss, logprobs.grad, coefficients(objective, watched, counts, facts=facts), metrics


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("name", ALL)
def test_garbage_at_masked_tokens_changes_no_bit(name: str, kind: str) -> None:
    for dtype in (torch.float32, torch.float64):
        columns = multi_turn_columns(dtype, ALL[name])
        expected = loss_of(ALL[name], columns)
        for changed in [[column] for column in COLUMNS] + [list(COLUMNS)]:
            dirty = replace(
                columns,
                **{
                    column: torch.where(columns.loss_mask, getattr(columns, column), GARBAGE[kind](columns.logprobs))
                    for column in changed
                },
            )
            found = loss_of(ALL[name], dirty)
            assert torch.equal(bits(found[0]), bits(expected[0])), changed
            assert torch.equal(bits(found[1]), bits(expected[1])), changed
            assert torch.equal(bits(found[2].values), bits(expected[2].values)), changed
            assert_same_metrics(found[3], expected[3])
        assert not expected[1][~columns.loss_mask].any()


@pytest.mark.parametrize("name", ALL)
def test_without_the_masked_tokens_the_others_have_the_same_coefficients(name: str) -> None:
    """True of every row: ratios, windows and denominators know generated tokens alone, and count them alone."""
    columns = multi_turn_columns(torch.float64, ALL[name])
    kept = columns.loss_mask
    lengths = [int(kept[a:b].sum()) for a, b in zip(columns.cu_seqlens[:-1], columns.cu_seqlens[1:], strict=True)]
    bare = TokenColumns(
        **{column: getattr(columns, column)[kept] for column in COLUMNS},
        loss_mask=torch.ones(int(kept.sum()), dtype=torch.bool),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )
    with_holes, without = coefficients(ALL[name], columns), coefficients(ALL[name], bare)
    torch.testing.assert_close(with_holes.values[kept], without.values, rtol=1e-12, atol=0)
    assert torch.equal(with_holes.values[kept] == 0, without.values == 0)  # the same tokens leave the same windows
    for metric, stat in without.metrics.items():
        torch.testing.assert_close(with_holes.metrics[metric].sums, stat.sums, rtol=1e-10, atol=1e-12)


# Through the real training step.


def as_turns(rollout: Rollout) -> Rollout:
    """The same tokens, of which some in the middle of the response are an environment's."""
    mask = rollout.loss_mask.copy()
    first = rollout.prompt_length
    mask[first + 2 : first + 4] = False
    mask[first + 5 : first + 6] = False
    return replace(rollout, loss_mask=mask, rollout_logprobs=np.where(mask, rollout.rollout_logprobs, 0).astype("f4"))


def dirty(rollouts: Sequence[Rollout], value: float | None) -> list[Rollout]:
    rng = np.random.default_rng(3)

    def column(rollout: Rollout) -> np.ndarray:
        garbage = rng.normal(size=rollout.num_tokens) * 10 if value is None else np.full(rollout.num_tokens, value)
        return np.where(rollout.loss_mask, rollout.rollout_logprobs, garbage).astype(np.float32)

    return [replace(rollout, rollout_logprobs=column(rollout)) for rollout in rollouts]


def per_token(rollouts: Sequence[Rollout], masked: float) -> np.ndarray:
    """An advantage for each token; ``masked`` at those that were not generated, which may be any finite number."""
    found = np.empty(len(rollouts), dtype=object)
    for i, (rollout, advantage) in enumerate(zip(rollouts, fixed_advantages(), strict=True)):
        found[i] = np.where(rollout.loss_mask, advantage, masked)
    return found


@pytest.mark.parametrize("name", ["ctpo", "grpo", "gspo", "minirl"])
def test_garbage_at_masked_tokens_changes_no_bit_of_two_steps(world: World, name: str) -> None:
    rollouts = [as_turns(rollout) for rollout in world.rollouts()]
    # Some of the tokens below are others than those that the routes are of.
    unchecked = {"train__min_route_agreement": 0.0, "train__max_k3": "off", "train__max_native_flip": "off"}
    settings = world.settings(train__objective=name, train__replay="r3", **unchecked)

    def after_two_steps(used: Sequence[Rollout], masked: float) -> tuple[dict[str, Tensor], list[Any]]:
        with training(settings) as step:
            taken = [take_step(step, used, per_token(used, masked)) for _ in range(2)]
            return weights_of(step.policy), [one and (one.updates, one.step) for one in taken]

    expected, told = after_two_steps(rollouts, 0.0)
    assert told[0][0][0]["loss_tokens"] < sum(rollout.num_tokens for rollout in rollouts)
    for value, masked in ((None, 1e30), (math.nan, -3.0), (-math.inf, 0.5), (1e30, 1e30)):
        weights, metrics = after_two_steps(dirty(rollouts, value), masked)
        assert all(torch.equal(bits(weights[key]), bits(tensor)) for key, tensor in expected.items()), value
        assert metrics == told
    other = [replace(r, tokens=np.where(r.loss_mask | (np.arange(r.num_tokens) == 0), r.tokens, 7)) for r in rollouts]
    weights, _ = after_two_steps(other, 0.0)  # the ids of masked tokens are context, and count
    assert not all(torch.equal(weights[key], tensor) for key, tensor in expected.items())
