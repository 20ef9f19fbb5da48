"""Advantages against their slow references, and what is exactly 0; OPO, REINFORCE++ and GDPO weigh with tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core.advantages.groups import (
    group_mean,
    grpo,
    normalize_by_pool,
    positive_part,
    raft,
    raw,
    raw_mixed,
    rloo,
    signed,
    uniform_groups,
)
from megarl.core.advantages.tokens import token_level_kl, token_level_returns
from megarl.core.advantages.weighted import batch_mean, gdpo, grpo_sum, opo, reinforce_pp, reinforce_pp_baseline, whiten
from megarl.core.choices.stopping import POSITIVE
from megarl.core.objectives import OBJECTIVES, advantages_of, select_responses
from megarl.core.sampling.collector import Pool
from megarl.errors import NumericsError

batches = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]), st.integers(-3, 3), st.integers(0, 5)),
    min_size=1,
    max_size=12,
)
BY_LENGTH = [opo, reinforce_pp, reinforce_pp_baseline, batch_mean]


def close(actual: torch.Tensor, expected: Any, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def test_hand_computed():
    rewards, groups = [1.0, 0, 0, 0], [7, 7, 7, 7]
    close(group_mean(rewards, groups), [0.75, -0.25, -0.25, -0.25])
    close(grpo(rewards, groups), [1.499997000006] + [-0.499999000002] * 3)
    close(grpo(rewards, groups, ddof=0), [1.732046807578115] + [-0.5773489358593717] * 3)
    assert grpo([1.0, 0.0], [0, 0], eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    close(rloo(rewards, groups), [1.0] + [-1 / 3] * 3)
    close(positive_part([1.0, 0.9, 0.5, 0, -1], [0] * 5), [1, 0.9, 0.5, 0, 0])
    assert uniform_groups([], []).shape == (0,)
    own = torch.tensor([1.0, 0.0])
    raw(own, [0, 0]).add_(5)
    assert own.tolist() == [1, 0], "a result is not the reward itself"


def test_two_groups_weighed_by_tokens():
    """Group 0 has the rewards 1, 0 on 1 and 3 tokens, group 5 the rewards 3, 1 on 2 and 2."""
    rewards, groups, lengths = [1.0, 0, 3, 1], [0, 0, 5, 5], [1, 3, 2, 2]
    close(opo(rewards, groups, lengths), [0.75, -0.25, 1, -1])  # b = 1/4, 2
    close(batch_mean(rewards, groups, lengths), [-0.25, -1.25, 1.75, -0.25])
    close(batch_mean([1.0, 0, 3, 8], [0, 1, 2, 3], [1, 3, 2, 0]), [-1 / 3, -4 / 3, 5 / 3, 0])  # the last has no tokens
    # 8 tokens: 1, 0 x3, 3 x2, 1 x2; mean 9/8, squares 21 - 81/8 = 87/8, over 7
    close(reinforce_pp(rewards, groups, lengths), (np.array(rewards) - 9 / 8) / math.sqrt(87 / 56 + 1e-8))
    # Both responses have the sum 1, and a step is worth more than a format: grpo of the sum would give 0.
    half = 2 * 0.7071067811865476
    close(grpo_sum([[1.0, 0.0], [0.0, 1.0]], [3.0, 1.0], [0, 0]), [half, -half], atol=1e-5)


def test_signed_and_raft_share_one_rule_for_the_threshold():
    """A reward equal to the threshold is not correct, as in pass rates."""
    rewards = [0.5, 0.4999, 0.5001, -1.0, 2.0]
    assert signed(rewards, [0] * 5, threshold=0.5).tolist() == [-1, -1, 1, -1, 1]
    assert raft(rewards, [0] * 5, threshold=0.5).tolist() == [0, 0, 1, 0, 1]
    assert signed([POSITIVE, 0.71], [0, 0]).tolist() == [-1, 1]


@given(
    rewards=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=8),
    threshold=st.none() | st.floats(-1, 1, width=32),
)
def test_raft_accepts_what_sampling_counts_as_positive(rewards, threshold):
    given_threshold = {} if threshold is None else {"threshold": threshold}
    pool = Pool(0, asked=[len(rewards)], rewards=dict(enumerate(rewards)))
    positives = pool.classes(given_threshold.get("threshold", POSITIVE))[0]
    groups = [0] * len(rewards)
    assert raft(rewards, groups, **given_threshold).sum() == positives
    assert advantages_of(OBJECTIVES["raft_pp"], rewards, groups, **given_threshold).sum() == positives
    chosen = select_responses(replace(OBJECTIVES["raft"], selection="positive"), rewards, groups, **given_threshold)
    assert chosen.sum() == positives


@settings(max_examples=80, deadline=None)
@given(batch=batches, ddof=st.sampled_from([0, 1]), data=st.data())
def test_against_reference(batch, ddof, data):
    rewards, groups, lengths = (list(column) for column in zip(*batch, strict=True))
    close(group_mean(rewards, groups), reference.group_mean(rewards, groups))
    close(grpo(rewards, groups, ddof=ddof), reference.grpo(rewards, groups, ddof=ddof))
    close(rloo(rewards, groups), reference.rloo(rewards, groups))
    close(raw_mixed(rewards, groups), reference.raw_mixed(rewards, groups))
    close(opo(rewards, groups, lengths), reference.opo(rewards, groups, lengths))
    # Where all is nearly equal, 1 / sqrt(1e-8) makes 1e4 of the last digit.
    close(reinforce_pp(rewards, groups, lengths), reference.whiten(rewards, lengths), atol=1e-8)
    live = np.array(lengths) > 0
    kept = np.array(rewards)[live]
    close(batch_mean(rewards, groups, lengths)[live], kept - (kept.mean() if len(kept) else 0))
    centered = group_mean(rewards, groups).tolist()
    close(reinforce_pp_baseline(rewards, groups, lengths), reference.whiten(centered, lengths), atol=1e-8)
    second = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(batch), max_size=len(batch)))
    pairs, weights = list(zip(rewards, second, strict=True)), [0.5, -2.0]
    summed = grpo_sum(pairs, weights, groups, ddof, 1e-3)
    close(summed, reference.grpo_sum(pairs, weights, groups, ddof, 1e-3))
    close(gdpo(pairs, weights, groups, lengths, ddof, 1e-3), reference.whiten(summed.tolist(), lengths), atol=1e-8)
    summed = grpo_sum(pairs, weights, groups)
    close(summed, reference.grpo_sum(pairs, weights, groups, 1, 1e-6))
    close(gdpo(pairs, weights, groups, lengths), reference.whiten(summed.tolist(), lengths), atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(reward=st.floats(-1e3, 1e3), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9))
@pytest.mark.parametrize("function", [group_mean, grpo, rloo, raw_mixed, *BY_LENGTH])
def test_no_contrast_is_exactly_zero(function, reward, lengths):
    """The mean of equal floats is rarely the float itself; the advantage must be 0 all the same."""
    size = len(lengths)
    rewards, groups, given_lengths = [reward] * size, [4] * size, (lengths,)
    if function not in (reinforce_pp, reinforce_pp_baseline, batch_mean):  # another group does not matter
        rewards, groups, given_lengths = [*rewards, 0.0, 1.0], [*groups, 9, 9], ([*lengths, 1, 1],)
    values = function(rewards, groups, *(given_lengths if function in BY_LENGTH else ()))
    if function is not raw_mixed or size > 1:
        assert values[:size].tolist() == [0.0] * size
    assert len(values) == size or values[-1] > 0
    assert uniform_groups([*[reward] * size, 0.0, 1.0], [*[4] * size, 9, 9]).tolist() == [True, False]


def test_a_response_without_tokens_is_in_no_statistics() -> None:
    assert opo([1.0, 0.0, 50.0], [0, 0, 0], [1, 1, 0]).tolist() == [0.5, -0.5, 0]
    assert opo([1.0, 50.0], [0, 0], [3, 0]).tolist() == [0, 0]
    assert opo([1.0], [0], [0]).tolist() == [0]
    close(whiten(torch.tensor([1.0, 0.0, 50.0]), [1, 1, 0]), [0.5**0.5, -(0.5**0.5), 0], atol=1e-6)
    assert whiten(torch.tensor([1.0, 50.0]), [1, 0]).tolist() == [0, 0]  # a single token
    assert whiten(torch.tensor([1.0, 0.0]), [0, 0]).tolist() == [0, 0]
    # The eps is added to the variance, here 2e-8.
    close(whiten(torch.tensor([1e-4, -1e-4], dtype=torch.float64), [1, 1]), [1e-4 / 3e-8**0.5, -1e-4 / 3e-8**0.5])


def test_dtypes_and_shapes():
    groups = torch.tensor([0, 0])
    assert group_mean(torch.tensor([1, 0]), groups).dtype == torch.float64
    assert group_mean(np.array([1.0, 0.0]), np.array([0, 0])).dtype == torch.float64
    for function, lengths in ((group_mean, ()), *((each, ([1, 2],)) for each in BY_LENGTH)):
        assert function(torch.tensor([1.0, 0.0]), groups, *lengths).dtype == torch.float32
        assert function([1.0, 0.0], groups, *map(np.array, lengths)).dtype == torch.float64
        assert function([], [], *([] for _ in lengths)).shape == (0,)


POOL = ([1.0, 1.0] + [0.0] * 30, [5] * 32)


def packed(kl, beta=0.3):
    """Columns of responses with the given log pi_theta / pi_ref, all tokens with loss."""
    logs = torch.tensor([x for row in kl for x in row], dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *(len(row) for row in kl)]).cumsum(0)
    return {
        "logprobs": logs - 4,
        "ref_logprobs": torch.full_like(logs, -4.0),
        "loss_mask": torch.ones_like(logs, dtype=torch.bool),
        "cu_seqlens": cu_seqlens,
        "beta": beta,
    }


KL, REWARDS = ((0.1, -0.2, 0.3), (0.4, 0.2), (0.0, 0.3, 0.3)), (1.0, 0.0, 1.0)


def of_kl(at: int, value: float) -> dict[str, Any]:
    columns = packed(KL)
    columns["ref_logprobs"][at] = value
    return columns


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_mean([1.0, 0.0], [0]), r"must both be \[N\]"),
        (lambda: grpo([1.0, 0.0], [0, 0], ddof=2), "ddof"),
        (lambda: gdpo([[1.0], [0.0]], [1.0], [0, 0], [1, 1], ddof=2), "ddof=2"),
        *(
            (lambda lengths=lengths: opo([1.0, 0.0], [0, 0], lengths), "expected 2 numbers of loss tokens, 0 or more")
            for lengths in ([1], [1, -1], [[1, 1]], [1, math.nan])
        ),
        (lambda: whiten(torch.tensor([1.0, 0.0]), [1, -1]), "expected 2 numbers of loss tokens"),
        *(
            (lambda given=given: grpo_sum(*given, [0, 0]), r"expected \[N, M\] and \[M\] with M >= 1")
            for given in (([1.0, 0.0], [1.0]), ([[1.0], [0.0]], [1.0, 1.0]), ([[], []], []))
        ),
        (
            lambda: normalize_by_pool([1.0, 0.0], [0, 1], [1.0, 0.0, 1.0], [0, 0, 2]),
            r"groups \[0, 1\] train, expected all of them in the pool, \[0, 2\]",
        ),
        (lambda: normalize_by_pool([1.0], [6], *POOL), r"\[6\] train, expected all of them in the pool, \[5\]"),
        (lambda: normalize_by_pool([1.0, -1.0], [0, 1], [1.0, -1.0], [0, 1], scale="rate"), "credit.scale: found"),
        (lambda: token_level_returns([1.0, 0.0], **packed(KL)), "2 rewards for 3 sequences"),
        (lambda: token_level_returns(REWARDS, **packed(KL), horizon=0), "horizon 0"),
        (
            lambda: token_level_returns(REWARDS, **{**packed(KL), "ref_logprobs": torch.zeros(3)}),
            r"must all be \[T\]",
        ),
        (lambda: token_level_kl(REWARDS, [0, 0, 0], **packed(KL), ddof=2), "ddof=2"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda value=value: group_mean([0.0, 1.0, value], [3, 3, 5]), r"response 2 \(group 5\)")
            for value in (math.nan, math.inf, -math.inf)
        ),
        (lambda: reinforce_pp([1.0, math.nan], [0, 0], [1, 1]), "response 1"),
        (lambda: grpo_sum([[1.0, math.inf], [0.0, 0.0]], [1.0, 1.0], [0, 0]), "response 0"),
        (lambda: token_level_kl(REWARDS, [0, 0, 0], **of_kl(4, math.nan)), "ref_logprobs is nan at token 4"),
        (lambda: token_level_kl(REWARDS, [0, 0, 0], **of_kl(4, 2.5)), r"ref_logprobs is 2.5 at token 4 .*raw logits"),
    ],
)
def test_numbers_that_are_none(call, message):
    with pytest.raises(NumericsError, match=message):
        call()


class TestPooled:
    def test_pools_of_several_prompts(self):
        pool = ([1.0, 0.0, 0.0, 0.0, 2.0, 4.0], [3, 3, 3, 3, -1, -1])
        close(normalize_by_pool([4.0, 1.0, 2.0], [-1, 3, -1], *pool), [1, 0.75, -1])
        # mean 1/2, unbiased standard deviation sqrt(1/2)
        close(normalize_by_pool([1.0, 0.0], [0, 0], [1.0, 0.0], [0, 0], scale="std"), [0.5**0.5, -(0.5**0.5)])

    @pytest.mark.parametrize(
        ("scale", "right", "wrong"),
        [
            ("std", 0.9375 / 0.24593468841898236, -0.0625 / 0.24593468841898236),
            ("rate", 15, -1),
            ("root_rate", 3.75, -0.25),
        ],
    )
    def test_two_of_32(self, scale, right, wrong):
        close(normalize_by_pool([1.0, 0.0], [5, 5], *POOL, scale=scale), [right, wrong])

    @pytest.mark.parametrize("scale", ["none", "std", "rate", "root_rate"])
    @pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
    def test_no_contrast_is_exactly_zero(self, scale, reward):
        pool = ([reward] * 7 + [0.3], [0] * 7 + [1])
        assert normalize_by_pool([reward, reward, 0.3], [0, 0, 1], *pool, scale=scale).tolist() == [0, 0, 0]

    def test_a_rate_of_zero_has_an_epsilon(self):
        """With an epsilon a pool of no correct response still has none to learn from; any other is damped."""
        assert normalize_by_pool([0.0], [1], [0.0, 0.0], [1, 1], scale="root_rate", rate_eps=0.01).tolist() == [0]
        close(normalize_by_pool([1.0], [5], *POOL, scale="rate", rate_eps=0.0625), [7.5])


class TestTokenLevelKl:
    def test_returns(self):
        own = token_level_returns(REWARDS, **packed(KL))
        close(own, [0.98, 0.99, 0.97, -0.09, -0.03, 0.94, 0.94, 0.97])
        constant = token_level_returns(REWARDS, **packed(KL), horizon=3)
        close(constant, [0.98, 0.99, 0.97, -0.06, -0.02, 0.94, 0.94, 0.97])

    @settings(max_examples=60, deadline=None)
    @given(
        kl=st.lists(st.lists(st.floats(-2, 2), max_size=4), min_size=1, max_size=6),
        data=st.data(),
        ddof=st.sampled_from([0, 1]),
        horizon=st.sampled_from([None, 5]),
    )
    def test_against_reference(self, kl, data, ddof, horizon):
        groups = data.draw(st.lists(st.integers(-1, 1), min_size=len(kl), max_size=len(kl)))
        rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(kl), max_size=len(kl)))
        fast = token_level_kl(rewards, groups, **packed(kl), ddof=ddof, eps=1e-2, horizon=horizon)
        slow = reference.token_level_kl(rewards, groups, kl, 0.3, ddof, 1e-2, horizon)
        close(fast, [x for row in slow for x in row])

    def test_environment_tokens_shift_nothing(self):
        columns = packed(KL)
        plain = token_level_kl(REWARDS, [0, 0, 0], **columns)
        close(plain[[0, 3, 5]], [0.7471048964659939, -1.413441696016745, 0.6663367995507514])
        assert plain[[2, 7]].tolist() == [0, 0], "only two responses reach j = 3, with equal returns"
        where = [0, 1, 3, 4, 6, 8, 9, 10]  # holes at 2, 5, 7 and 11, full of garbage
        wide = {name: torch.full((12,), math.nan, dtype=torch.float64) for name in ("logprobs", "ref_logprobs")}
        for name, column in wide.items():
            column[where] = columns[name]
        mask = torch.zeros(12, dtype=torch.bool)
        mask[where] = True
        bounds = torch.tensor([0, 4, 8, 12])
        values = token_level_kl(REWARDS, [0, 0, 0], **wide, loss_mask=mask, cu_seqlens=bounds, beta=0.3)
        close(values[where], plain.tolist())
        assert (values[~mask] == 0).all()

    @pytest.mark.parametrize(
        ("rewards", "groups", "kl"),
        [([1.0], [0], [[0.3, 0.1]]), ([0.7] * 3, [0] * 3, [[0.1, 0.2]] * 3), ([1.0, 0.0], [0, 1], [[0.1], [0.2]])],
    )
    def test_no_contrast_is_exactly_zero(self, rewards, groups, kl):
        assert (token_level_kl(rewards, groups, **packed(kl)) == 0).all()

    def test_empty_responses_and_impossible_tokens(self):
        columns = packed([[0.1, 0.2], [], [0.3, 0.4]])
        columns["logprobs"][1] = -math.inf
        columns["ref_logprobs"][3] = -math.inf
        values = token_level_returns([1.0, 1.0, 0.0], **columns)
        # The impossible token is no token; a reference of probability 0 stops at the bound of 20.
        close(values, [1 - 0.3 * 0.1, 0.0, -0.15 * 20.3, -0.15 * 20])
        assert torch.isfinite(token_level_kl([1.0, 1.0, 0.0], [0, 0, 0], **columns)).all()

    def test_an_eps_of_0_and_a_beta_of_0_are_allowed(self):
        columns = torch.full((2,), -1.0), torch.full((2,), -2.0), torch.tensor([True, True]), torch.tensor([0, 1, 2])
        values = token_level_kl([1.0, 0.0], [0, 0], *columns, beta=0.0, eps=0.0, horizon=1)
        assert values.tolist() == pytest.approx([1.0, -1.0])
        assert token_level_returns([1.0, 0.0], *columns, beta=0.5, horizon=1).tolist() == [0.5, -0.5]
