"""The factors of a coefficient at their bounds, by hand: which side a bound belongs to, and what it must not touch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megarl.core.metrics import finalize
from megarl.core.objectives import (
    OBJECTIVES,
    Denominators,
    Objective,
    TokenColumns,
    coefficients,
    mini_batch_power,
    policy_loss,
    select_responses,
)
from megarl.core.objectives.columns import prepare
from megarl.core.objectives.weights import adaptive_power, find_trusted, importance_weight, kl_penalty
from megarl.core.ratios import log_ratio
from megarl.errors import NumericsError

PLAIN = Objective("group_mean", "none", "none", "token-mean")
"""Weight 1, no mask: a coefficient is A / T."""


def columns_of(theta, old=0.0, mu=0.0, advantages=1.0, mask=None, cu_seqlens=None, ref=None) -> TokenColumns:
    """Columns of log-probabilities, all moved down by 30 so that each is one; numbers stand for all tokens."""

    def column(values, shift=-30.0):
        values = values if isinstance(values, (list, tuple)) else [values] * len(theta)
        return torch.tensor(values, dtype=torch.float64) + shift

    return TokenColumns(
        column(theta),
        column(old),
        column(mu),
        column(advantages, 0.0),
        torch.tensor([True] * len(theta) if mask is None else mask),
        torch.tensor([0, len(theta)] if cu_seqlens is None else cu_seqlens),
        None if ref is None else column(ref),
    )


def weights_of(objective: Objective, columns: TokenColumns) -> list[float]:
    return importance_weight(objective, prepare(columns))[0].tolist()


def trust_of(objective: Objective, columns: TokenColumns) -> tuple[list[bool], dict[str, float]]:
    state = prepare(columns)
    inside, metrics = find_trusted(objective, state, log_ratio(state.logprobs, state.old_logprobs, state.keep))
    return inside.tolist(), finalize(metrics)


def replaced(**changes) -> Objective:
    return dataclasses.replace(PLAIN, **changes)


class TestWindow:
    """Ratios that are exact in binary: log-ratios are 0 at the linear bound, or the bound itself in a "log" window."""

    def test_a_ratio_at_a_linear_bound_trains(self):
        objective = replaced(mask="ppo", eps_low=0.0, eps_high=0.0)
        inside, metrics = trust_of(objective, columns_of([0.0, 0.0], advantages=[1.0, -1.0]))
        assert inside == [True, True]
        assert (metrics["clip/high"], metrics["clip/low"]) == (0, 0)

    def test_just_outside_a_linear_bound_does_not(self):
        objective = replaced(mask="ppo", eps_low=0.2, eps_high=0.3)
        logs = [math.log(1.3) + d for d in (-1e-9, 1e-9)] + [math.log(0.8) + d for d in (1e-9, -1e-9)]
        inside, metrics = trust_of(objective, columns_of(logs, advantages=[1, 1, -1, -1]))
        assert inside == [True, False, True, False]
        assert (metrics["clip/high"], metrics["clip/low"]) == (0.25, 0.25)

    @pytest.mark.parametrize(("sign", "bound"), [(1.0, 0.5), (-1.0, -0.25)])
    def test_a_ratio_at_a_log_bound_trains(self, sign, bound):
        objective = replaced(mask="ppo", window="log", eps_low=0.25, eps_high=0.5)
        logs = [bound, bound + sign * 2**-20]
        assert trust_of(objective, columns_of(logs, advantages=sign))[0] == [True, False]

    def test_a_log_window_widens_with_the_position(self):
        """Bounds eps * t: 0.5, 1, 1.5 above and 0.25, 0.5, 0.75 below, at the bound and beyond it."""
        objective = replaced(mask="ppo", window="log", window_power=1.0, eps_low=0.25, eps_high=0.5)
        assert trust_of(objective, columns_of([0.5, 1.0, 1.5]))[0] == [True] * 3
        assert trust_of(objective, columns_of([0.5625, 1.0625, 1.5625]))[0] == [False] * 3
        assert trust_of(objective, columns_of([-0.25, -0.5, -0.75], advantages=-1.0))[0] == [True] * 3
        assert trust_of(objective, columns_of([-0.3125, -0.5625, -0.8125], advantages=-1.0))[0] == [False] * 3

    def test_the_mask_asks_for_the_sign_of_the_advantage(self):
        objective = replaced(mask="ppo")
        for log, advantage in ((1.0, -0.5), (1.0, 0.0), (-1.0, 0.5), (-1.0, 0.0)):
            inside, metrics = trust_of(objective, columns_of([log], advantages=advantage))
            assert inside == [True]
            assert metrics == {"clip/high": 0.0, "clip/low": 0.0}

    def test_small_advantages_count_as_well(self):
        objective = replaced(mask="ppo")
        assert trust_of(objective, columns_of([1.0, -1.0], advantages=[0.25, -0.25]))[0] == [False, False]

    def test_tokens_without_loss_are_not_counted(self):
        objective = replaced(mask="ppo", dual_clip=2.0, gap="old_mu", gap_mode="mask", gap_high=2.0)
        columns = columns_of([0.0, 5.0], mu=[0.0, -5.0], advantages=[-1.0, -1.0], mask=[True, False])
        inside, metrics = trust_of(objective, columns)
        assert inside == [True, False]
        assert metrics == {"clip/high": 0, "clip/low": 0, "clip/dual": 0, "gap/dropped": 0}

    def test_the_ratio_of_a_prefix_is_reported_and_that_of_a_token_not(self):
        columns = columns_of([0.25, 0.25])
        of_prefix = trust_of(replaced(mask="ppo", ratio="prefix"), columns)[1]
        assert of_prefix["clip/ratio/max"] == pytest.approx(math.exp(0.5))
        assert "clip/prefix_variance_rate" in of_prefix
        of_sequence = trust_of(replaced(mask="ppo", ratio="sequence_mean"), columns)[1]
        assert of_sequence["clip/ratio/mean"] == pytest.approx(math.exp(0.25))
        assert "clip/prefix_variance_rate" not in of_sequence
        assert trust_of(replaced(mask="ppo"), columns)[1] == {"clip/high": 1.0, "clip/low": 0.0}

    def test_the_reported_ratio_is_bounded(self):
        metrics = trust_of(replaced(mask="ppo", ratio="prefix"), columns_of([20.0, 20.0, -20.0, -20.0, -20.0]))[1]
        assert metrics["clip/ratio/max"] == pytest.approx(math.exp(20))
        assert metrics["clip/ratio/min"] == pytest.approx(math.exp(-20))

    def test_a_linear_window_bounds_the_ratio_of_many_tokens(self):
        inside, _ = trust_of(replaced(mask="ppo", ratio="sequence_product"), columns_of([20.0] * 40))
        assert inside == [False] * 40
        below = columns_of([-20.0] * 3, advantages=-1.0)
        assert trust_of(replaced(mask="ppo", ratio="sequence_product", eps_low=1.0), below)[0] == [True] * 3


class TestDualClip:
    def test_drops_only_bad_tokens_beyond_it(self):
        objective = replaced(dual_clip=2.0)
        logs = [math.log(2) + 1e-9, math.log(2) - 1e-9, math.log(2) + 1e-9, math.log(2) + 1e-9]
        inside, metrics = trust_of(objective, columns_of(logs, advantages=[-0.5, -0.5, 0.5, 0.0]))
        assert inside == [False, True, True, True]
        assert metrics["clip/dual"] == 0.25

    def test_at_the_bound_of_a_log_window_trains(self):
        objective = replaced(dual_clip=0.5, window="log", window_power=1.0)
        inside, _ = trust_of(objective, columns_of([0.5, 1.0, 1.0 + 2**-10 + 0.5], advantages=-1.0))
        assert inside == [True, True, False]

    def test_at_a_linear_bound_trains(self):
        bound = math.exp(1.0)
        rho = float(torch.tensor(1.0, dtype=torch.float64).exp())
        assert rho == bound, "the test needs one value of e"
        assert trust_of(replaced(dual_clip=bound), columns_of([1.0], advantages=-1.0))[0] == [True]

    def test_without_it_no_share_is_reported(self):
        assert "clip/dual" not in trust_of(replaced(mask="ppo"), columns_of([1.0], advantages=-1.0))[1]


class TestGap:
    """gap = old/mu: log-ratios are 0 (factor exactly 1) or far from the bound."""

    @pytest.mark.parametrize("mode", ["mask", "mask_weight"])
    def test_a_factor_at_a_bound_trains(self, mode):
        columns = columns_of([0.0, 0.0], old=[0.0, 0.0], mu=[0.0, 0.0])
        for bounds in ({"gap_low": 1.0}, {"gap_high": 1.0}):
            assert trust_of(replaced(gap="old_mu", gap_mode=mode, **bounds), columns)[0] == [True, True]

    def test_a_factor_outside_is_dropped_and_counted(self):
        columns = columns_of([0.0] * 3, mu=[0.5, 0.0, -0.5])  # factors 0.61, 1, 1.65
        for bounds, expected in (
            ({"gap_low": 0.9}, [False, True, True]),
            ({"gap_high": 1.1}, [True, True, False]),
            ({"gap_low": 0.9, "gap_high": 1.1}, [False, True, False]),
        ):
            inside, metrics = trust_of(replaced(gap="old_mu", gap_mode="mask", **bounds), columns)
            assert inside == expected
            assert metrics["gap/dropped"] == pytest.approx(expected.count(False) / 3)

    def test_truncation_drops_nothing(self):
        inside, metrics = trust_of(replaced(gap="old_mu", gap_high=1.1), columns_of([0.0], mu=-3.0))
        assert inside == [True]
        assert "gap/dropped" not in metrics

    def test_each_mode_weighs_in_its_own_way(self):
        columns = columns_of([0.0, 0.0], mu=[-1.0, 1.0])  # factors e and 1/e
        e = math.e
        assert weights_of(replaced(gap="old_mu", gap_high=2.0), columns) == pytest.approx([2.0, 1 / e])
        inside = replaced(gap="old_mu", gap_mode="mask_weight", gap_high=2.0)
        assert weights_of(inside, columns) == pytest.approx([e, 1 / e])
        assert weights_of(replaced(gap="old_mu", gap_mode="mask", gap_high=2.0), columns) == [1.0, 1.0]

    def test_the_cap_does_not_reach_the_gap_factor(self):
        objective = replaced(weight="theta_old", cap=1.5, gap="old_mu", gap_high=4.0)
        columns = columns_of([1.0], mu=-1.0)  # theta/old = e, cut to 1.5; old/mu = e, below its bound of 4
        assert weights_of(objective, columns) == pytest.approx([1.5 * math.e])

    def test_log_ratio_cap_does_not_reach_the_gap_factor(self):
        objective = replaced(
            weight="theta_old", ratio="sequence_product", log_ratio_cap=1.0,
            gap="old_mu", gap_ratio="sequence_product", gap_high=1e6,
        )  # fmt: skip
        columns = columns_of([2.0, 2.0], mu=[-2.0, -2.0])
        assert weights_of(objective, columns) == pytest.approx([math.exp(1.0 + 4.0)] * 2)

    def test_the_factor_is_reported(self):
        columns = columns_of([0.0, 0.0], mu=[-1.0, 1.0])
        metrics = finalize(importance_weight(replaced(gap="old_mu", gap_high=2.0), prepare(columns))[1])
        assert metrics["gap/weight/max"] == pytest.approx(math.e)
        assert "gap/weight/max" not in finalize(importance_weight(PLAIN, prepare(columns))[1])


class TestWeight:
    def test_a_weight_at_the_cap_is_not_truncated(self):
        objective = replaced(weight="theta_old", cap=1.0)
        values, metrics = importance_weight(objective, prepare(columns_of([0.0, 0.5, -0.5])))
        assert values.tolist() == pytest.approx([1.0, 1.0, math.exp(-0.5)])
        assert finalize(metrics)["tis/truncated"] == pytest.approx(1 / 3)

    def test_truncated_tokens_of_both_factors_count(self):
        """Decoupled: old/mu = e is cut by the cap, theta/old = e by the clip; one token each."""
        objective = replaced(weight="theta_mu", tis_on="old_mu", weight_fn="upper_clip", eps_high=0.5, cap=2.0)
        values, metrics = importance_weight(objective, prepare(columns_of([1.0, 1.0, 0.0], old=[1.0, 0.0, 0.0])))
        assert values.tolist() == pytest.approx([2.0, 1.5, 1.0])
        assert finalize(metrics)["tis/truncated"] == pytest.approx(2 / 3)

    def test_function_and_cap_both_count(self):
        objective = replaced(weight="theta_old", weight_fn="upper_clip", eps_high=1.0, cap=5.0)
        metrics = finalize(importance_weight(objective, prepare(columns_of([1.0, 0.0])))[1])
        assert metrics["tis/truncated"] == 0.5
        capped = dataclasses.replace(objective, eps_high=9.0, cap=2.0)
        assert finalize(importance_weight(capped, prepare(columns_of([1.0, 0.0])))[1])["tis/truncated"] == 0.5

    def test_tokens_without_loss_are_not_truncated(self):
        columns = columns_of([5.0, 0.0], mask=[False, True])
        metrics = finalize(importance_weight(replaced(weight="theta_old", cap=0.5), prepare(columns))[1])
        assert metrics["tis/truncated"] == 1.0

    @pytest.mark.parametrize(
        ("function", "expected"),
        [
            ({"weight_fn": "identity"}, [math.exp(2), math.exp(-2)]),
            ({"weight_fn": "power", "power": 0.25}, [math.exp(0.5), math.exp(-0.5)]),
            ({"weight_fn": "upper_clip", "eps_low": 0.5, "eps_high": 0.75}, [1.75, math.exp(-2)]),
            ({"weight_fn": "clip", "eps_low": 0.5, "eps_high": 0.75}, [1.75, 0.5]),
        ],
    )
    def test_functions(self, function, expected):
        objective = replaced(weight="theta_old", **function)
        assert weights_of(objective, columns_of([2.0, -2.0])) == pytest.approx(expected)

    def test_the_ratio_of_several_tokens_is_bounded_on_both_sides(self):
        """Product of 3 tokens at +-20: at most exp(log_ratio_cap), at least exp(-20), which is not 0 in fp32."""
        objective = replaced(weight="theta_old", ratio="sequence_product", log_ratio_cap=3.0)
        assert weights_of(objective, columns_of([20.0] * 3)) == pytest.approx([math.exp(3.0)] * 3)
        assert weights_of(objective, columns_of([-20.0] * 3)) == pytest.approx([math.exp(-20.0)] * 3, rel=1e-12)

    def test_a_shared_power_is_used(self):
        objective = dataclasses.replace(OBJECTIVES["adaptive_power"], ess_target=0.9)
        state = prepare(columns_of([1.0, -1.0]))
        values, metrics = importance_weight(objective, state, 0.25)
        assert values.tolist() == pytest.approx([math.exp(0.25), math.exp(-0.25)])
        assert finalize(metrics)["tis/power"] == 0.25


class TestAdaptivePower:
    def test_two_equal_log_ratios_of_either_sign(self):
        """ESS share of exp(+-q): cosh(q)^2 / cosh(2q) = 0.8 where cosh(2q) = 5/3."""
        q = adaptive_power(torch.tensor([1.0, -1.0]), torch.tensor([True, True]), 0.8)
        assert q == pytest.approx(math.acosh(5 / 3) / 2, abs=1e-11)

    def test_the_target_is_kept_from_above(self):
        logs = torch.tensor([1.0, -1.0, 3.0, 0.2], dtype=torch.float64)
        for target in (0.4, 0.5, 0.9, 0.999):
            q = adaptive_power(logs, torch.ones(4), target)
            share = [float((p * logs).exp().sum() ** 2 / (2 * p * logs).exp().sum() / 4) for p in (q, q + 1e-9)]
            assert share[0] >= target > share[1]

    def test_all_of_the_ratio_where_the_target_is_met(self):
        ones = torch.tensor([True, True])
        assert adaptive_power(torch.tensor([1.0, -1.0]), ones, 0.6) == 1.0, "the share is 0.633 at 1, 0.518 at 2"
        assert adaptive_power(torch.tensor([0.0, 0.0]), ones, 1.0) == 1.0, "met exactly"
        assert adaptive_power(torch.tensor([3.0]), torch.tensor([False]), 0.9) == 1.0

    def test_no_power_for_a_target_of_1(self):
        assert adaptive_power(torch.tensor([1.0, -1.0]), torch.tensor([True, True]), 1.0) == pytest.approx(0, abs=1e-6)

    def test_entries_without_a_share_do_not_count(self):
        logs, shares = torch.tensor([1.0, -1.0, 1000.0]), torch.tensor([1.0, 1.0, 0.0])
        assert adaptive_power(logs, shares, 0.8) == pytest.approx(math.acosh(5 / 3) / 2, abs=1e-11)

    def test_counts_weigh_as_repeated_entries(self):
        logs = torch.tensor([1.0, -1.0])
        repeated = adaptive_power(torch.tensor([1.0, -1.0, -1.0, -1.0]), torch.ones(4), 0.7)
        assert adaptive_power(logs, torch.tensor([1.0, 3.0]), 0.7) == pytest.approx(repeated, abs=1e-11)
        quarter = adaptive_power(logs, torch.tensor([0.25, 0.75]), 0.7)
        assert quarter == pytest.approx(repeated, abs=1e-11)

    @pytest.mark.parametrize("target", [0.2, 0.5, 0.8, 0.99])
    @pytest.mark.parametrize("scale", [1.0, 4.0])
    def test_few_steps(self, target, scale):
        """Each step waits for the device and for all ranks."""
        calls = []
        logs = scale * torch.linspace(-2, 3, 50, dtype=torch.float64)
        q = adaptive_power(logs, torch.ones(50), target, lambda sums: calls.append(sums) or sums)
        assert 0 < q <= 1
        assert len(calls) <= 15

    def test_of_a_mini_batch_is_that_of_all_its_tokens(self):
        objective = dataclasses.replace(OBJECTIVES["adaptive_power"], ess_target=0.8)
        parts = [columns_of([1.0]), columns_of([-1.0])]
        assert mini_batch_power(objective, parts) == pytest.approx(math.acosh(5 / 3) / 2, abs=1e-9)
        assert mini_batch_power(OBJECTIVES["power"], parts) is None


class TestKl:
    @pytest.mark.parametrize(
        ("kind", "derivatives", "mean"),
        [
            ("k1", [1, 1], 0.25),
            ("k2", [1.0, -0.5], (0.5 + 0.125) / 2),
            ("k3", [1 - math.exp(-1), 1 - math.exp(0.5)], (math.exp(-1) + math.exp(0.5) + 0.5 - 2) / 2),
        ],
    )
    def test_derivative_and_value(self, kind, derivatives, mean):
        zeros = torch.zeros(2, dtype=torch.float64)
        d = torch.tensor([1.0, -0.5], dtype=torch.float64)
        gradient, stats = kl_penalty(kind, d, zeros, torch.ones(2, dtype=torch.bool))
        assert gradient.tolist() == pytest.approx(derivatives)
        metrics = finalize(stats)
        assert metrics["kl/penalty"] == pytest.approx(mean)
        assert metrics["kl/clamped"] == 0

    def test_clamped_tokens_are_counted_on_both_sides(self):
        d = torch.tensor([20.0, -25.0, 19.5, 0.0])
        stats = finalize(kl_penalty("k2", d, torch.zeros(4), torch.ones(4, dtype=torch.bool))[1])
        assert stats["kl/clamped"] == 0.5

    def test_it_is_subtracted_on_kept_tokens_only(self):
        columns = columns_of([1.0, 2.0, 7.0], ref=0.0, advantages=0.0, mask=[True, True, False])
        objective = replaced(kl="k2", kl_coef=0.5)
        assert coefficients(objective, columns).values.tolist() == pytest.approx([-0.25, -0.5, 0])


class TestDenominators:
    def test_a_part_may_be_the_whole(self):
        columns = columns_of([0.0, 0.0])
        for whole in (Denominators(2, 1), Denominators(4, 1), Denominators(2, 2)):
            assert coefficients(PLAIN, columns, whole).values.tolist() == [1 / whole.num_tokens] * 2

    @pytest.mark.parametrize("denominators", [Denominators(1, 5), Denominators(5, 0)])
    def test_one_that_is_too_small_is_enough_to_refuse(self, denominators):
        with pytest.raises(ValueError, match="smaller than this part's own"):
            coefficients(PLAIN, columns_of([0.0, 0.0]), denominators)

    @pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
    def test_one_token_divides_by_one(self, aggregation):
        objective = replaced(aggregation=aggregation)
        assert coefficients(objective, columns_of([0.0], advantages=3.0)).values.tolist() == [3.0]

    def test_empty_sequences_beside_others_stay_finite(self):
        columns = columns_of([0.0, 0.0], mask=[True, False], cu_seqlens=[0, 1, 2])
        values = coefficients(replaced(aggregation="seq-mean-token-mean"), columns).values
        assert values.tolist() == [1.0, 0.0]
        loss, metrics = policy_loss(replaced(kl="k1", kl_coef=0.5), columns_of([0.0], mask=[False], ref=0.0))
        assert (loss.item(), finalize(metrics)["loss_tokens"]) == (0, 0)

    def test_counts_add_up(self):
        assert Denominators(5, 2) + Denominators(3, 1) == Denominators(8, 3)

    def test_a_sequence_of_one_token_counts(self):
        mask = torch.tensor([True, False, True, True])
        assert Denominators.of(mask, torch.tensor([0, 1, 2, 4])) == Denominators(3, 2)


class TestSums:
    def test_dropped_and_invalid_tokens_are_told_apart(self):
        columns = columns_of([0.0] * 4, mask=[True, True, True, False])
        columns.rollout_logprobs[0] = -math.inf
        columns.logprobs[1] = -math.inf
        columns.rollout_logprobs[3] = -math.inf
        result = coefficients(replaced(aggregation="token-mean"), columns)
        metrics = finalize(result.metrics)
        assert (metrics["loss_tokens"], metrics["logprobs/invalid"], metrics["logprobs/dropped"]) == (2, 1, 1)
        assert result.values.tolist() == [0, 0, 0.5, 0]

    def test_prefix_gradient_collects_what_comes_after(self):
        """rho = (e, e^2, e^3) of prefixes; token i collects rho_t for t >= i; a token without loss gets 0."""
        objective = replaced(weight="theta_old", ratio="prefix", prefix_grad=True)
        columns = columns_of([1.0, 9.0, 1.0, 1.0], mask=[True, False, True, True])
        e = math.e
        expected = [(e + e**2 + e**3) / 3, 0, (e**2 + e**3) / 3, e**3 / 3]
        assert coefficients(objective, columns).values.tolist() == pytest.approx(expected)

    def test_a_coefficient_of_1_is_in_the_loss(self):
        loss, _ = policy_loss(PLAIN, columns_of([0.0]))
        assert loss.item() == 30.0

    def test_a_log_probability_of_minus_infinity_beside_others_leaves_the_loss_finite(self):
        columns = columns_of([0.0, 0.0])
        columns.logprobs[1] = -math.inf
        assert policy_loss(PLAIN, columns)[0].item() == 15.0


class TestSelection:
    def test_what_is_positive_has_an_advantage_above_0(self):
        rewards, groups = [1.0, 1.0, 1.0, 0.0, 0.5], [0, 0, 1, 1, 1]
        by = {name: replaced(selection=name) for name in ("all", "mixed_groups", "positive")}
        assert select_responses(by["all"], rewards, groups).tolist() == [True] * 5
        assert select_responses(by["mixed_groups"], rewards, groups).tolist() == [False, False, True, True, True]
        assert select_responses(by["positive"], rewards, groups).tolist() == [False, False, True, False, False]


class TestColumns:
    def test_a_matrix_is_refused(self):
        flat = columns_of([0.0, 0.0])
        with pytest.raises(ValueError, match=r"expected \[T\]"):
            dataclasses.replace(flat, **{name: column[None] for name, column in flat.float_columns().items()},
                                loss_mask=flat.loss_mask[None])  # fmt: skip

    def test_the_first_wrong_token_is_named(self):
        columns = columns_of([0.0] * 4, mask=[False, True, True, True])
        columns.advantages[0] = math.nan
        columns.advantages[2:] = math.inf
        with pytest.raises(NumericsError, match=r"advantages is inf at token 2 .*\(2 such"):
            coefficients(PLAIN, columns)

    def test_one_wide_column_makes_all_wide(self):
        narrow = TokenColumns(*(torch.zeros(1) for _ in range(4)), torch.tensor([True]), torch.tensor([0, 1]))
        assert coefficients(PLAIN, narrow).values.dtype == torch.float32
        mixed = dataclasses.replace(narrow, old_logprobs=torch.zeros(1, dtype=torch.float64))
        assert coefficients(PLAIN, mixed).values.dtype == torch.float64
