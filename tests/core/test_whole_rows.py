"""A row is whole: it gives the advantages that it expects, and refuses some others. Errors say what to give."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.core.objectives import (
    OBJECTIVES,
    TokenColumns,
    advantages_of,
    coefficients,
    function_coefficients,
    policy_loss,
    select_responses,
)
from megarl.errors import ConfigError

REWARDS = [1.0, 0.0, 0.8, 0.0, 0.5, 0.5, -0.25]
GROUPS = [7, 7, 7, 7, 1, 1, 4]


def columns(**changes: Any) -> TokenColumns:
    """Two responses of two tokens, on policy."""
    logprobs = torch.full((4,), -1.0, dtype=torch.float64)
    mask, bounds = torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4])
    given = {"advantages": torch.ones(4, dtype=torch.float64), "loss_mask": mask, "cu_seqlens": bounds} | changes
    return TokenColumns(*[logprobs] * 3, **given)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minirl", [0.55, -0.45, 0.35, -0.45, 0, 0, 0]),
        ("rloo", [4 / 3 * x for x in (0.55, -0.45, 0.35, -0.45)] + [0, 0, 0]),
        ("raft", [1, 0, 1, 0, 0, 0, 0]),
        ("raft_pp", [1, 0, 1, 0, 0, 0, 0]),
        ("topr", REWARDS),
        ("reinforce_rej", [1, 0, 0.8, 0, 0, 0, -0.25]),
        ("reinforce_rej_signed", [1, -1, 1, -1, 0, 0, 0]),
    ],
)
def test_by_name_and_by_record(name: str, expected: list[float]) -> None:
    assert advantages_of(name, REWARDS, GROUPS).tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.equal(advantages_of(name, REWARDS, GROUPS), advantages_of(OBJECTIVES[name], REWARDS, GROUPS))


@pytest.mark.parametrize("selection", ["all", "mixed_groups", "positive"])
@pytest.mark.parametrize("name", ["grpo", "raft", "reinforce_rej_signed"])
def test_a_response_that_does_not_train_has_advantage_0(name: str, selection: Any) -> None:
    row = replace(OBJECTIVES[name], selection=selection)
    whole = advantages_of(replace(row, selection="all"), REWARDS, GROUPS)
    expected = torch.where(select_responses(row, REWARDS, GROUPS), whole, 0.0)
    assert select_responses(name, REWARDS, GROUPS).equal(select_responses(OBJECTIVES[name], REWARDS, GROUPS))
    assert advantages_of(row, REWARDS, GROUPS).tolist() == expected.tolist()


def test_rows_that_differ_in_their_advantage_alone_differ() -> None:
    """With the same advantages they have the same coefficients; each has its own from ``advantages_of``."""
    rows: dict[Any, dict[str, list[float]]] = {}
    for row in OBJECTIVES.values():
        if isinstance(row.advantage, str) and row.advantage != "token_level_kl":
            alike = rows.setdefault(replace(row, advantage="raw", selection="all"), {})
            alike[row.advantage] = advantages_of(row, REWARDS, GROUPS).tolist()
    assert sum(len(alike) > 1 for alike in rows.values()) >= 2
    for alike in rows.values():
        assert all(one != other for one, other in itertools.combinations(alike.values(), 2))


@pytest.mark.parametrize("name", ["raft", "raft_pp"])
def test_advantages_of_another_objective_are_refused(name: str) -> None:
    row, wrong = OBJECTIVES[name], columns(advantages=torch.tensor([0.5, 0.0, -0.5, -0.5], dtype=torch.float64))
    match = r"advantages is -0\.5 at token 2 .*\(2 such loss tokens\), but 'raft', .* never negative.*advantages_of\("
    for call in (coefficients, policy_loss):
        with pytest.raises(ConfigError, match=match):
            call(row, wrong)
    with pytest.raises(ConfigError, match=match):
        function_coefficients(lambda given: given.advantages, row, wrong)
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
    with pytest.raises(KeyError, match="did you mean grpo"):
        advantages_of("grpoo", REWARDS, GROUPS)
    assert name not in OBJECTIVES
    assert OBJECTIVES.get(name) is None


@pytest.mark.parametrize(("objective", "match"), [("minirI", "did you mean minirl"), (None, "NoneType")])
def test_a_wrong_name_in_the_place_of_a_record(objective: Any, match: str) -> None:
    for call in (coefficients, policy_loss):
        with pytest.raises(ConfigError, match=match):
            call(objective, columns())


def test_a_name_stands_for_its_record() -> None:
    for call in (coefficients, policy_loss):
        found, expected = call("minirl", columns()), call(OBJECTIVES["minirl"], columns())
        assert torch.equal(*(one[0] if isinstance(one, tuple) else one.values for one in (found, expected)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"loss_mask": torch.ones(4)}, r"torch\.float32, expected torch\.bool: give loss_mask\.bool\(\)"),
        ({"advantages": torch.ones(4, dtype=torch.int64)}, r"int64, expected floating point: give advantages\.float\("),
        ({"advantages": torch.ones(2)}, r"one advantage per response give advantages\.repeat_interleave\(cu_seqlens"),
        ({"loss_mask": torch.ones(2, dtype=torch.bool)}, r"loss_mask is \[2\], expected \[T\] like logprobs \[4\]$"),
        ({"loss_mask": torch.ones(4, dtype=torch.bool, device="meta")}, "on meta, logprobs on cpu: give loss_mask.to"),
        ({"cu_seqlens": torch.ones(3, dtype=torch.int64, device="meta")}, "cu_seqlens is on meta, logprobs on cpu"),
        ({"ref_logprobs": torch.ones(4, device="meta")}, "ref_logprobs is on meta"),
    ],
)
def test_wrong_columns_say_what_to_give(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        columns(**changes)
