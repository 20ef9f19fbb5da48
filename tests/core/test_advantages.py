from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference

from megarl.core.advantages import (
    group_mean,
    grpo,
    normalize_by_pool,
    positive_part,
    raft,
    raw,
    raw_mixed,
    rloo,
    signed,
    token_level_kl,
    token_level_returns,
    uniform_groups,
)
from megarl.core.choices.stopping import POSITIVE
from megarl.core.objectives import OBJECTIVES, advantages_of, select_responses
from megarl.core.sampling.collector import Pool
from megarl.errors import NumericsError

batches = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5]), st.integers(-3, 3)), min_size=1, max_size=12)


def close(actual: torch.Tensor, expected: list[float]) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)


def test_hand_computed():
    rewards, groups = [1.0, 0, 0, 0], [7, 7, 7, 7]
    close(group_mean(rewards, groups), [0.75, -0.25, -0.25, -0.25])
    close(grpo(rewards, groups), [1.499997000006] + [-0.499999000002] * 3)
    close(grpo(rewards, groups, ddof=0), [1.732046807578115] + [-0.5773489358593717] * 3)
    close(rloo(rewards, groups), [1.0] + [-1 / 3] * 3)
    close(raft(rewards, groups), [1, 0, 0, 0])
    mixed, one_group = [1.0, 0, 0, 1], [7, 7, 7, 7]
    close(raw(mixed, one_group), mixed)
    close(raw_mixed(mixed, one_group), mixed)
    close(signed(mixed, one_group), [1, -1, -1, 1])
    close(positive_part([1.0, 0.9, 0.5, 0, -1], [0] * 5), [1, 0.9, 0.5, 0, 0])


def test_raw_mixed_rejects_uniform_groups_of_several():
    """Five groups: uniform right, mixed, one alone, uniform wrong, and equal rewards whose mean is rounded."""
    rewards, groups = [0.7, 0.7, 1, -0.5, 0.3, 0, 0, 0.1, 0.1, 0.1], [4, 4, -1, -1, 9, 5, 5, 6, 6, 6]
    assert raw_mixed(rewards, groups).tolist() == [0, 0, 1, -0.5, 0.3, 0, 0, 0, 0, 0]
    assert raw(rewards, groups).tolist() == rewards


def test_signed_and_raft_share_one_rule_for_the_threshold():
    """A reward equal to the threshold is not correct, as in pass rates."""
    rewards = [0.5, 0.4999, 0.5001, -1.0, 2.0]
    assert signed(rewards, [0] * 5, threshold=0.5).tolist() == [-1, -1, 1, -1, 1]
    assert raft(rewards, [0] * 5, threshold=0.5).tolist() == [0, 0, 1, 0, 1]
    assert signed([POSITIVE, 0.71], [0, 0]).tolist() == [-1, 1]


def test_rloo_counts_valid_responses_alone():
    """[1, 0, 0, x]: G is 3, not 4; the reward of an invalid response may be anything."""
    rewards, groups = torch.tensor([1.0, 0, 0, math.nan], dtype=torch.float64), [7] * 4
    assert rloo(rewards, groups, valid=[True, True, True, False]).tolist() == [1, -0.5, -0.5, 0]
    assert rloo([3.0, 0.0, 1.0], [0, 0, 1], valid=[True, False, True]).tolist() == [0, 0, 0]
    assert rloo([1.0, 0.0], [0, 0], valid=[False, False]).tolist() == [0, 0]
    assert rloo([1.0, 0.0], [0, 0], valid=[1, 1]).tolist() == rloo([1.0, 0.0], [0, 0]).tolist() == [1, -1]


def test_a_result_is_not_the_reward_itself():
    rewards = torch.tensor([1.0, 0.0])
    raw(rewards, [0, 0]).add_(5)
    assert rewards.tolist() == [1, 0]


@settings(max_examples=60, deadline=None)
@given(batch=batches, ddof=st.sampled_from([0, 1]))
def test_against_reference(batch, ddof):
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    close(group_mean(rewards, groups), reference.group_mean(rewards, groups))
    close(grpo(rewards, groups, ddof=ddof), reference.grpo(rewards, groups, ddof=ddof))
    close(rloo(rewards, groups), reference.rloo(rewards, groups))
    close(raw_mixed(rewards, groups), reference.raw_mixed(rewards, groups))


@settings(max_examples=60, deadline=None)
@given(reward=st.floats(-1e3, 1e3), size=st.integers(1, 9), function=st.sampled_from([group_mean, grpo, rloo]))
def test_no_contrast_is_exactly_zero(reward, size, function):
    """The mean of equal floats is rarely the float itself; the advantage must be 0 all the same."""
    rewards = [reward] * size + [0.0, 1.0]
    groups = [4] * size + [9, 9]
    values = function(rewards, groups)
    assert values[:size].tolist() == [0.0] * size
    assert values[-1] > 0
    assert uniform_groups(rewards, groups).tolist() == [True, False]


def test_raft_accepts_all_of_a_solved_group_and_none_of_an_unsolved_one():
    assert raft([1.0, 1.0, 0.0, 0.0, 0.7], [0, 0, 1, 1, 2]).tolist() == [1, 1, 0, 0, 0]


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
    for name in ("raft", "raft_pp"):
        assert advantages_of(OBJECTIVES[name], rewards, groups, **given_threshold).sum() == positives
    chosen = select_responses(replace(OBJECTIVES["raft"], selection="positive"), rewards, groups, **given_threshold)
    assert chosen.sum() == positives


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_its_response(value):
    with pytest.raises(NumericsError, match=r"response 2 \(group 5\)"):
        group_mean([0.0, 1.0, value], [3, 3, 5])


def test_dtypes_and_shapes():
    groups = torch.tensor([0, 0])
    assert group_mean(torch.tensor([1, 0]), groups).dtype == torch.float64
    assert group_mean(torch.tensor([1.0, 0.0]), groups).dtype == torch.float32
    assert group_mean(np.array([1.0, 0.0]), np.array([0, 0])).dtype == torch.float64
    assert group_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    with pytest.raises(ValueError, match=r"must both be \[N\]"):
        group_mean([1.0, 0.0], [0])
    with pytest.raises(ValueError, match="ddof"):
        grpo([1.0, 0.0], [0, 0], ddof=2)


class TestPooled:
    POOL = ([1.0, 1.0] + [0.0] * 30, [5] * 32)

    @pytest.mark.parametrize(
        ("scale", "good", "bad"),
        [
            ("none", 0.9375, -0.0625),
            ("std", 0.9375 / 0.24593468841898236, -0.0625 / 0.24593468841898236),
            ("rate", 15, -1),
            ("root_rate", 3.75, -0.25),
        ],
    )
    def test_statistics_of_all_that_was_sampled(self, scale, good, bad):
        """2 of 32 are correct, and 2 + 2 of them train: their own statistics would give +-0.5."""
        close(normalize_by_pool([1.0, 0.0, 1.0, 0.0], [5] * 4, *self.POOL, scale=scale), [good, bad, good, bad])

    def test_pools_of_several_prompts(self):
        pool = ([1.0, 0.0, 0.0, 0.0, 2.0, 4.0], [3, 3, 3, 3, -1, -1])
        close(normalize_by_pool([4.0, 1.0, 2.0], [-1, 3, -1], *pool), [1, 0.75, -1])

    @pytest.mark.parametrize("scale", ["none", "std", "rate", "root_rate"])
    @pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
    def test_no_contrast_is_exactly_zero(self, scale, reward):
        pool = ([reward] * 7 + [0.3], [0] * 7 + [1])
        assert normalize_by_pool([reward, reward, 0.3], [0, 0, 1], *pool, scale=scale).tolist() == [0, 0, 0]

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"\[6\] train, but the pool holds \[5\]"):
            normalize_by_pool([1.0], [6], *self.POOL)
        with pytest.raises(ValueError, match="pass rates"):
            normalize_by_pool([1.0], [0], [1.0, -5.0], [0, 0], scale="rate")

    def test_a_rate_of_zero_has_an_epsilon(self):
        """With an epsilon a pool of no correct response still has none to learn from; any other is damped."""
        assert normalize_by_pool([0.0], [1], [0.0, 0.0], [1, 1], scale="root_rate", rate_eps=0.01).tolist() == [0]
        close(normalize_by_pool([1.0], [5], *self.POOL, scale="rate", rate_eps=0.0625), [7.5])
        close(normalize_by_pool([1.0], [5], *self.POOL, scale="root_rate", rate_eps=0.1875), [1.875])


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


class TestTokenLevelKl:
    KL = ((0.1, -0.2, 0.3), (0.4, 0.2), (0.0, 0.3, 0.3))
    REWARDS = (1.0, 0.0, 1.0)

    def test_returns(self):
        own = token_level_returns(self.REWARDS, **packed(self.KL))
        close(own, [0.98, 0.99, 0.97, -0.09, -0.03, 0.94, 0.94, 0.97])
        constant = token_level_returns(self.REWARDS, **packed(self.KL), horizon=3)
        close(constant, [0.98, 0.99, 0.97, -0.06, -0.02, 0.94, 0.94, 0.97])

    def test_standardised_per_position(self):
        values = token_level_kl(self.REWARDS, [4, 4, 4], **packed(self.KL))
        close(values[[0, 3, 5]], [0.7471048964659939, -1.413441696016745, 0.6663367995507514])
        # Only two responses reach j = 3, with equal returns.
        assert values[[2, 7]].tolist() == [0, 0]

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
        columns = packed(self.KL)
        plain = token_level_kl(self.REWARDS, [0, 0, 0], **columns)
        where = [0, 1, 3, 4, 6, 8, 9, 10]  # holes at 2, 5, 7 and 11, full of garbage
        wide = {name: torch.full((12,), math.nan, dtype=torch.float64) for name in ("logprobs", "ref_logprobs")}
        for name, column in wide.items():
            column[where] = columns[name]
        mask = torch.zeros(12, dtype=torch.bool)
        mask[where] = True
        # Sequences: tokens 0-3, 4-7, 8-11.
        values = token_level_kl(
            self.REWARDS, [0, 0, 0], **wide, loss_mask=mask, cu_seqlens=torch.tensor([0, 4, 8, 12]), beta=0.3
        )
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

    def test_refusals(self):
        columns = packed(self.KL)
        columns["ref_logprobs"][4] = math.nan
        with pytest.raises(NumericsError, match="ref_logprobs is nan at token 4"):
            token_level_kl(self.REWARDS, [0, 0, 0], **columns)
        columns["ref_logprobs"][4] = 2.5
        with pytest.raises(NumericsError, match=r"ref_logprobs is 2.5 at token 4 .*raw logits"):
            token_level_kl(self.REWARDS, [0, 0, 0], **columns)
        with pytest.raises(ValueError, match="2 rewards for 3 sequences"):
            token_level_returns([1.0, 0.0], **packed(self.KL))
        with pytest.raises(ValueError, match="horizon 0"):
            token_level_returns(self.REWARDS, **packed(self.KL), horizon=0)
        with pytest.raises(ValueError, match=r"must all be \[T\]"):
            token_level_returns(self.REWARDS, **{**packed(self.KL), "ref_logprobs": torch.zeros(3)})
        with pytest.raises(ValueError, match="ddof=2"):
            token_level_kl(self.REWARDS, [0, 0, 0], **packed(self.KL), ddof=2)


class TestBounds:
    def test_an_eps_of_0_and_a_beta_of_0_are_allowed(self):
        assert grpo([1.0, 0.0], [0, 0], eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
        columns = torch.full((2,), -1.0), torch.full((2,), -2.0), torch.tensor([True, True]), torch.tensor([0, 1, 2])
        values = token_level_kl([1.0, 0.0], [0, 0], *columns, beta=0.0, eps=0.0, horizon=1)
        assert values.tolist() == pytest.approx([1.0, -1.0])
        assert token_level_returns([1.0, 0.0], *columns, beta=0.5, horizon=1).tolist() == [0.5, -0.5]
        with pytest.raises(ValueError, match="horizon 0"):
            token_level_returns([1.0, 0.0], *columns, beta=0.5, horizon=0)

    def test_a_pool_of_two(self):
        """mean 1/2, unbiased standard deviation sqrt(1/2)."""
        values = normalize_by_pool([1.0, 0.0], [0, 0], [1.0, 0.0], [0, 0], scale="std")
        assert values.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])

    def test_one_group_or_pool_that_is_wrong_is_enough(self):
        with pytest.raises(ValueError, match=r"groups \[0, 1\] train, but the pool holds \[0, 2\]"):
            normalize_by_pool([1.0, 0.0], [0, 1], [1.0, 0.0, 1.0], [0, 0, 2])
        with pytest.raises(ValueError, match="needs pass rates"):
            normalize_by_pool([1.0, -1.0], [0, 1], [1.0, -1.0], [0, 1], scale="rate")

    def test_no_response_is_no_group(self):
        assert uniform_groups([], []).shape == (0,)
