"""Which advantage an objective names, and which responses train: by lengths, components and validity."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core import advantages
from megarl.core.choices.parts import TOKEN_ADVANTAGES, Objective
from megarl.core.objectives import OBJECTIVES, advantages_of, select_responses, token_advantages
from megarl.errors import ConfigError, NumericsError

GROUPS = [7, 7, 7, 7, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.8, 0.0, 0.5, 0.5, 0.5]
LENGTHS = [2, 4, 6, 8, 3, 1, 5]
PAIRS = np.array([[1, 0], [0, 0], [0.3, 0.5], [0, 0], [0.5, 0], [0, 0.5], [0.25, 0.25]])
WEIGHTS = [1.0, 1.0]
GIVEN: dict[str, Any] = {"lengths": LENGTHS, "components": (PAIRS, WEIGHTS)}
WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gdpo")


def objective(advantage: Any, **parts: Any) -> Objective:
    return replace(OBJECTIVES["reinforce"], advantage=advantage, **parts)


EXPECTED = {
    "group_mean": advantages.group_mean(REWARDS, GROUPS),
    "grpo": advantages.grpo(REWARDS, GROUPS, 0, 0.01),
    "rloo": advantages.rloo(REWARDS, GROUPS),
    "raw": torch.tensor(REWARDS),
    "raw_mixed": torch.tensor([1.0, 0.0, 0.8, 0.0, 0.0, 0.0, 0.0]),
    "positive_part": torch.tensor(REWARDS),
    "raft": torch.tensor([1.0, 0, 1, 0, 1, 1, 1]),
    "signed": torch.tensor([1.0, -1, 1, -1, 1, 1, 1]),
    "opo": advantages.opo(REWARDS, GROUPS, LENGTHS),
    "reinforce_pp": advantages.reinforce_pp(REWARDS, GROUPS, LENGTHS),
    "reinforce_pp_baseline": advantages.reinforce_pp_baseline(REWARDS, GROUPS, LENGTHS),
    "gdpo": advantages.gdpo(PAIRS, WEIGHTS, GROUPS, LENGTHS, 0, 0.01),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_name_is_its_function(name: str) -> None:
    found = advantages_of(objective(name, std_ddof=0, std_eps=0.01), REWARDS, GROUPS, 0.4, **GIVEN)
    np.testing.assert_allclose(found, EXPECTED[name], rtol=0, atol=1e-6)


def test_every_advantage_of_the_record_has_an_expectation() -> None:
    from typing import get_args

    from megarl.core.choices.parts import AdvantageName

    assert {*EXPECTED, *TOKEN_ADVANTAGES} == set(get_args(AdvantageName))


def test_what_is_needed_and_not_given_is_refused() -> None:
    for name in ("opo", "reinforce_pp", "reinforce_pp_baseline", "gdpo"):
        with pytest.raises(ConfigError, match=f"'{name}' needs the lengths"):
            advantages_of(objective(name), REWARDS, GROUPS, components=(PAIRS, WEIGHTS))
    with pytest.raises(ConfigError, match=r"'gdpo' needs several rewards.*reward\.weights"):
        advantages_of(objective("gdpo"), REWARDS, GROUPS, lengths=LENGTHS)
    with pytest.raises(ConfigError, match="differs between the tokens"):
        advantages_of(objective("process"), REWARDS, GROUPS, **GIVEN)


@pytest.mark.parametrize("name", [*EXPECTED, lambda rewards, groups: rewards - rewards.mean()])
@settings(max_examples=15, deadline=None)
@given(valid=st.lists(st.booleans(), min_size=7, max_size=7), as_tensors=st.booleans())
def test_a_response_that_is_not_valid_is_in_no_statistics(name: Any, valid: list[bool], as_tensors: bool) -> None:
    """The same as if it had not been drawn, whatever its reward is; it gets 0 and does not train."""
    keep = np.array(valid)
    garbage = [reward if known else math.nan for reward, known in zip(REWARDS, valid, strict=True)]
    several: dict[str, Any] = {"lengths": np.array(LENGTHS)[keep], "components": (PAIRS[keep], WEIGHTS)}
    rewards: Any = torch.tensor(garbage, dtype=torch.float64) if as_tensors else garbage
    groups: Any = torch.tensor(GROUPS) if as_tensors else GROUPS
    if not keep.any() and callable(name):
        return  # a function of the user is not asked about nothing
    for selection in ("all", "mixed_groups", "positive"):
        o = objective(name, selection=selection)
        given_rewards, given_groups = np.array(REWARDS)[keep], np.array(GROUPS)[keep]
        found = advantages_of(o, rewards, groups, 0.4, **GIVEN, valid=valid)
        alone = advantages_of(o, given_rewards, given_groups, 0.4, **several)
        np.testing.assert_allclose(found[torch.from_numpy(keep)], alone, rtol=0, atol=1e-12)
        assert (found[torch.from_numpy(~keep)] == 0).all()
        trains = select_responses(o, rewards, groups, 0.4, **GIVEN, valid=valid)
        assert trains.dtype == torch.bool
        some = select_responses(o, given_rewards, given_groups, 0.4, **several)
        assert trains[torch.from_numpy(keep)].tolist() == some.tolist()
        assert not trains[torch.from_numpy(~keep)].any()


def test_rloo_of_aborted_responses() -> None:
    found = advantages_of(OBJECTIVES["rloo"], [1.0, 0, 0, math.nan], [0] * 4, valid=[True, True, True, False])
    assert found.tolist() == [1, -0.5, -0.5, 0]
    with pytest.raises(NumericsError, match="response 3"):
        advantages_of(OBJECTIVES["rloo"], [1.0, 0, 0, math.nan], [0] * 4)


@pytest.mark.parametrize("name", WHITENED)
def test_groups_that_leave_the_denominators_leave_the_statistics(name: str) -> None:
    """The last three responses do not train with mixed_groups: the tokens of the others have mean 0."""
    found = advantages_of(objective(name, selection="mixed_groups"), REWARDS, GROUPS, **GIVEN)
    assert float((found * torch.tensor(LENGTHS)).sum()) == pytest.approx(0, abs=1e-9)
    assert found[4:].tolist() == [0, 0, 0]
    everything = advantages_of(objective(name), REWARDS, GROUPS, **GIVEN)
    assert not torch.allclose(found[:4], everything[:4])


def test_positive_selection_looks_at_the_advantage() -> None:
    for name in ("opo", "reinforce_pp", "gdpo", "signed", "raw", "positive_part"):
        o = objective(name, selection="positive")
        found = advantages_of(o, REWARDS, GROUPS, 0.4, **GIVEN)
        assert select_responses(o, REWARDS, GROUPS, 0.4, **GIVEN).tolist() == (found > 0).tolist()
    signed = objective("signed", selection="positive")
    assert select_responses(signed, REWARDS, GROUPS, 0.9).tolist() == [True] + [False] * 6
    assert select_responses(signed, REWARDS, GROUPS, 0.4).sum() == 5


@pytest.mark.parametrize("name", ["opo", "gdpo", "signed"])
def test_per_token_they_count_loss_tokens(name: str) -> None:
    """Sequences of 3 and 4 tokens, of which 2 and 1 have loss."""
    mask = torch.tensor([False, True, True, False, True, False, False])
    none = torch.zeros(7)
    pairs = ([[1.0, 0.0], [0.0, 1.0]], [2.0, 1.0])
    found = token_advantages(
        objective(name),
        [1.0, 0.3],
        [0, 0],
        logprobs=none,
        ref_logprobs=None,
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, 3, 7]),
        threshold=0.5,
        components=pairs,
    )
    of_response = advantages_of(objective(name), [1.0, 0.3], [0, 0], 0.5, lengths=[2, 1], components=pairs)
    assert found.tolist() == [of_response[0]] * 3 + [of_response[1]] * 4
    assert of_response[0] > 0 > of_response[1]


def test_a_dead_group_of_raw_mixed_keeps_its_place_in_the_denominators() -> None:
    assert select_responses(objective("raw_mixed"), REWARDS, GROUPS).all()
    assert advantages_of(objective("raw_mixed"), REWARDS, GROUPS)[4:].tolist() == [0, 0, 0]
