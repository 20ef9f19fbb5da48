"""Which advantage an objective names, per response, step or token, and which responses train."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch
from core_batches import random_columns
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core.advantages import groups, weighted
from megarl.core.choices.parts import TOKEN_ADVANTAGES, AdvantageName, Objective
from megarl.core.objectives import (
    OBJECTIVES,
    TokenColumns,
    advantages_of,
    coefficients,
    function_coefficients,
    policy_loss,
    select_responses,
    step_advantages,
    token_advantages,
)
from megarl.core.ratios import aggregate, ratio_gradient
from megarl.errors import ConfigError, NumericsError

GROUPS = [7, 7, 7, 7, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.8, 0.0, 0.5, 0.5, 0.5]
LENGTHS = [2, 4, 6, 8, 3, 1, 5]
PAIRS = np.array([[1, 0], [0, 0], [0.3, 0.5], [0, 0], [0.5, 0], [0, 0.5], [0.25, 0.25]])
WEIGHTS = [1.0, 1.0]
GIVEN: dict[str, Any] = {"lengths": LENGTHS, "components": (PAIRS, WEIGHTS)}


def objective(advantage: Any, **parts: Any) -> Objective:
    return replace(OBJECTIVES["reinforce"], advantage=advantage, **parts)


EXPECTED = {
    "group_mean": groups.group_mean(REWARDS, GROUPS),
    "grpo": groups.grpo(REWARDS, GROUPS, 0, 0.01),
    "rloo": groups.rloo(REWARDS, GROUPS),
    "raw": torch.tensor(REWARDS),
    "raw_mixed": torch.tensor([1.0, 0.0, 0.8, 0.0, 0.0, 0.0, 0.0]),
    "positive_part": torch.tensor(REWARDS),
    "raft": torch.tensor([1.0, 0, 1, 0, 1, 1, 1]),
    "signed": torch.tensor([1.0, -1, 1, -1, 1, 1, 1]),
    "opo": weighted.opo(REWARDS, GROUPS, LENGTHS),
    "reinforce_pp": weighted.reinforce_pp(REWARDS, GROUPS, LENGTHS),
    "reinforce_pp_baseline": weighted.reinforce_pp_baseline(REWARDS, GROUPS, LENGTHS),
    "batch_mean": weighted.batch_mean(REWARDS, GROUPS, LENGTHS),
    "gdpo": weighted.gdpo(PAIRS, WEIGHTS, GROUPS, LENGTHS, 0, 0.01),
}


def test_each_name_is_its_function() -> None:
    assert {*EXPECTED, *TOKEN_ADVANTAGES} == set(get_args(AdvantageName))
    for name, expected in EXPECTED.items():
        found = advantages_of(objective(name, std_ddof=0, std_eps=0.01), REWARDS, GROUPS, 0.4, **GIVEN)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minirl", [0.55, -0.45, 0.35, -0.45, 0, 0, 0]),
        ("grpo", reference.grpo(REWARDS, [*GROUPS[:6], 4])),
        ("dapo", reference.grpo(REWARDS, [*GROUPS[:6], 4])),
        ("cispo", reference.grpo(REWARDS, [*GROUPS[:6], 4])),
        ("rloo", [4 / 3 * x for x in (0.55, -0.45, 0.35, -0.45)] + [0, 0, 0]),
        ("raft", [1, 0, 1, 0, 0, 0, 0]),
        ("raft_pp", [1, 0, 1, 0, 0, 0, 0]),
        ("topr", [*REWARDS[:6], -0.25]),
        ("reinforce_rej", [1, 0, 0.8, 0, 0, 0, -0.25]),
        ("reinforce_rej_signed", [1, -1, 1, -1, 0, 0, 0]),
    ],
)
def test_a_row_has_its_advantages_by_name_and_by_record(name: str, expected: list[float]) -> None:
    rewards, groups = [*REWARDS[:6], -0.25], [*GROUPS[:6], 4]
    found = advantages_of(name, rewards, groups)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(found, advantages_of(OBJECTIVES[name], rewards, groups))
    trains = select_responses(name, rewards, groups)
    assert trains.tolist() == [True] * 4 + [name != "reinforce_rej_signed"] * 3


def test_what_is_needed_and_not_given_is_refused() -> None:
    for name in ("opo", "reinforce_pp", "reinforce_pp_baseline", "gdpo", "batch_mean"):
        with pytest.raises(ConfigError, match=f"'{name}' needs the lengths"):
            advantages_of(objective(name), REWARDS, GROUPS, components=(PAIRS, WEIGHTS))
    with pytest.raises(ConfigError, match=r"'gdpo' needs several rewards.*reward\.weights"):
        advantages_of(objective("gdpo"), REWARDS, GROUPS, lengths=LENGTHS)
    with pytest.raises(ConfigError, match=r"differs between the tokens.*step_advantages"):
        advantages_of(objective("process"), REWARDS, GROUPS, **GIVEN)
    assert select_responses(objective("process"), [1.0, 0.0], [0, 0]).all()
    with pytest.raises(ConfigError, match="one advantage per response, but those of 'process' differ"):
        objective("process", selection="positive")


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "gdpo"])
def test_groups_that_leave_the_denominators_leave_the_statistics(name: str) -> None:
    """The last three responses do not train with mixed_groups: the tokens of the others have mean 0."""
    found = advantages_of(objective(name, selection="mixed_groups"), REWARDS, GROUPS, **GIVEN)
    assert float((found * torch.tensor(LENGTHS)).sum()) == pytest.approx(0, abs=1e-9)
    assert found[4:].tolist() == [0, 0, 0]
    everything = advantages_of(objective(name), REWARDS, GROUPS, **GIVEN)
    assert not torch.allclose(found[:4], everything[:4])


def test_positive_selection_looks_at_the_advantage() -> None:
    for name in ("opo", "reinforce_pp", "gdpo", "signed", "raw", "positive_part", "batch_mean"):
        whole = advantages_of(objective(name), REWARDS, GROUPS, 0.4, **GIVEN)
        o = objective(name, selection="positive")
        assert select_responses(o, REWARDS, GROUPS, 0.4, **GIVEN).tolist() == (whole > 0).tolist()
        assert advantages_of(o, REWARDS, GROUPS, 0.4, **GIVEN).tolist() == whole.clamp(min=0).tolist()


@pytest.mark.parametrize("name", ["opo", "gdpo", "signed"])
def test_per_token_they_count_loss_tokens(name: str) -> None:
    """Sequences of 3 and 4 tokens, of which 2 and 1 have loss; a reference is not read."""
    mask = torch.tensor([False, True, True, False, True, False, False])
    pairs = ([[1.0, 0.0], [0.0, 1.0]], [2.0, 1.0])
    of_response = advantages_of(objective(name), [1.0, 0.3], [0, 0], 0.5, lengths=[2, 1], components=pairs)
    for ref in (None, -torch.ones(7)):
        found = token_advantages(
            objective(name),
            [1.0, 0.3],
            [0, 0],
            logprobs=torch.zeros(7),
            ref_logprobs=ref,
            loss_mask=mask,
            cu_seqlens=torch.tensor([0, 3, 7]),
            threshold=0.5,
            components=pairs,
        )
        assert found.tolist() == [of_response[0]] * 3 + [of_response[1]] * 4
    assert of_response[0] > 0 > of_response[1]


@pytest.mark.parametrize(("name", "horizon"), [("kl_grpo", None), ("kl_grpo", 9), ("kl_grpo_token", None)])
def test_token_level_kl_has_the_numbers_of_its_row(name: str, horizon: int | None) -> None:
    """Of the row: beta = 0.01, the deviation of the population, and no horizon unless it is set."""
    columns = random_columns(0, [7, 4, 9, 5, 1, 8], masked=0.35)
    rewards, groups = [1.0, 0.0, 1.0, 0.25, 0.0, 1.0], [4, 4, 4, 4, 2, 2]
    assert columns.ref_logprobs is not None
    found = token_advantages(
        replace(OBJECTIVES[name], kl_horizon=horizon),
        rewards,
        groups,
        logprobs=columns.old_logprobs,
        ref_logprobs=columns.ref_logprobs,
        loss_mask=columns.loss_mask,
        cu_seqlens=columns.cu_seqlens,
    )
    kl, bounds = columns.old_logprobs - columns.ref_logprobs, columns.cu_seqlens.tolist()
    own = [kl[a:b][columns.loss_mask[a:b]].tolist() for a, b in pairwise(bounds)]
    expected = reference.token_level_kl(rewards, groups, own, 0.01, 0, 1e-6, horizon)
    np.testing.assert_allclose(found[columns.loss_mask], [x for row in expected for x in row], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["prefix", "future_mean", "future_sum"])
def test_the_gradient_of_a_ratio_is_its_transpose(kind: Any) -> None:
    columns = random_columns(2, [7, 4, 9, 5, 1, 8], masked=0.35)
    mask, bounds = columns.loss_mask, columns.cu_seqlens
    ratios = torch.where(mask, columns.logprobs - columns.old_logprobs, 0.0).requires_grad_()
    upstream = torch.where(mask, torch.randn(len(mask), dtype=torch.float64), 0.0)
    (expected,) = torch.autograd.grad(aggregate(kind, ratios, mask, bounds), ratios, upstream)
    found = ratio_gradient(kind, upstream, mask, bounds)
    assert torch.allclose(found, torch.where(mask, expected, 0.0), rtol=1e-9)


Response = tuple[int, int, list[tuple[int, float]]]
"""Group, tokens, and per step its last token in the response and its reward."""


@st.composite
def responses(draw: st.DrawFn) -> Response:
    length = draw(st.integers(0, 6))
    step = st.tuples(st.integers(0, max(length - 1, 0)), st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]))
    return draw(st.integers(-1, 1)), length, draw(st.lists(step, max_size=4 if length else 0))


def of_steps(batch: list[Response], ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """float64 [T], those of all responses back to back."""
    steps = [sorted(row, key=lambda step: step[0]) for _, _, row in batch]
    process = objective("process", std_ddof=ddof, std_eps=eps)
    found = step_advantages(process, steps, [group for group, _, _ in batch], [length for _, length, _ in batch])
    return np.concatenate(found)


def slow_steps(batch: list[Response], ddof: int, eps: float) -> list[float]:
    """Every token looks at every step of its response, every step at every step of its group."""
    advantages = []
    for group, length, steps in batch:
        everything = [reward for g, _, row in batch if g == group for _, reward in row]
        for token in range(length):
            total = 0.0
            for at, reward in steps:
                if at < token or len(set(everything)) == 1:
                    continue
                deviation = statistics.stdev(everything) if ddof else statistics.pstdev(everything)
                total += (reward - math.fsum(everything) / len(everything)) / (deviation + eps)
            advantages.append(total)
    return advantages


class TestSteps:
    def test_hand_computed(self) -> None:
        """Steps 1 and 0 in one response, 1 in the other: mean 2/3, population's deviation sqrt(2)/3; the third has
        none."""
        batch: list[Response] = [(4, 4, [(1, 1.0), (2, 0.0)]), (4, 2, [(1, 1.0)]), (4, 2, []), (5, 1, [(0, 7.0)])]
        good, bad = 1 / math.sqrt(2), -math.sqrt(2)
        expected = [good + bad, good + bad, bad, 0, good, good, 0, 0, 0]
        assert of_steps(batch, ddof=0, eps=0.0).tolist() == pytest.approx(expected, abs=1e-9)

    @settings(max_examples=150, deadline=None)
    @given(batch=st.lists(responses(), min_size=1, max_size=7), ddof=st.sampled_from([0, 1]))
    def test_against_reference(self, batch: list[Response], ddof: int) -> None:
        found = of_steps(batch, ddof, 1e-2)
        np.testing.assert_allclose(found, slow_steps(batch, ddof, 1e-2), rtol=0, atol=1e-9)
        short = [(group, 0, steps) for group, _, steps in batch[:1]] + batch[1:]
        np.testing.assert_array_equal(of_steps(short, ddof, 1e-2), found[batch[0][1] :])  # it enters the statistics

    @settings(max_examples=30, deadline=None)
    @given(reward=st.floats(-1e3, 1e3))
    def test_no_contrast_is_exactly_zero(self, reward: float) -> None:
        batch: list[Response] = [(0, 3, [(0, reward), (2, reward)]), (0, 2, [(1, reward)]), (1, 1, [(0, reward)])]
        assert of_steps(batch).tolist() == [0.0] * 6
        assert of_steps([(0, 4, [])]).tolist() == [0.0] * 4

    def test_refusals(self) -> None:
        with pytest.raises(NumericsError, match="nan, expected a finite number"):
            of_steps([(0, 2, [(0, 1.0), (1, math.nan)])])
        with pytest.raises(ValueError, match="shorter"):
            step_advantages(objective("process"), [[(0, 1.0)], [(1, 0.0)]], [0, 0], [2])


def columns(**changes: Any) -> TokenColumns:
    """Two responses of two tokens, on policy."""
    logprobs = torch.full((4,), -1.0, dtype=torch.float64)
    mask, bounds = torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4])
    given = {"advantages": torch.ones(4, dtype=torch.float64), "loss_mask": mask, "cu_seqlens": bounds} | changes
    return TokenColumns(*[logprobs] * 3, **given)


def test_advantages_of_another_objective_are_refused() -> None:
    row, wrong = OBJECTIVES["raft"], columns(advantages=torch.tensor([0.5, 0.0, -0.5, -0.5], dtype=torch.float64))
    match = r"advantages is -0\.5 at token 2 .*\(2 such loss tokens\), but 'raft', .* never negative.*advantages_of\("
    for call in (coefficients, policy_loss, lambda *given: function_coefficients(lambda c: c.advantages, *given)):
        with pytest.raises(ConfigError, match=match):
            call(row, wrong)
    unmasked = replace(wrong, loss_mask=torch.tensor([True, True, False, False]))
    assert coefficients(row, unmasked).values.tolist() == [0.25, 0, 0, 0]
    assert (coefficients(replace(row, advantage="positive_part"), columns()).values > 0).all()
    with pytest.raises(ConfigError, match="'positive_part'"):
        coefficients(replace(row, advantage="positive_part"), wrong)
    assert (coefficients(replace(row, advantage="signed"), wrong).values[2:] < 0).all()


@pytest.mark.parametrize(
    ("name", "match"),
    [("grpoo", r"'grpoo' is unknown; did you mean grpo or "), ("ppo", "'ppo' is unknown.*OBJECTIVES"), (3, "unknown")],
)
def test_an_unknown_name_is_told_the_nearest(name: Any, match: str) -> None:
    with pytest.raises(KeyError, match=match) as caught:
        OBJECTIVES[name]
    assert isinstance(caught.value, ConfigError)
    assert str(caught.value).startswith("objective ")
    assert name not in OBJECTIVES
    assert OBJECTIVES.get(name) is None


@pytest.mark.parametrize("call", [coefficients, policy_loss])
def test_a_name_stands_for_its_record(call: Any) -> None:
    found, expected = call("minirl", columns()), call(OBJECTIVES["minirl"], columns())
    assert torch.equal(*(one[0] if isinstance(one, tuple) else one.values for one in (found, expected)))
    for wrong, match in (("minirI", "did you mean minirl"), (None, "NoneType")):
        with pytest.raises(ConfigError, match=match):
            call(wrong, columns())
