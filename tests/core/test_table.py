"""The rows of the table against hand-computed numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from core_batches import variant
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.metrics import finalize
from megarl.core.objectives import (
    OBJECTIVES,
    BatchFacts,
    Factor,
    Mask,
    Objective,
    Penalty,
    TokenColumns,
    advantages_of,
    coefficients,
    policy_loss,
    token_advantages,
)
from megarl.core.objectives.weights import adaptive_power
from megarl.errors import ConfigError, NumericsError

OLD = -32.0
"""log pi_old of the hand-made responses: no ratio below lifts a log-probability above 0."""
RATIOS_OF_SECTION_A = [math.log(1.5), math.log(0.9375), math.log(1.125)]


def assert_equal(actual: torch.Tensor, expected: object, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def response(log_ratios, advantages, mask=None, ref=None, gap: Any = 0.0) -> TokenColumns:
    """One response with the given log theta/old, and log old/mu (gap)."""
    logs = torch.tensor(log_ratios, dtype=torch.float64)
    old = torch.full_like(logs, OLD)
    size = len(log_ratios)
    return TokenColumns(
        old + logs,
        old,
        old - torch.as_tensor(gap, dtype=torch.float64),
        torch.as_tensor(advantages, dtype=torch.float64).expand(size).clone(),
        torch.ones(size, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool),
        torch.tensor([0, size]),
        None if ref is None else old + torch.tensor(ref, dtype=torch.float64),
    )


def values_of(objective: Objective, *given: Any, **named: Any) -> torch.Tensor:
    return coefficients(objective, response(*given, **named)).values


def ppo(name: str, low: float, high: float, dual: float | None = None, **changes: Any) -> Objective:
    """A row with another window of its first mask, which is PPO's, and its scope."""
    bad = () if dual is None else (Mask("theta_old", high=dual, sign="negative"),)
    masks = (dataclasses.replace(OBJECTIVES[name].records[0], low=low, high=high), *bad)
    return variant(name, masks=masks, **changes)


def ctpo(low: float = -0.025, high: float = 0.05, dual: float | None = 0.05, **changes: Any) -> Objective:
    outward = Mask("theta_old", "log_ratio", "prefix", low, high, "outward", growth=0.5)
    masks = (
        (outward,) if dual is None else (outward, dataclasses.replace(outward, low=None, high=dual, sign="negative"))
    )
    return variant("ctpo", masks=masks, **changes)


class TestPresets:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("dapo", {"masks": (Mask.ppo(0.8, 1.28),), "aggregation": "token-mean", "advantage": "grpo"}),
            (
                "gspo",
                {"masks": (Mask.ppo(0.9997, 1.0004, scope="sequence_mean"),), "aggregation": "seq-mean-token-mean"},
            ),
            ("gspo", {"factors": (Factor("theta_old", "sequence_mean", log_ratio_cap=10.0),)}),
            ("ctpo", {"masks": ctpo().masks, "prefix_grad": False, "aggregation": "token-mean"}),
            ("ctpo", {"factors": (Factor("theta_old", "prefix", log_ratio_cap=10.0),)}),
            ("kl_grpo", {"masks": (Mask.ppo(scope="future_mean"),), "advantage": "token_level_kl", "std_ddof": 0}),
            ("kl_grpo", {"factors": (Factor("theta_old", "future_mean"),), "penalties": (), "kl_coef": 0.01}),
            ("rloo", {"advantage": "rloo", "factors": (), "masks": ()}),
            ("raft", {"advantage": "raft", "factors": (), "masks": ()}),
            ("raft_pp", {"advantage": "raft", "masks": (Mask.ppo(high=1.28),), "aggregation": "seq-mean-token-mean"}),
            ("cispo", {"masks": (), "factors": (Factor("theta_old", high=1.2),), "advantage": "grpo"}),
            ("reinforce_rej", {"advantage": "raw_mixed", "selection": "all", "aggregation": "token-mean"}),
            ("reinforce_rej_signed", {"advantage": "signed", "selection": "mixed_groups"}),
            ("adaptive_power", {"factors": (Factor("theta_old", fn="adaptive_power", ess_target=0.5),), "masks": ()}),
        ],
    )
    def test_default_values(self, name, expected):
        assert {field: getattr(OBJECTIVES[name], field) for field in expected} == expected

    def test_what_rows_need(self):
        """A reference only for a KL with a factor above 0; beforehand only what depends on the whole mini-batch."""
        needing = {name for name, row in OBJECTIVES.items() if row.needs_ref_logprobs}
        assert needing == {"kl_grpo", "kl_grpo_token"}
        assert not variant("grpo", penalties=(Penalty("k3"),)).needs_ref_logprobs
        assert not variant("grpo", penalties=(Penalty("k3", "mu", 0.1),)).needs_ref_logprobs
        assert {name: set(row.beforehand) for name, row in OBJECTIVES.items() if row.beforehand} == {
            "adaptive_power": {"theta_old"}, "geo_rs": {"old_mu"},
        }  # fmt: skip
        assert [name for name, row in OBJECTIVES.items() if row.needs_topk] == ["dppo_topk"]
        assert [set(OBJECTIVES[name].pairs) for name in ("minirl", "drpo", "sapo", "raft")] == [
            {"theta_old", "theta_mu"}, {"theta_mu"}, {"theta_old"}, set(),
        ]  # fmt: skip


class TestHandComputed:
    def test_cispo_never_zeroes(self):
        objective = variant("cispo", factors=(Factor("theta_old", low=0.8, high=1.27),), aggregation="token-mean")
        columns = response(RATIOS_OF_SECTION_A, 0.5)
        assert_equal(3 * coefficients(objective, columns).values, [0.635, 0.46875, 0.5625])
        theta = torch.tensor([0.6, 0.3, 0.9], dtype=torch.float64).log()
        shifted = dataclasses.replace(columns, logprobs=theta, old_logprobs=theta - columns.logprobs + OLD)
        assert_equal(-3 * policy_loss(objective, shifted)[0], -0.9480018131767138)
        assert_equal(values_of(objective, [math.log(0.5)], 1.0), [0.8])
        assert_equal(values_of(OBJECTIVES["cispo"], [math.log(0.05)], 1.0), [0.05])

    def test_gspo_clips_the_whole_response(self):
        s = 1.165212189732697
        assert_equal(values_of(OBJECTIVES["gspo"], RATIOS_OF_SECTION_A, 0.5), [0, 0, 0])
        assert_equal(values_of(OBJECTIVES["gspo"], RATIOS_OF_SECTION_A, -0.5), [-0.5 * s / 3] * 3)

    def test_dual_clip(self):
        assert_equal(values_of(ppo("grpo", 0.8, 1.2, 3.0), [math.log(4.0)], -1.0), [0])
        assert_equal(values_of(ppo("grpo", 0.8, 1.2, 3.0), [math.log(2.9)], -1.0), [-2.9])
        assert_equal(values_of(OBJECTIVES["grpo"], [math.log(4.0)], -1.0), [-4.0])

    @pytest.mark.parametrize(
        ("name", "masks", "expected"),
        [
            ("grpo", (Mask.ppo(high=1.2 + 1e-12),), [1, 0, 1.5, 0.5, 0, 1.2]),
            ("upper_clip", (), [1, 1.2, 1.2, 0.5, 0.5, 1.2]),
            ("ppo_upper", (Mask.ppo(high=1.2 + 1e-12),), [1, 0, 1.2, 0.5, 0, 1.2]),
        ],
    )
    def test_weights_by_sign_of_the_advantage(self, name, masks, expected):
        """The last ratio lies on the bound, up to rounding, and passes."""
        signs = torch.tensor([1.0, 1, -1, 1, -1, 1], dtype=torch.float64)
        logs = [math.log(x) for x in (1, 1.5, 1.5, 0.5, 0.5, 1.2)]
        row = variant(name, aggregation="seq-mean-token-sum", masks=masks)
        assert_equal(values_of(row, logs, signs) * signs, expected)

    def test_power(self):
        for q, expected in ((0.0, 1), (0.5, 10), (1.0, 100)):
            row = variant("power", factors=(Factor("theta_old", fn="power", power=q),))
            assert_equal(values_of(row, [math.log(100)], 1.0), [expected])

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            ({"factors": [{"high": 1.5}]}, [1.5, 1.2, 0.5]),
            ({"masks": [{"low": 0.6, "high": 1.5}]}, [0, 1, 0]),
            ({"masks": [{"low": 0.6}], "factors": [{}]}, [2, 1.2, 0]),
            ({"masks": [{"low": 0.6, "high": 1.5, "scope": "sequence_sum"}]}, [1, 1, 1]),
            ({"masks": [{"high": 1.1, "scope": "sequence_sum"}]}, [0, 0, 0]),
            (
                {"masks": [{"high": 1.1, "scope": "sequence_mean"}], "factors": [{"scope": "sequence_mean"}]},
                [1.2 ** (1 / 3)] * 3,
            ),
        ],
    )
    def test_the_gap_of_the_engines(self, parts, expected):
        """old/mu = 2, 1.2, 0.5: truncated, masked, or both."""
        makers = {"masks": Mask, "factors": Factor}
        made = {name: tuple(makers[name]("old_mu", **each) for each in given) for name, given in parts.items()}
        gap = torch.tensor([2.0, 1.2, 0.5], dtype=torch.float64).log()
        result = coefficients(variant("reinforce", **made), response([0.0] * 3, 1.0, gap=gap))
        assert_equal(result.values, expected)
        assert finalize(result.metrics).get("clip/both", 0) == pytest.approx(sum(x == 0 for x in expected) / 3)


class TestCtpo:
    LOGS = (0.02, 0.05, 0.7, -0.01, 0.10)
    MASK = (True, True, False, True, True)
    RHO = (1.0202013400267558, 1.0725081812542165, 0.0, 1.0618365465453596, 1.1735108709918103)

    def values(self, advantage: float, objective: Objective, **gap: float) -> torch.Tensor:
        return 4 * values_of(objective, self.LOGS, advantage, self.MASK, **gap)

    def test_environment_tokens_add_nothing(self):
        assert_equal(self.values(1.0, ctpo()), [*self.RHO[:4], 0.0])
        assert_equal(self.values(1.0, variant("ctpo", masks=())), self.RHO)

    def test_literal_derivative_of_the_prefix(self):
        expected = [3.154546067826332, 2.134344727799576, 0, 1.0618365465453596, 0]
        assert_equal(self.values(1.0, ctpo(prefix_grad=True)), expected)

    def test_dual_clip_of_a_bad_response(self):
        assert_equal(self.values(-1.0, ctpo()), [-x for x in (*self.RHO[:4], 0.0)])
        assert_equal(self.values(-1.0, ctpo(dual=None)), [-x for x in self.RHO])

    def test_window(self):
        """exp(-.025 sqrt t), exp(.05 sqrt t): t = 1 [.9753, 1.0513], t = 100 [.7788, 1.6487]."""
        for t, low, high in ((1, 0.9753099120, 1.0512710964), (100, 0.7788007831, 1.6487212707)):
            for rho, advantage, passes in (
                (low + 1e-9, -1.0, True),
                (low - 1e-9, -1.0, False),
                (high - 1e-9, 1.0, True),
                (high + 1e-9, 1.0, False),
            ):
                values = values_of(OBJECTIVES["ctpo"], [0.0] * (t - 1) + [math.log(rho)], advantage)
                assert bool(values[-1] != 0) == passes, (t, rho)

    def test_the_sequence_weight_of_the_released_code(self):
        both = (*OBJECTIVES["ctpo"].factors, Factor("old_mu", "sequence_sum", high=5.0))
        plain = self.values(1.0, ctpo())
        for gap, weight in ((0.2, math.exp(0.8)), (1.0, 5)):
            assert_equal(self.values(1.0, ctpo(factors=both), gap=gap), plain * weight)

    def test_the_window_looks_at_the_ratio_without_its_bound(self):
        """At t = 90 000 the window ends at e^15: a ratio of e^50 is outside, though the weight stops at e^10."""
        logs = [0.0] * 89_999 + [20.0] + [20.0]
        assert (values_of(ctpo(dual=None), logs, 1.0)[-2:] == 0).all()
        assert_equal(values_of(ctpo(dual=None), logs, -1.0)[-1:] * 90_001, [-math.exp(10)], 1e-6)


class TestKl:
    def test_penalty_alone(self):
        """A = 0: what is left is beta times the derivative of the estimator. d = (0.5, -0.4)."""
        columns = response([0.5, -0.4], 0.0, ref=[0.0, 0.0])
        for kind, expected, mean in (
            ("k1", [-1.0, -1.0], 0.05),
            ("k2", [-0.5, 0.4], (0.125 + 0.08) / 2),
            ("k3", [math.exp(-0.5) - 1, math.exp(0.4) - 1], (math.exp(-0.5) + 0.5 + math.exp(0.4) - 0.4 - 2) / 2),
        ):
            result = coefficients(variant("reinforce", penalties=(Penalty(kind, coef=0.1),)), columns)
            assert_equal(result.values, [0.1 * x for x in expected])
            assert finalize(result.metrics)["kl/penalty"] == pytest.approx(mean)

    def test_it_reaches_tokens_that_the_mask_drops(self):
        penalised = variant("grpo", penalties=(Penalty("k2", coef=0.5),))
        assert_equal(values_of(penalised, [math.log(3.0)], 1.0, ref=[0.0]), [-0.5 * math.log(3.0)])

    def test_a_reference_of_probability_zero_is_bounded_and_counted(self):
        columns = response([0.0, 0.0], 0.0, ref=[0.0, -math.inf])
        result = coefficients(variant("reinforce", penalties=(Penalty("k2", coef=1.0),)), columns)
        assert_equal(result.values, [0.0, -20.0])
        assert finalize(result.metrics)["kl/penalty_clamped"] == 0.5

    def test_a_missing_column_is_named(self):
        penalised = variant("grpo", penalties=(Penalty("k3", coef=0.1),))
        columns = response([0.0], 1.0)
        given = {
            "logprobs": columns.logprobs, "ref_logprobs": None, "loss_mask": columns.loss_mask,
            "cu_seqlens": columns.cu_seqlens,
        }  # fmt: skip
        for call in (
            lambda: coefficients(penalised, columns),
            lambda: advantages_of(OBJECTIVES["kl_grpo"], [1.0, 0.0], [0, 0]),
            lambda: token_advantages(OBJECTIVES["kl_grpo"], [1.0], [0], **given),
        ):
            with pytest.raises(ConfigError, match="ref_logprobs"):
                call()
        coefficients(variant("grpo", penalties=(Penalty("k3"), Penalty("k3", "old", 0.1))), columns)
        with pytest.raises(NumericsError, match=r"^ref_logprobs is nan at token 1 "):
            coefficients(penalised, response([0.0, 0.0], 1.0, ref=[0.0, math.nan]))


class TestAdaptivePower:
    def test_log_normal(self):
        """q = min(1, sqrt(ln(1/tau)) / s), by quadrature over the normal."""
        points, density = np.polynomial.hermite_e.hermegauss(100)
        shares = torch.from_numpy(density / density.sum())
        for s, expected in ((2.0, 0.41627730557884884), (0.5, 1.0)):
            found = adaptive_power(torch.from_numpy(s * points - s * s / 2), shares, 0.5)
            assert found == pytest.approx(expected, abs=1e-9)

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

    def test_it_is_reported(self):
        columns = response([2.0, -2.0, 0.0], 1.0)
        numbers = finalize(coefficients(OBJECTIVES["adaptive_power"], columns).metrics)
        assert 0 < numbers["tis/power"] < 1
        assert numbers["tis/ess/fraction"] == pytest.approx(0.5, abs=1e-9)
        given_power = coefficients(OBJECTIVES["adaptive_power"], columns, facts=BatchFacts((0.0,), (None,)))
        assert_equal(given_power.values, [1 / 3] * 3)


@pytest.mark.parametrize("name", sorted(name for name, row in OBJECTIVES.items() if not row.needs_topk))
@pytest.mark.parametrize("drift", [0.5, -0.5])
def test_a_hundred_thousand_tokens_stay_finite(name, drift):
    """A drift of 0.5 per token: the product of the ratios is e^50000."""
    size = 100_000
    old = torch.full((size + 1,), -2.0)
    signs = torch.cat([torch.ones(size), -torch.ones(1)])
    bounds = torch.tensor([0, size, size + 1])
    columns = TokenColumns(old + drift, old, old, signs, torch.ones(size + 1, dtype=torch.bool), bounds, old)
    for objective in (variant(name), variant(name, masks=())):
        result = coefficients(objective, columns)
        assert torch.isfinite(result.values).all()
        finalize(result.metrics)
