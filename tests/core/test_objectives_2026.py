"""Published numbers and limits of the rows of 2026: hand-computed oracles, term by term.

Vectors V: one response of five tokens, with the probabilities that theta, old and mu give to each.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.core.advantages import gdpo, opo, raw, raw_mixed, reinforce_pp, reinforce_pp_baseline, rloo
from megarl.core.metrics import finalize
from megarl.core.objectives import (
    OBJECTIVES,
    BatchFacts,
    Factor,
    Mask,
    Objective,
    Penalty,
    TokenColumns,
    TopK,
    coefficients,
    gather_facts,
    policy_loss,
)
from megarl.core.objectives.columns import prepare
from megarl.core.objectives.masks import measure
from megarl.core.objectives.policy_ratios import PolicyRatios
from megarl.errors import ConfigError

THETA = [0.60, 0.02, 0.97, 0.50, 0.30]
OLD = [0.55, 0.01, 0.70, 0.75, 0.30]
MU = [0.50, 0.0005, 0.60, 0.72, 0.55]
W = [1.2, 40.0, 1.6166666666666667, 0.6944444444444444, 0.5454545454545454]
PLAIN = Objective("group_mean", "seq-mean-token-sum")
"""Weight 1, no mask, D = 1 for one response: a coefficient is A."""


def columns(theta: Any, old: Any = None, mu: Any = None, advantages: Any = 1.0, lengths=None, ref=None) -> TokenColumns:
    """Columns of probabilities, one response unless lengths are given. old and mu are theta where they are left out."""
    logs = [torch.tensor(theta if each is None else each, dtype=torch.float64).log() for each in (theta, old, mu, ref)]
    total = logs[0].numel()
    values = torch.as_tensor(advantages, dtype=torch.float64).expand(total).clone()
    bounds = torch.tensor([0, *itertools.accumulate([total] if lengths is None else lengths)])
    keep = torch.ones(total, dtype=torch.bool)
    return TokenColumns(*logs[:3], values, keep, bounds, None if ref is None else logs[3])


def of_gaps(gaps: list[list[float]], advantages: Any = 1.0) -> TokenColumns:
    """Responses with the given ln old/mu, and theta = old."""
    flat = torch.tensor([gap for one in gaps for gap in one], dtype=torch.float64)
    mu = torch.full_like(flat, -3.0)
    values = torch.as_tensor(advantages, dtype=torch.float64).expand(len(flat)).clone()
    bounds = torch.tensor([0, *itertools.accumulate(len(one) for one in gaps)])
    return TokenColumns(mu + flat, mu + flat, mu, values, torch.ones(len(flat), dtype=torch.bool), bounds)


def vectors(sign: float) -> TokenColumns:
    return columns(THETA, OLD, MU, sign)


def plain(name: str, **changes: Any) -> Objective:
    """A row with D = 1 for one response."""
    return dataclasses.replace(OBJECTIVES[name], aggregation="seq-mean-token-sum", norm_length=None, **changes)


def check(objective: Objective, batch: TokenColumns, expected: Any, tolerance: float = 1e-9) -> None:
    """Tolerance relative to the largest of the numbers, which are printed with ten decimals."""
    actual = coefficients(objective, batch).values
    scale = max(1.0, float(np.abs(expected).max()))
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance * scale, msg=lambda told: told
    )


def statistic(mask: Mask, batch: TokenColumns) -> Tensor:
    state = prepare(batch)
    return measure(mask, state, PolicyRatios(state))


def times(weights: list[float], kept: list[int], sign: float = 1.0) -> list[float]:
    return [sign * weight * keep for weight, keep in zip(weights, kept, strict=True)]


class TestDPPO:
    """Section 1."""

    @pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
    def test_both_masks_and_signs(self, name):
        check(plain(name), vectors(1.0), times(W, [1, 1, 0, 1, 1]))
        check(plain(name), vectors(-1.0), times(W, [1, 1, 1, 0, 0], -1.0))

    def test_the_binary_divergence(self):
        expected = [0.0204109973, 0.0178482913, 0.7478870164, 0.1001938631, 0.1345499534]
        found = statistic(Mask("theta_mu", "kl", high=1.0), vectors(1.0))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)
        tv = statistic(Mask("theta_mu", "tv", high=1.0), vectors(1.0))
        torch.testing.assert_close(tv, torch.tensor([0.1, 0.0195, 0.37, 0.22, 0.25], dtype=torch.float64))

    def test_the_classes_of_the_samplers_top_k(self):
        """mu = (.5, .3, .15, .05), theta = (.3, .45, .05, .2), the last is sampled, K = 1."""
        mu, theta = [0.5, 0.3, 0.15, 0.05], [0.3, 0.45, 0.05, 0.2]
        batch = columns([0.2], mu=[0.05])
        top = TopK(*(torch.tensor([[p]], dtype=torch.float64).log() for p in (0.5, 0.3)), torch.tensor([False]))
        batch = dataclasses.replace(batch, topk=top)
        values = {
            kind: float(statistic(Mask("theta_mu", kind, high=1.0), batch))
            for kind in ("topk_tv", "topk_kl", "tv", "kl")
        }
        expected = {"topk_tv": 0.2, "topk_kl": 0.1386858618, "tv": 0.15, "kl": 0.0939430260}
        assert values == pytest.approx(expected, abs=1e-10)
        all_of_them = TopK(*(torch.tensor([p], dtype=torch.float64).log() for p in (mu, theta)), torch.tensor([True]))
        full = dataclasses.replace(batch, topk=all_of_them)
        assert float(statistic(Mask("theta_mu", "topk_tv", high=1.0), full)) == pytest.approx(0.3, abs=1e-8)
        assert float(statistic(Mask("theta_mu", "topk_kl", high=1.0), full)) == pytest.approx(0.2292504047, abs=1e-7)
        with pytest.raises(ConfigError, match="topk"):
            coefficients(OBJECTIVES["dppo_topk"], columns([0.05], mu=[0.15]))

    def test_the_minimal_mask(self):
        """Only A < 0 with mu - theta >= 0.5: strict, so that half a probability is too much."""
        batch = columns([0.1, 0.125, 0.3], mu=[0.9, 0.5, 0.6], advantages=-1.0)
        check(plain("minimal_mask"), batch, [0.0, -0.25, -0.5])
        check(plain("minimal_mask"), dataclasses.replace(batch, advantages=-batch.advantages), [1 / 9, 0.25, 0.5])


class TestGapMasks:
    """Section 3: IcePop, KPop, DIS."""

    def test_kpop_in_both_directions(self):
        forward = [0.0050083668, 0.0205026140, 0.0216008541, 0.0022843246, 0.1274421855]
        reverse = [0.0050251679, 0.0080475696, 0.0225824211, 0.0023401958, 0.1345499534]
        found = {
            kind: statistic(Mask("old_mu", kind, high=1.0), vectors(1.0)).tolist()
            for kind in ("kl_rev", "kl", "kl_sym")
        }
        assert found["kl_rev"] == pytest.approx(forward, abs=1e-10)
        assert found["kl"] == pytest.approx(reverse, abs=1e-10)
        assert found["kl_sym"] == pytest.approx([max(pair) for pair in zip(forward, reverse, strict=True)], abs=1e-10)

    @pytest.mark.parametrize(("kind", "kept"), [("kl", [1, 1, 0, 1, 0]), ("kl_sym", [1, 0, 0, 1, 0])])
    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_kpop_drops_whatever_the_sign(self, kind, kept, sign):
        row = plain("kpop", masks=(Mask("old_mu", kind, high=0.01),), factors=())
        check(row, vectors(sign), times([1.0] * 5, kept, sign))

    def test_kpop_of_a_rare_token(self):
        batch = columns([0.01], [0.01], [0.2])
        assert float(statistic(Mask("old_mu", "kl_rev", high=1.0), batch)) == pytest.approx(0.1810049606, abs=1e-10)
        assert float(statistic(Mask("old_mu", "kl", high=1.0), batch)) == pytest.approx(0.4286718823, abs=1e-10)


class TestDeepSeekV32:
    """Section 4."""

    def test_unbiased_kl(self):
        batch = columns([0.6, 0.02, 0.3], [0.5, 0.04, 0.3], ref=[0.3, 0.4, 0.3], advantages=0.0)
        check(_kl("unbiased"), batch, [-0.8317766167, 1.4978661368, 0.0])
        # What a detached u, and no u, would give.
        d = np.log([0.6 / 0.3, 0.02 / 0.4, 1.0])
        u = np.array([0.6 / 0.5, 0.02 / 0.04, 1.0])
        assert (u * -np.expm1(-d)) == pytest.approx([0.6, -9.5, 0.0], abs=1e-12)
        check(_kl("k3"), batch, [-0.5, 19.0, 0.0])

    def test_its_expectation_is_the_gradient_of_the_kl(self):
        """All outcomes of a distribution over five tokens, sampled from old."""
        generator = np.random.default_rng(4)
        logits, old, ref = generator.normal(size=(3, 5))

        def softmax(z):
            return np.exp(z) / np.exp(z).sum()

        p, q, o = softmax(logits), softmax(ref), softmax(old)
        found = coefficients(_kl("unbiased"), columns(p, o, advantages=0.0, lengths=[1] * 5, ref=q)).values * 5
        # d lp_y / d z_v = 1[v = y] - p_v
        expected = sum(o[y] * -float(found[y]) * (np.eye(5)[y] - p) for y in range(5))
        exact = p * (np.log(p / q) - (p * np.log(p / q)).sum())
        assert expected == pytest.approx(exact, abs=1e-12)
        plain_k3 = coefficients(_kl("k3"), columns(p, o, advantages=0.0, lengths=[1] * 5, ref=q)).values * 5
        biased = sum(o[y] * -float(plain_k3[y]) * (np.eye(5)[y] - p) for y in range(5))
        assert np.abs(biased - exact).max() > 1e-2


def _kl(estimator: Any, **changes: Any) -> Objective:
    return dataclasses.replace(PLAIN, penalties=(Penalty(estimator, coef=1.0, **changes),))


class TestRolloutCorrection:
    """Section 5: ln old/mu = (.3, .2, .4), (-.1, .05)."""

    GAPS = ([0.3, 0.2, 0.4], [-0.1, 0.05])

    def test_products_and_geometric_means(self):
        batch = of_gaps(list(self.GAPS))
        products = statistic(Mask("old_mu", scope="sequence_sum", high=9.0), batch)
        geometric = statistic(Mask("old_mu", scope="sequence_mean", high=9.0), batch)
        assert products.tolist() == pytest.approx([2.4596031112] * 3 + [0.9512294245] * 2, abs=1e-10)
        assert geometric.tolist() == pytest.approx([1.3498588076] * 3 + [0.9753099120] * 2, abs=1e-10)

    def test_geo_rs_leaves_the_denominator(self):
        batch = of_gaps([[0.3, 0.2, 0.4], [0.001, -0.001], [0.002, 0.001]])
        check(OBJECTIVES["geo_rs"], batch, [0, 0, 0, 0.5, 0.5, 0, 0])

    @pytest.mark.parametrize(
        ("where", "each"), [("keep", 1 / (2 * 2)), ("leave", 1 / 2), ("leave_tokens", 1 / (2 * 2))]
    )
    def test_rejected_responses_in_the_mean_over_responses(self, where, each):
        mask = Mask("old_mu", scope="sequence_sum", high=2.0, denominator=where)
        row = Objective("group_mean", "seq-mean-token-mean", masks=(mask,))
        check(row, of_gaps(list(self.GAPS)), [0, 0, 0, each, each])

    def test_truncated_weights_divided_by_their_mean(self):
        row = Objective("group_mean", "seq-mean-token-sum", factors=(Factor("old_mu", high=1.4, batch_normalize=True),))
        batch = of_gaps([[0.3, 0.2, 0.4, -0.1, 0.05]])
        facts = gather_facts(row, [batch])
        assert isinstance(facts, BatchFacts)
        assert facts.means[0] == pytest.approx(1.1854740160, abs=1e-10)
        check(row, batch, [1.1386658749, 1.0303074902, 1.1809621983, 0.7632705617, 0.8867938750])

    def test_sequence_weights_are_averaged_over_responses(self):
        factor = Factor("old_mu", scope="sequence_sum", high=2.0, batch_normalize=True)
        row = Objective("group_mean", "token-mean", factors=(factor,))
        mean = (2.0 + 0.9512294245) / 2
        check(row, of_gaps(list(self.GAPS)), np.array([2.0] * 3 + [0.9512294245] * 2) / mean / 5)


class TestOthers:
    """Section 6."""

    def test_gpg_is_a_row_without_a_ratio(self):
        row = dataclasses.replace(OBJECTIVES["reinforce"], aggregation="token-mean")
        check(row, vectors(-1.0), [-0.2] * 5)

    def test_sum_norm_divides_by_responses_and_length(self):
        """x = [[1, 2, 3], [10]], L = 4: 2.0, not 4.0."""
        row = Objective("group_mean", "seq-mean-token-sum-norm", norm_length=4)
        batch = columns([0.5] * 4, advantages=[1.0, 2.0, 3.0, 10.0], lengths=[3, 1])
        assert float(coefficients(row, batch).values.sum()) == pytest.approx(2.0, abs=1e-12)


class TestSecondTerms:
    """Section 7."""

    def test_entropy_in_the_logits(self):
        """dz_v = c (1[v = y] - p_v) - e p_v (ln p_v + H), with c = 1 and e = 0.1."""
        logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        logs = logits.log_softmax(0)
        entropy = -(logs.exp() * logs).sum()
        assert float(entropy.detach()) == pytest.approx(0.8323955818, abs=1e-10)
        fixed = logs[:1].detach()
        one = torch.ones(1, dtype=torch.bool)
        batch = TokenColumns(logs[:1], fixed, fixed, torch.ones(1).double(), one, torch.tensor([0, 1]))
        row = dataclasses.replace(PLAIN, entropy_coef=0.1)
        policy_loss(row, batch, entropies=entropy.reshape(1))[0].backward()
        assert logits.grad is not None
        assert (-logits.grad).tolist() == pytest.approx([0.9241511362, -0.2306514353, -0.6934997009], abs=1e-10)

    @pytest.mark.parametrize(
        ("aggregation", "scales"),
        [
            ("token-mean", [1 / 3] * 3),
            ("seq-mean-token-sum", [1 / 2] * 3),
            ("seq-mean-token-mean", [1 / 4, 1 / 4, 1 / 2]),
            ("seq-mean-token-sum-norm", [1 / 16] * 3),
        ],
    )
    def test_the_entropy_has_the_denominator_of_the_row(self, aggregation, scales):
        length = 8 if aggregation == "seq-mean-token-sum-norm" else None
        row = Objective("group_mean", aggregation, masks=(Mask.ppo(),), entropy_coef=0.5, norm_length=length)
        batch = columns([0.5] * 3, [0.1] * 3, lengths=[2, 1])  # all are outside of the window
        found = coefficients(row, batch)
        assert found.entropy is not None
        assert found.values.tolist() == [0.0] * 3
        assert found.entropy.tolist() == pytest.approx([0.5 * scale for scale in scales], abs=1e-15)

    def test_an_entropy_without_its_column_is_refused(self):
        with pytest.raises(ConfigError, match="entropies"):
            policy_loss(dataclasses.replace(PLAIN, entropy_coef=0.5), columns([0.5]))

    @pytest.mark.parametrize(
        ("back", "kept"), [(2.6108, True), (2.6109, False), (-10.9999, True), (-11.0, False), (3.0, False)]
    )
    def test_a_clamped_output_has_no_gradient(self, back, kept):
        """k3 of d = lp - ref passes 10 at ref - lp = 2.61087 and -10.99998."""
        low = torch.tensor([-20.0], dtype=torch.float64)
        batch = TokenColumns(
            low, low, low, torch.zeros(1).double(), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]), low + back
        )
        free = -(1 - np.exp(back))
        check(_kl("k3"), batch, [free])
        check(_kl("k3", max=10.0), batch, [free if kept else 0.0])
        metrics = finalize(coefficients(_kl("k3", max=10.0), batch).metrics)
        assert metrics["kl/penalty_clamped"] == float(not kept)

    def test_the_input_is_clamped_in_any_case(self):
        low = torch.tensor([-40.0], dtype=torch.float64)
        batch = TokenColumns(
            low, low, low, torch.zeros(1).double(), torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]), low + 30.0
        )
        check(_kl("k2"), batch, [20.0])


class TestAdvantages:
    """Sections 8 and 9."""

    REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    ONE = torch.zeros(4, dtype=torch.int64)
    LENGTHS = torch.tensor([2, 4, 6, 8])

    def test_weighted_by_length(self):
        assert opo(self.REWARDS, self.ONE, self.LENGTHS).tolist() == pytest.approx([0.9, -0.1, -0.1, -0.1])
        expected = [2.9240381491] + [-0.3248931277] * 3
        for function in (reinforce_pp, reinforce_pp_baseline):
            assert function(self.REWARDS, self.ONE, self.LENGTHS).tolist() == pytest.approx(expected, abs=1e-9)

    def test_rloo_without_aborted_responses(self):
        valid = torch.tensor([True, True, True, False])
        assert rloo(self.REWARDS, self.ONE, valid).tolist() == [1.0, -0.5, -0.5, 0.0]
        assert rloo(torch.tensor([1.0]), torch.tensor([0])).tolist() == [0.0]

    def test_reinforce_rej(self):
        mixed = torch.tensor([1.0, 0.0, 0.0, 1.0])
        assert raw_mixed(mixed, self.ONE).tolist() == [1.0, 0.0, 0.0, 1.0]
        assert raw(mixed, self.ONE).tolist() == [1.0, 0.0, 0.0, 1.0]
        assert raw_mixed(torch.ones(4), self.ONE).tolist() == [0.0] * 4
        assert raw_mixed(torch.ones(1), torch.zeros(1, dtype=torch.int64)).tolist() == [1.0]

    def test_several_rewards(self):
        from megarl.core.advantages.weighted import grpo_sum

        components = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
        summed = grpo_sum(components, torch.ones(2, dtype=torch.float64), self.ONE)
        expected = [2.3660209038, 0.3660249038, -1.3660229038, -1.3660229038]
        assert summed.tolist() == pytest.approx(expected, abs=1e-9)
        whitened = gdpo(components, torch.ones(2, dtype=torch.float64), self.ONE, self.LENGTHS)
        tokens = whitened.repeat_interleave(self.LENGTHS)
        assert (float(tokens.mean()), float(tokens.var())) == pytest.approx((0.0, 1.0), abs=1e-6)
