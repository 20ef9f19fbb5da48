"""The rows of the table against hand-computed numbers, and against autograd of the literal losses of the papers."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from core_batches import random_columns, rows, seed_strategy, take, with_logprobs
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference_objectives as literal

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
    sequence_advantages,
    token_advantages,
)
from megarl.core.objectives.weights import adaptive_power
from megarl.errors import ConfigError, NumericsError

REINFORCE = OBJECTIVES["reinforce"]


def assert_equal(actual: torch.Tensor, expected: object, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


OLD = -32.0
"""log pi_old of the hand-made responses: no ratio below lifts a log-probability above 0."""


def response(log_ratios, advantages, mask=None, ref=None) -> TokenColumns:
    """One response with the given log theta/old, on policy with the engine (mu = old)."""
    logs = torch.tensor(log_ratios, dtype=torch.float64)
    old = torch.full_like(logs, OLD)
    size = len(log_ratios)
    values = torch.as_tensor(advantages, dtype=torch.float64)
    return TokenColumns(
        logprobs=old + logs,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=values.expand(size).clone(),
        loss_mask=torch.ones(size, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, size]),
        ref_logprobs=None if ref is None else old + torch.tensor(ref, dtype=torch.float64),
    )


def variant(name: str, **changes) -> Objective:
    return dataclasses.replace(OBJECTIVES[name], **changes)


RATIOS_OF_SECTION_A = [math.log(1.5), math.log(0.9375), math.log(1.125)]


class TestPresets:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("dapo", {"eps_low": 0.2, "eps_high": 0.28, "aggregation": "token-mean", "advantage": "grpo"}),
            (
                "gspo",
                {"eps_low": 3e-4, "eps_high": 4e-4, "aggregation": "seq-mean-token-mean", "ratio": "sequence_mean"},
            ),
            ("ctpo", {"eps_low": 0.025, "eps_high": 0.05, "window_power": 0.5, "dual_clip": 0.05, "gap": "none"}),
            ("ctpo", {"prefix_grad": False, "aggregation": "token-mean", "ratio": "prefix", "window": "log"}),
            (
                "kl_grpo",
                {"ratio": "future_mean", "advantage": "token_level_kl", "kl": "none", "std_ddof": 0, "mask": "ppo"},
            ),
            ("rloo", {"advantage": "rloo", "weight": "none"}),
            ("raft", {"advantage": "raft", "weight": "none"}),
            ("raft_pp", {"advantage": "raft", "mask": "ppo", "aggregation": "seq-mean-token-mean"}),
            ("cispo", {"mask": "none", "weight_fn": "clip", "advantage": "grpo", "aggregation": "token-mean"}),
            ("reinforce_rej", {"advantage": "group_mean", "selection": "mixed_groups", "mask": "ppo"}),
            ("adaptive_power", {"weight_fn": "adaptive_power", "ess_target": 0.5, "mask": "none"}),
        ],
    )
    def test_default_values(self, name, expected):
        assert {field: getattr(OBJECTIVES[name], field) for field in expected} == expected

    def test_only_where_a_kl_is_are_reference_log_probabilities_needed(self):
        assert [name for name, objective in OBJECTIVES.items() if objective.needs_ref_logprobs] == [
            "kl_grpo",
            "kl_grpo_token",
        ]


class TestHandComputed:
    def test_cispo_never_zeroes(self):
        objective = variant("cispo", eps_low=0.2, eps_high=0.27, aggregation="seq-mean-token-sum")
        columns = response(RATIOS_OF_SECTION_A, 0.5)
        assert_equal(coefficients(objective, columns).values, [0.635, 0.46875, 0.5625])
        theta = torch.tensor([0.6, 0.3, 0.9], dtype=torch.float64).log()
        shifted = dataclasses.replace(columns, logprobs=theta, old_logprobs=theta - columns.logprobs + OLD)
        assert_equal(-policy_loss(objective, shifted)[0], -0.9480018131767138)
        low = coefficients(objective, response([math.log(0.5)], 1.0)).values
        assert_equal(low, [0.8])
        assert_equal(coefficients(variant("cispo"), response([math.log(0.05)], 1.0)).values, [0.05])

    def test_gspo_clips_the_whole_response(self):
        s = 1.165212189732697
        assert_equal(coefficients(OBJECTIVES["gspo"], response(RATIOS_OF_SECTION_A, 0.5)).values, [0, 0, 0])
        assert_equal(coefficients(OBJECTIVES["gspo"], response(RATIOS_OF_SECTION_A, -0.5)).values, [-0.5 * s / 3] * 3)

    def test_dual_clip(self):
        objective = variant("grpo", dual_clip=3.0)
        assert_equal(coefficients(objective, response([math.log(4.0)], -1.0)).values, [0])
        assert_equal(coefficients(objective, response([math.log(2.9)], -1.0)).values, [-2.9])
        assert_equal(coefficients(OBJECTIVES["grpo"], response([math.log(4.0)], -1.0)).values, [-4.0])
        loss = literal.ppo_loss([[torch.tensor(math.log(4.0))]], [[0.0]], [[-1.0]], 0.2, 0.2, "token-mean", 3.0)
        assert loss.item() == pytest.approx(3)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("grpo", [1, 0, 1.5, 0.5, 0, 1.2]),
            ("upper_clip", [1, 1.2, 1.2, 0.5, 0.5, 1.2]),
            ("ppo_upper", [1, 0, 1.2, 0.5, 0, 1.2]),
        ],
    )
    def test_weights_by_sign_of_the_advantage(self, name, expected):
        """The last ratio lies on the bound, up to rounding, and passes."""
        signs = torch.tensor([1.0, 1, -1, 1, -1, 1], dtype=torch.float64)
        columns = response([math.log(x) for x in (1, 1.5, 1.5, 0.5, 0.5, 1.2)], signs)
        values = coefficients(variant(name, aggregation="seq-mean-token-sum", eps_high=0.2 + 1e-12), columns).values
        assert_equal(values * signs, expected)

    def test_power(self):
        for q, expected in ((0.0, 1), (0.5, 10), (1.0, 100)):
            assert_equal(coefficients(variant("power", power=q), response([math.log(100)], 1.0)).values, [expected])


class TestCtpo:
    LOGS = (0.02, 0.05, 0.7, -0.01, 0.10)
    MASK = (True, True, False, True, True)
    RHO = (1.0202013400267558, 1.0725081812542165, 0.0, 1.0618365465453596, 1.1735108709918103)

    def values(self, advantage: float, **changes) -> torch.Tensor:
        return 4 * coefficients(variant("ctpo", **changes), response(self.LOGS, advantage, self.MASK)).values

    def test_environment_tokens_add_nothing(self):
        assert_equal(self.values(1.0), [*self.RHO[:4], 0.0])
        assert_equal(self.values(1.0, mask="none", dual_clip=None), self.RHO)

    def test_literal_derivative_of_the_prefix(self):
        expected = [3.154546067826332, 2.134344727799576, 0, 1.0618365465453596, 0]
        assert_equal(self.values(1.0, prefix_grad=True), expected)

    def test_dual_clip_of_a_bad_response(self):
        assert_equal(self.values(-1.0), [-x for x in (*self.RHO[:4], 0.0)])
        assert_equal(self.values(-1.0, dual_clip=None), [-x for x in self.RHO])

    def test_window(self):
        """exp(-.025 sqrt t), exp(.05 sqrt t): t = 1 [.9753, 1.0513], t = 100 [.7788, 1.6487]."""
        for t, low, high in ((1, 0.9753099120, 1.0512710964), (100, 0.7788007831, 1.6487212707)):
            for rho, advantage, passes in (
                (low + 1e-9, -1.0, True),
                (low - 1e-9, -1.0, False),
                (high - 1e-9, 1.0, True),
                (high + 1e-9, 1.0, False),
            ):
                values = coefficients(OBJECTIVES["ctpo"], response([0.0] * (t - 1) + [math.log(rho)], advantage)).values
                assert bool(values[-1] != 0) == passes, (t, rho)

    def test_loss_value_of_the_literal_form(self):
        lps = [[torch.tensor(x, dtype=torch.float64) for x, m in zip(self.LOGS, self.MASK, strict=True) if m]]
        for advantage in (1.0, -1.0):
            loss = literal.ctpo_loss(lps, [[0.0] * 4], [[advantage] * 4], prefix_grad=False)
            assert loss.item() == pytest.approx(-advantage * 1.064929246475495, abs=1e-12)

    def test_the_sequence_weight_of_the_released_code(self):
        columns = response(self.LOGS, 1.0, self.MASK)
        columns = dataclasses.replace(columns, rollout_logprobs=columns.old_logprobs - 0.2)
        objective = variant("ctpo", gap="old_mu", gap_ratio="sequence_product", gap_high=5.0)
        plain = coefficients(OBJECTIVES["ctpo"], columns).values
        assert_equal(coefficients(objective, columns).values, plain * math.exp(0.8))
        far = dataclasses.replace(columns, rollout_logprobs=columns.old_logprobs - 1.0)
        assert_equal(coefficients(objective, far).values, plain * 5)


class TestGradientsOfTheLiteralLosses:
    """Coefficients equal autograd, on random batches with environment tokens and an empty sequence."""

    @staticmethod
    def check(columns: TokenColumns, objective: Objective, loss) -> None:
        leaf = columns.logprobs.clone().requires_grad_()
        policy_loss(objective, with_logprobs(columns, leaf))[0].backward()
        slow = columns.logprobs.clone().requires_grad_()
        masks = rows(columns.loss_mask, columns.cu_seqlens)
        pieces = [slow[a:b] for a, b in itertools.pairwise(columns.cu_seqlens.tolist())]

        def kept(nested):
            return [list(itertools.compress(row, mask)) for row, mask in zip(nested, masks, strict=True)]

        assert columns.ref_logprobs is not None
        others = (columns.old_logprobs, columns.advantages, columns.ref_logprobs)
        loss([*kept(pieces)], *(kept(rows(column, columns.cu_seqlens)) for column in others)).backward()
        assert leaf.grad is not None
        assert slow.grad is not None
        assert slow.grad.abs().sum() > 0
        torch.testing.assert_close(leaf.grad, slow.grad, rtol=1e-11, atol=1e-13)

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("dual", [None, 1.3])
    def test_dapo(self, seed, dual):
        self.check(
            random_columns(seed, [5, 0, 9, 3]),
            variant("dapo", dual_clip=dual),
            lambda lps, olds, adv, _ref: literal.ppo_loss(lps, olds, adv, 0.2, 0.28, "token-mean", dual),
        )

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("token_variant", [False, True])
    def test_gspo(self, seed, token_variant):
        """Both forms have the same coefficients; the windows are widened so that some sequences pass."""
        self.check(
            random_columns(seed, [5, 0, 9, 3]),
            variant("gspo", eps_low=0.1, eps_high=0.1),
            lambda lps, olds, adv, _ref: literal.gspo_loss(lps, olds, adv, 0.1, 0.1, token_variant),
        )

    @pytest.mark.parametrize("seed", range(3))
    def test_gspo_with_an_advantage_per_token(self, seed):
        columns = random_columns(seed, [5, 0, 9, 3])
        signed = columns.advantages * torch.linspace(-1, 2, 17, dtype=torch.float64)
        self.check(
            dataclasses.replace(columns, advantages=signed),
            variant("gspo", eps_low=0.1, eps_high=0.1),
            lambda lps, olds, adv, _ref: literal.gspo_loss(lps, olds, adv, 0.1, 0.1, token_variant=True),
        )

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("prefix_grad", [False, True])
    @pytest.mark.parametrize(("aggregation", "dual"), [("token-mean", 0.3), ("seq-mean-token-mean", None)])
    def test_ctpo(self, seed, prefix_grad, aggregation, dual):
        changes = {"prefix_grad": prefix_grad, "aggregation": aggregation, "dual_clip": dual}
        self.check(
            random_columns(seed, [5, 0, 9, 3]),
            variant("ctpo", eps_low=0.2, eps_high=0.3, **changes),
            lambda lps, olds, adv, _ref: literal.ctpo_loss(lps, olds, adv, eps_low=0.2, eps_high=0.3, **changes),
        )

    @pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
    @pytest.mark.parametrize("name", ["grpo", "dapo"])
    def test_kl_penalty_beside_the_ppo_minimum(self, kind, name):
        objective = variant(name, kl=kind, kl_coef=0.3)

        def loss(lps, olds, adv, ref):
            ppo = literal.ppo_loss(lps, olds, adv, 0.2, objective.eps_high, objective.aggregation)
            return ppo + 0.3 * literal.kl_loss(lps, ref, kind, objective.aggregation)

        self.check(random_columns(3, [5, 0, 9, 3]), objective, loss)

    @pytest.mark.parametrize(
        ("name", "weight"),
        [
            ("cispo", lambda r: min(r, 1.2)),
            ("raft", lambda r: 1.0),
            ("power", lambda r: r**0.5),
            ("upper_clip", lambda r: min(r, 1.2)),
        ],
    )
    def test_weight_forms(self, name, weight):
        objective = OBJECTIVES[name]
        self.check(
            random_columns(3, [5, 0, 9, 3]),
            objective,
            lambda lps, olds, adv, _ref: literal.weighted_loss(lps, olds, adv, weight, objective.aggregation),
        )


class TestKl:
    def test_penalty_alone(self):
        """A = 0: what is left is beta times the derivative of the estimator. d = (0.5, -0.4)."""
        columns = response([0.5, -0.4], 0.0, ref=[0.0, 0.0])
        for kind, expected, mean in (
            ("k1", [-1.0, -1.0], 0.05),
            ("k2", [-0.5, 0.4], (0.125 + 0.08) / 2),
            ("k3", [math.exp(-0.5) - 1, math.exp(0.4) - 1], (math.exp(-0.5) + 0.5 + math.exp(0.4) - 0.4 - 2) / 2),
        ):
            objective = variant("reinforce", kl=kind, kl_coef=0.1)
            result = coefficients(objective, columns)
            assert_equal(result.values, [0.1 * x for x in expected])
            assert finalize(result.metrics)["kl/penalty"] == pytest.approx(mean)

    def test_it_reaches_tokens_that_the_mask_drops(self):
        columns = response([math.log(3.0)], 1.0, ref=[0.0])
        assert_equal(coefficients(variant("grpo", kl="k2", kl_coef=0.5), columns).values, [-0.5 * math.log(3.0)])

    def test_a_reference_of_probability_zero_is_bounded_and_counted(self):
        columns = response([0.0, 0.0], 0.0, ref=[0.0, -math.inf])
        result = coefficients(variant("reinforce", kl="k2", kl_coef=1.0), columns)
        assert_equal(result.values, [0.0, -20.0])
        assert finalize(result.metrics)["kl/clamped"] == 0.5

    def test_a_missing_column_is_named(self):
        with pytest.raises(ConfigError, match="ref_logprobs"):
            coefficients(variant("grpo", kl="k3", kl_coef=0.1), response([0.0], 1.0))
        with pytest.raises(ConfigError, match="ref_logprobs"):
            sequence_advantages(OBJECTIVES["kl_grpo"], [1.0, 0.0], [0, 0])
        columns = response([0.0], 1.0)
        with pytest.raises(ConfigError, match="ref_logprobs"):
            token_advantages(
                OBJECTIVES["kl_grpo"],
                [1.0],
                [0],
                logprobs=columns.logprobs,
                ref_logprobs=None,
                loss_mask=columns.loss_mask,
                cu_seqlens=columns.cu_seqlens,
            )

    def test_nan_in_the_reference_is_refused(self):
        with pytest.raises(NumericsError, match=r"^ref_logprobs is nan at token 1 "):
            coefficients(variant("grpo", kl="k3", kl_coef=0.1), response([0.0, 0.0], 1.0, ref=[0.0, math.nan]))


class TestAdaptivePower:
    def test_log_normal(self):
        """q = min(1, sqrt(ln(1/tau)) / s), by quadrature over the normal."""
        points, density = np.polynomial.hermite_e.hermegauss(100)
        shares = torch.from_numpy(density / density.sum())
        for s, expected in ((2.0, 0.41627730557884884), (0.5, 1.0)):
            assert adaptive_power(torch.from_numpy(s * points - s * s / 2), shares, 0.5) == pytest.approx(
                expected, abs=1e-9
            )

    @settings(max_examples=60, deadline=None)
    @given(logs=st.lists(st.floats(-20, 20), min_size=1, max_size=30), target=st.floats(0.05, 1.0))
    def test_largest_power_that_keeps_the_sample_size(self, logs, target):
        q = adaptive_power(torch.tensor(logs, dtype=torch.float64), torch.ones(len(logs), dtype=torch.bool), target)
        assert 0 <= q <= 1

        def share(power):
            weights = [math.exp(power * x) for x in logs]
            return sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)

        assert share(q) >= target - 1e-9
        assert q == 1 or share(min(q + 1e-6, 1.0)) < target + 1e-9

    @settings(max_examples=30, deadline=None)
    @given(seed_strategy, st.lists(st.integers(1, 6), min_size=3, max_size=6), st.data())
    def test_one_power_for_all_parts_of_a_mini_batch(self, seed, lengths, data):
        """However the sequences are dealt out to micro-batches and ranks, coefficients are those of the whole."""
        objective = variant("adaptive_power", ratio=data.draw(st.sampled_from(["token", "prefix"])), ess_target=0.9)
        columns = random_columns(seed, lengths)
        cut = data.draw(st.integers(1, len(lengths) - 1))
        parts = [take(columns, list(range(cut))), take(columns, list(range(cut, len(lengths))))]
        whole = mini_batch_power(objective, [columns])
        assert mini_batch_power(objective, parts) == pytest.approx(whole, abs=1e-9)

        # The other rank's tokens come in as sums: here its share is the same, so the sums double and the power stays.
        assert mini_batch_power(objective, parts, lambda sums: 2 * sums) == pytest.approx(whole, abs=1e-9)

        denominators = Denominators.of(columns.loss_mask, columns.cu_seqlens)
        values = [coefficients(objective, part, denominators, power=whole).values for part in parts]
        assert_equal(torch.cat(values), coefficients(objective, columns).values)

    def test_only_one_row_asks_for_a_power(self):
        columns = response([0.1, 0.2], 1.0)
        asking = [name for name, objective in OBJECTIVES.items() if mini_batch_power(objective, [columns]) is not None]
        assert asking == ["adaptive_power"]

    def test_nothing_to_weigh(self):
        assert adaptive_power(torch.zeros(3), torch.zeros(3, dtype=torch.bool), 0.5) == 1.0

    def test_it_is_reported(self):
        columns = response([2.0, -2.0, 0.0], 1.0)
        result = coefficients(OBJECTIVES["adaptive_power"], columns)
        numbers = finalize(result.metrics)
        assert 0 < numbers["tis/power"] < 1
        assert numbers["tis/ess/fraction"] == pytest.approx(0.5, abs=1e-9)
        assert_equal(coefficients(OBJECTIVES["adaptive_power"], columns, power=0.0).values, [1 / 3] * 3)


class TestSelection:
    REWARDS = (1.0, 0.5, 0.0, 1.0, 1.0, 0.0)
    GROUPS = (7, 7, 7, 3, 3, 5)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, [True] * 6),
            ({"selection": "mixed_groups"}, [True, True, True, False, False, False]),
            ({"selection": "positive", "advantage": "raft"}, [True, False, False, True, True, False]),
        ],
    )
    def test_responses(self, changes, expected):
        """The response whose reward is its group's mean stays: its advantage is 0, but its group has contrast."""
        selected = select_responses(variant("minirl", **changes), list(self.REWARDS), list(self.GROUPS))
        assert selected.tolist() == expected


class TestGap:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"gap_mode": "truncate", "gap_high": 1.5}, [1.5, 1.2, 0.5]),
            ({"gap_mode": "mask", "gap_low": 0.6, "gap_high": 1.5}, [0, 1, 0]),
            ({"gap_mode": "mask_weight", "gap_low": 0.6}, [2, 1.2, 0]),
            ({"gap_mode": "mask", "gap_low": 0.6, "gap_high": 1.5, "gap_ratio": "sequence_product"}, [1, 1, 1]),
            ({"gap_mode": "mask", "gap_high": 1.1, "gap_ratio": "sequence_product"}, [0, 0, 0]),
            ({"gap_mode": "mask_weight", "gap_high": 1.1, "gap_ratio": "sequence_mean"}, [1.2 ** (1 / 3)] * 3),
        ],
    )
    def test_factor_old_over_mu(self, changes, expected):
        columns = response([0.0, 0.0, 0.0], 1.0)
        factors = torch.tensor([2.0, 1.2, 0.5], dtype=torch.float64)
        columns = dataclasses.replace(columns, rollout_logprobs=columns.old_logprobs - factors.log())
        result = coefficients(variant("reinforce", gap="old_mu", **changes), columns)
        assert_equal(result.values, expected)
        numbers = finalize(result.metrics)
        assert numbers.get("gap/dropped", 0) == pytest.approx(sum(x == 0 for x in expected) / 3)


class TestLongResponses:
    @pytest.mark.parametrize("name", sorted(OBJECTIVES))
    @pytest.mark.parametrize("drift", [0.5, -0.5])
    def test_a_hundred_thousand_tokens_stay_finite(self, name, drift):
        """A drift of 0.5 per token: the product of the ratios is e^50000."""
        size = 100_000
        old = torch.full((size + 1,), -2.0)
        columns = TokenColumns(
            old + drift,
            old,
            old,
            torch.cat([torch.ones(size), -torch.ones(1)]),
            torch.ones(size + 1, dtype=torch.bool),
            torch.tensor([0, size, size + 1]),
            old,
        )
        for changes in ({}, {"mask": "none", "dual_clip": None}):
            result = coefficients(variant(name, **changes), columns)
            assert torch.isfinite(result.values).all()
            finalize(result.metrics)

    def test_the_window_looks_at_the_ratio_without_its_bound(self):
        """At t = 90 000 the window ends at e^15: a ratio of e^50 is outside, though the weight stops at e^10."""
        logs = [0.0] * 89_999 + [20.0] + [20.0]
        values = coefficients(variant("ctpo", dual_clip=None), response(logs, 1.0)).values
        assert (values[-2:] == 0).all()
        bad = coefficients(variant("ctpo", dual_clip=None), response(logs, -1.0)).values * 90_001
        assert_equal(bad[-1:], [-math.exp(10)], 1e-6)


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("reinforce", {"weight_fn": "power"}, "set a weight"),
            ("power", {"power": -1.0}, "power is -1"),
            ("power", {"power": math.nan}, "power is nan"),
            ("adaptive_power", {"ess_target": 0.0}, "ess_target"),
            ("gspo", {"log_ratio_cap": 100.0}, "log_ratio_cap"),
            ("grpo", {"prefix_grad": True}, "ratio is 'token'"),
            ("ctpo", {"prefix_grad": True, "cap": 5.0}, "cap 5.0"),
            ("ctpo", {"prefix_grad": "yes"}, "true or false"),
            ("grpo", {"window_power": 0.5}, "set window to 'log'"),
            ("grpo", {"dual_clip": 0.9}, "more than 1"),
            ("ctpo", {"dual_clip": 0.0}, "more than 0"),
            ("grpo", {"mask_ratio": "all"}, "mask_ratio"),
            ("grpo", {"gap_high": 2.0}, "set gap"),
            ("grpo", {"gap": "old_mu"}, "needs gap_high"),
            ("grpo", {"gap": "old_mu", "gap_mode": "mask"}, "gap_low, gap_high or both"),
            ("grpo", {"gap": "old_mu", "gap_mode": "mask", "gap_low": 2.0, "gap_high": 1.0}, "in order"),
            ("minirl", {"gap": "old_mu", "gap_high": 2.0}, "count again"),
            ("grpo", {"gap": "theta_mu", "gap_high": 2.0}, "twice"),
            ("grpo", {"kl": "k3"}, "kl_coef above 0"),
            ("grpo", {"kl_coef": 0.1}, "set kl to"),
            ("kl_grpo", {"kl": "k3"}, "expected 'none'"),
            ("kl_grpo", {"kl_horizon": 0}, "kl_horizon"),
            ("grpo", {"kl_horizon": 8}, "kl_horizon"),
            ("grpo", {"std_ddof": 2}, "std_ddof 2"),
        ],
    )
    def test_parts_that_do_not_fit(self, name, changes, message):
        with pytest.raises(ConfigError, match=message):
            variant(name, **changes)
