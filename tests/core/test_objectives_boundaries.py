"""The parts of a coefficient at their bounds, by hand: which side a bound belongs to, and what it must not touch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from core_batches import columns_of, likely_columns, objectives, seed_strategy, take
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.core.metrics import finalize
from megarl.core.objectives import (
    BatchFacts,
    Denominators,
    Factor,
    Gate,
    Mask,
    Objective,
    Penalty,
    TokenColumns,
    TopK,
    coefficients,
    gather_facts,
    policy_loss,
)
from megarl.core.objectives.columns import PolicyRatios, prepare
from megarl.core.objectives.masks import FLOOR, find_trusted, measure
from megarl.core.objectives.weights import adaptive_power, gate_values, importance_weight, kl_penalty
from megarl.core.ratios import LOGPROB_TOLERANCE
from megarl.errors import NumericsError

PLAIN = Objective("group_mean", "token-mean")
"""Weight 1, no mask: a coefficient is A / T."""
E = math.e


def test_the_largest_log_probability_may_lie_beside_wider_columns():
    """In fp32 the tolerance is a little more than in fp64."""
    wide = columns_of([29.0])
    narrow = dataclasses.replace(wide, rollout_logprobs=torch.tensor([LOGPROB_TOLERANCE]))
    assert narrow.rollout_logprobs.dtype == torch.float32
    assert prepare(narrow).keep.tolist() == [True]
    assert prepare(narrow).rollout_logprobs.dtype == torch.float64, "that of the widest column"
    for above in (1.0011e-3, math.nan):
        with pytest.raises(NumericsError, match="rollout_logprobs"):
            prepare(dataclasses.replace(narrow, rollout_logprobs=torch.tensor([above])))


@pytest.mark.parametrize("shape", [(2, 3), (3, 1)])
def test_the_rows_of_a_padded_batch_are_sequences(shape):
    rows, width = shape
    names = ("old_logprobs", "rollout_logprobs", "advantages")
    batch = {name: torch.full(shape, -float(number)) for number, name in enumerate(names, 1)}
    batch["loss_mask"] = torch.ones(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape)
    found = TokenColumns.of_padded(logprobs, batch)
    assert found.cu_seqlens.tolist() == list(range(0, rows * width + 1, width))
    assert found.ref_logprobs is None
    assert all(getattr(found, name).tolist() == batch[name].flatten().tolist() for name in batch)
    with_ref = TokenColumns.of_padded(logprobs, batch | {"ref_logprobs": logprobs - 7})
    assert with_ref.ref_logprobs is not None
    assert with_ref.ref_logprobs.tolist() == [-7] * logprobs.numel()
    with pytest.raises(ValueError, match=r"logprobs is .*, expected \[b, s\]; packed columns"):
        TokenColumns.of_padded(logprobs.flatten(), batch)
    for name in batch:
        with pytest.raises(ValueError, match=f"the batch has no {name}"):
            TokenColumns.of_padded(logprobs, {other: column for other, column in batch.items() if other != name})
        with pytest.raises(ValueError, match=rf"{name} is \[{rows * width}\], expected .* like logprobs$"):
            TokenColumns.of_padded(logprobs, batch | {name: batch[name].flatten()})


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_every_advantage_that_is_not_finite_is_found(wrong):
    with pytest.raises(NumericsError, match=r"advantages is .* at token 1"):
        prepare(columns_of([0.0, 0.0], advantages=[-1.0, wrong]))


def test_columns_are_0_where_a_token_does_not_train():
    state = prepare(columns_of([1.0, 2.0, 3.0], old=[0.0, -math.inf, 0.0], ref=0.0, mask=[True, True, False]))
    assert state.keep.tolist() == [True, False, False]
    for column in (state.logprobs, state.old_logprobs, state.rollout_logprobs, state.advantages, state.ref_logprobs):
        assert column is not None
        assert column[1:].tolist() == [0, 0]


def replaced(**changes: Any) -> Objective:
    return dataclasses.replace(PLAIN, **changes)


def weigh(columns: TokenColumns, *factors: Factor, exponent=None) -> tuple[list[float], dict[str, float]]:
    state = prepare(columns)
    many = len(factors)
    values, metrics = importance_weight(
        replaced(factors=factors), state, PolicyRatios(state), (exponent,) * many, (None,) * many
    )
    return ([1.0] * len(state.keep) if values is None else values.tolist()), finalize(metrics)


def trust(columns: TokenColumns, *masks: Any) -> tuple[list[bool], dict[str, float]]:
    state = prepare(columns)
    trusted, metrics = find_trusted(replaced(masks=masks), state, PolicyRatios(state), [None] * len(masks))
    return trusted.inside.tolist(), finalize(metrics)


def values_of(objective: Objective, columns: TokenColumns, *given: Any, **named: Any) -> list[float]:
    return coefficients(objective, columns, *given, **named).values.tolist()


class TestMasks:
    def test_an_outward_mask_asks_for_the_sign_of_the_advantage(self):
        for log, advantage in ((1.0, -0.5), (1.0, 0.0), (-1.0, 0.5), (-1.0, 0.0)):
            assert trust(columns_of([log], advantages=advantage), Mask.ppo()) == (
                [True], {"clip/high": 0.0, "clip/low": 0.0},
            )  # fmt: skip
        assert trust(columns_of([1.0, -1.0], advantages=[0.25, -0.25]), Mask.ppo()) == (
            [False, False], {"clip/high": 0.5, "clip/low": 0.5},
        )  # fmt: skip

    def test_masks_of_one_kind_count_what_any_of_them_drops(self):
        columns = columns_of([1.0, 0.0, 0.0], old=0.0, mu=[0.0, -1.0, 0.0], advantages=0.5)
        masks = Mask.ppo(), dataclasses.replace(Mask.ppo(), policies="old_mu")
        assert trust(columns, *masks) == ([False, False, True], {"clip/high": pytest.approx(2 / 3), "clip/low": 0.0})

    @pytest.mark.parametrize("strict", [True, False])
    def test_a_ratio_of_1_leads_nowhere(self, strict):
        """An outward mask of a divergence passes what has not moved, though 0 is at its strict bound."""
        mask = Mask("theta_old", "tv", high=0.0, sign="outward", strict=strict)
        assert trust(columns_of([0.0, 0.0], advantages=[1.0, -1.0]), mask)[0] == [True, True]
        assert trust(columns_of([1.0, -1.0, -1.0, 1.0], advantages=[1.0, -1.0, 1.0, -1.0]), mask)[0] == [
            False, False, True, True,
        ]  # fmt: skip

    def test_the_ratio_of_many_tokens_may_overflow(self):
        assert trust(columns_of([20.0] * 40), Mask.ppo(scope="sequence_sum"))[0] == [False] * 40
        below = columns_of([-20.0] * 3, advantages=-1.0)
        assert trust(below, Mask.ppo(0.0, scope="sequence_sum"))[0] == [True] * 3

    def test_a_mask_of_bad_tokens_drops_no_others(self):
        logs = [math.log(2) + 1e-9, math.log(2) - 1e-9, math.log(2) + 1e-9, math.log(2) + 1e-9]
        columns = columns_of(logs, advantages=[-0.5, -0.5, 0.5, 0.0])
        assert trust(columns, Mask("theta_old", high=2.0, sign="negative")) == (
            [False, True, True, True], {"clip/negative": 0.25},
        )  # fmt: skip
        grown = Mask("theta_old", "log_ratio", high=0.5, sign="negative", growth=1.0)
        logs = [0.5, 1.0, 1.0 + 2**-10 + 0.5]
        assert trust(columns_of(logs, advantages=-1.0), grown)[0] == [True, True, False]

    def test_a_certain_token_has_a_finite_divergence(self):
        """What is left of theta = 1 counts as 1e-8, and so does a top token that theta excludes."""
        state = prepare(columns_of([30.0], mu=29.5))
        rest = 1 - E**-0.5
        for kind, expected in (
            ("kl", -0.5 * E**-0.5 + rest * math.log(rest / FLOOR)),
            ("kl_rev", 0.5 + FLOOR * math.log(FLOOR / rest)),
        ):
            mask = Mask("theta_mu", kind, high=1.0)
            assert float(measure(mask, state, PolicyRatios(state))) == pytest.approx(expected, rel=1e-9)
        top = TopK(*(torch.tensor([[log]], dtype=torch.float64) for log in (math.log(0.5), -math.inf)), ~state.keep)
        state = prepare(dataclasses.replace(columns_of([29.0], mu=29.0), topk=top))
        own = 1 - 1 / E
        expected = 0.5 * math.log(0.5 / FLOOR) + (own - 0.5) * math.log((own - 0.5) / own)
        found = measure(Mask("theta_mu", "topk_kl", high=1.0), state, PolicyRatios(state))
        assert float(found) == pytest.approx(expected, rel=1e-9)


class TestFactors:
    def test_a_weight_at_a_clamp_is_not_truncated(self):
        values, metrics = weigh(columns_of([0.0, 0.5, -0.5]), Factor("theta_old", high=1.0))
        assert values == pytest.approx([1.0, 1.0, math.exp(-0.5)])
        assert metrics["tis/truncated"] == pytest.approx(1 / 3)
        values, metrics = weigh(columns_of([0.0, 0.5, -0.5]), Factor("theta_old", low=1.0))
        assert values == pytest.approx([1.0, math.exp(0.5), 1.0])
        assert metrics["tis/truncated"] == pytest.approx(1 / 3)

    @pytest.mark.parametrize(
        "factor",
        [
            Factor("theta_old", fn="power", power=10.0),
            Factor("theta_old", fn="power", power=9e29),
            Factor("theta_old", fn="vespo", vespo_positive=(10.0, 0.0)),
        ],
    )
    def test_factors_of_extreme_ratios_stay_finite_in_fp32(self, factor):
        wide = columns_of([30.0, 0.0])
        columns = TokenColumns(
            *(column.float() for column in wide.float_columns().values()), wide.loss_mask, wide.cu_seqlens
        )
        values, _ = weigh(columns, factor, Factor("old_mu"))
        assert values == pytest.approx([math.exp(40.0), 1.0], rel=1e-5)
        assert torch.isfinite(coefficients(replaced(factors=(factor,)), columns).values).all()

    def test_the_ratio_of_several_tokens_is_bounded_on_both_sides(self):
        """Product of 3 tokens at +-20: at most exp(log_ratio_cap), at least exp(-20), which is not 0 in fp32."""
        factor = Factor("theta_old", "sequence_sum", log_ratio_cap=3.0)
        assert weigh(columns_of([20.0] * 3), factor)[0] == pytest.approx([math.exp(3.0)] * 3)
        assert weigh(columns_of([-20.0] * 3), factor)[0] == pytest.approx([math.exp(-20.0)] * 3, rel=1e-12)
        single = Factor("theta_old", fn="power", power=1.0, log_ratio_cap=3.0)
        assert weigh(columns_of([5.0]), single)[0] == pytest.approx([E**5]), "the cap is for several tokens"

    def test_a_shared_power_is_used(self):
        factor = Factor("theta_old", fn="adaptive_power", ess_target=0.9)
        values, metrics = weigh(columns_of([1.0, -1.0]), factor, exponent=0.25)
        assert values == pytest.approx([E**0.25, E**-0.25])
        assert metrics["tis/power"] == 0.25


class TestGates:
    """S itself: a coefficient does not show it where A is 0."""

    def test_of_each_sign(self):
        state = prepare(columns_of([1.0] * 3, advantages=[0.5, 0.0, -0.5]))

        def values(kind) -> list[float]:
            return gate_values(Gate(kind, 1.0, 2.0, 0.5), state, PolicyRatios(state)).tolist()

        fading = [4 * p * (1 - p) for p in (1 / (1 + math.exp(-t * (E - 1))) for t in (1.0, 2.0, 2.0))]
        assert values("sapo") == pytest.approx(fading)
        assert values("ce_gppo") == pytest.approx([1.5 / E, 1, 1])
        low = prepare(columns_of([-1.0] * 2, advantages=[0.0, -0.5]))
        below = gate_values(Gate("ce_gppo", 1.0, 2.0, 0.5), low, PolicyRatios(low)).tolist()
        assert below == pytest.approx([1, 2 * 0.5 * E])
        moved = math.exp(-29.0) - math.exp(-30.0)
        assert values("drpo") == pytest.approx([1 - moved, 1.0, 1 + moved / 2], abs=1e-16)

    def test_ce_gppo_at_its_bounds(self):
        """The window ends where the ratio is, as a float: what stands at the end keeps S = 1, not beta."""
        for log, sign in ((0.25, 1.0), (-0.25, -1.0)):
            rho = float(torch.tensor(log, dtype=torch.float64).exp())
            state = prepare(columns_of([log], advantages=sign))
            for eps, expected in ((abs(rho - 1), 1.0), (abs(rho - 1) - 2**-40, 0.25)):
                gate = gate_values(Gate("ce_gppo", 0.25, 0.25, eps), state, PolicyRatios(state))
                assert float(gate) == pytest.approx(expected, rel=1e-9)


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
        assert adaptive_power(torch.tensor([3.0]), torch.tensor([False]), 0.9) == 1.0, "nothing to weigh"

    def test_entries_without_a_share_do_not_count(self):
        logs, shares = torch.tensor([1.0, -1.0, 1000.0]), torch.tensor([1.0, 1.0, 0.0])
        assert adaptive_power(logs, shares, 0.8) == pytest.approx(math.acosh(5 / 3) / 2, abs=1e-11)


class TestPenalties:
    @pytest.mark.parametrize(
        ("kind", "derivatives", "mean"),
        [
            ("k1", [1, 1], 0.25),
            ("k2", [1.0, -0.5], (0.5 + 0.125) / 2),
            ("k3", [1 - E**-1, 1 - E**0.5], (E**-1 + E**0.5 + 0.5 - 2) / 2),
            ("unbiased", [E**3, -0.5 * E**1.5], (E**2 + E**1.5 * (E**0.5 - 1.5)) / 2),
        ],
    )
    def test_derivative_and_value(self, kind, derivatives, mean):
        """d = (1, -0.5); theta/mu, which only "unbiased" reads here, is (e^3, e^1.5)."""
        for to, name in (("ref", "kl/penalty"), ("old", "kl/penalty_old")):
            state = prepare(columns_of([1.0, -0.5], mu=[-2.0, -2.0], ref=0.0))
            gradient, stats = kl_penalty(Penalty(kind, to, 0.3, "mu"), state, PolicyRatios(state))
            assert gradient.tolist() == pytest.approx(derivatives)
            assert finalize(stats) == pytest.approx({name: mean, f"{name}_clamped": 0})

    def test_clamped_tokens_are_counted_on_both_sides(self):
        state = prepare(columns_of([20.0, -25.0, 19.5, 0.0], ref=0.0))
        assert finalize(kl_penalty(Penalty("k2"), state, PolicyRatios(state))[1])["kl/penalty_clamped"] == 0.5

    def test_an_estimate_at_its_maximum_keeps_its_gradient(self):
        """k2 of 1 is exactly 0.5; a k1 of -1 is beyond 0.5 too; a token clamped at 20 counts beside them."""
        state = prepare(columns_of([1.0, 1.0 + 2**-20, -1.0, 20.0], ref=0.0))
        gradient, stats = kl_penalty(Penalty("k2", max=0.5), state, PolicyRatios(state))
        assert gradient.tolist() == [1.0, 0.0, -1.0, 0.0]
        assert finalize(stats)["kl/penalty_clamped"] == 0.5
        assert kl_penalty(Penalty("k1", max=0.5), state, PolicyRatios(state))[0].tolist() == [0.0] * 4
        stats = kl_penalty(Penalty("k2", max=500.0), state, PolicyRatios(state))[1]
        assert finalize(stats)["kl/penalty_clamped"] == 0.25


class TestDenominators:
    @pytest.mark.parametrize("denominators", [Denominators(1, 5), Denominators(5, 0)])
    def test_one_that_is_too_small_is_enough_to_refuse(self, denominators):
        with pytest.raises(ValueError, match="smaller than this part's own"):
            coefficients(PLAIN, columns_of([0.0, 0.0]), denominators)
        leaving = replaced(masks=(Mask("old_mu", high=2.0, denominator="leave"),))
        assert values_of(leaving, columns_of([0.0, 0.0]), Denominators(1, 0)) == [1.0, 1.0], "tokens may have left"

    @pytest.mark.parametrize(
        ("aggregation", "keep", "leave", "leave_tokens"),
        [
            ("token-mean", [1 / 4] * 3, [1 / 2] * 3, [1 / 2] * 3),
            ("seq-mean-token-sum", [1 / 3] * 3, [1 / 2] * 3, [1 / 3] * 3),
            ("seq-mean-token-mean", [1 / 6, 1 / 3, 1 / 3], [1 / 2] * 3, [1 / 3] * 3),
            ("seq-mean-token-sum-norm", [1 / 12] * 3, [1 / 8] * 3, [1 / 12] * 3),
        ],
    )
    def test_what_dropped_tokens_leave(self, aggregation, keep, leave, leave_tokens):
        """Three responses: half dropped, dropped, kept. A penalty shows the denominator of the dropped ones too."""
        columns = columns_of([0.0] * 4, mu=[0.0, -1.0, -1.0, 0.0], cu_seqlens=[0, 2, 3, 4])
        length = 4 if aggregation.endswith("norm") else None
        for denominator, (half, gone, stays) in (("keep", keep), ("leave", leave), ("leave_tokens", leave_tokens)):
            mask = Mask("old_mu", high=2.0, denominator=denominator)  # type: ignore[arg-type]
            row = replaced(aggregation=aggregation, norm_length=length, masks=(mask,))
            assert values_of(row, columns) == pytest.approx([half, 0, 0, stays])
            penalised = dataclasses.replace(row, penalties=(Penalty("k1", "mu", coef=1.0),), entropy_coef=2.0)
            found = coefficients(penalised, columns)
            assert found.values.tolist() == pytest.approx([0, -half, -gone, 0])
            assert found.entropy is not None
            assert found.entropy.tolist() == pytest.approx([2 * half, 2 * half, 2 * gone, 2 * stays])

    @pytest.mark.parametrize("order", [1, -1])
    def test_masks_that_leave_in_different_ways(self, order):
        """The response whose token leaves only the tokens stays; the other leaves altogether."""
        masks = (Mask("old_mu", high=2.0, denominator="leave"), Mask("old_mu", low=0.5, denominator="leave_tokens"))
        columns = columns_of([0.0] * 3, mu=[-1.0, 1.0, 0.0], cu_seqlens=[0, 1, 2, 3])
        for aggregation, expected in (("token-mean", 1.0), ("seq-mean-token-sum", 0.5)):
            row = replaced(aggregation=aggregation, masks=masks[::order])
            assert values_of(row, columns) == [0, 0, expected]
            facts = gather_facts(row, [columns])
            assert facts is not None
            assert facts.denominators == Denominators(1, 2)


class TestFactsOfABatch:
    def test_a_power_is_that_of_all_tokens(self):
        factor = Factor("theta_old", fn="adaptive_power", ess_target=0.8)
        parts = [columns_of([1.0]), columns_of([-1.0])]
        facts = gather_facts(replaced(factors=(factor,)), parts)
        assert facts is not None
        assert facts.exponents == (pytest.approx(math.acosh(5 / 3) / 2, abs=1e-9),)
        assert (facts.means, facts.denominators) == ((None,), None)

    @pytest.mark.parametrize(("scope", "mean"), [("token", (2 * E + 1) / 3), ("sequence_sum", (E**2 + 1) / 2)])
    def test_a_mean_of_tokens_or_of_responses(self, scope, mean):
        columns = columns_of([1.0, 9.0, 1.0, 0.0, 0.0], mask=[True, False, True, True, False], cu_seqlens=[0, 3, 4, 5])
        row = replaced(factors=(Factor("theta_old", scope, batch_normalize=True),))
        facts = gather_facts(row, [columns])
        assert facts is not None
        assert facts.means == (pytest.approx(mean),)
        over_ranks = gather_facts(row, [columns], lambda sums: sums + torch.tensor([6.0, 1.0]))
        assert over_ranks is not None
        count = 3 if scope == "token" else 2
        assert over_ranks.means == (pytest.approx((mean * count + 6) / (count + 1)),)

    def test_without_tokens_nothing_changes(self):
        factor = Factor("theta_old", fn="adaptive_power", batch_normalize=True)
        row = replaced(factors=(factor, Factor("old_mu")))
        facts = gather_facts(row, [columns_of([1.0], mask=[False])])
        expected = BatchFacts((1.0, None), (1.0, None), (None,) * len(row.masks))
        assert facts == expected == BatchFacts.of_equal_policies(row)

    @settings(max_examples=60, deadline=None)
    @given(objectives(), seed_strategy, st.lists(st.integers(0, 6), min_size=2, max_size=6), st.data())
    def test_however_a_batch_is_cut(self, objective, seed, lengths, data):
        """Facts and coefficients of micro-batches are those of the whole, over two ranks with equal tokens as well."""
        assume(objective.beforehand)
        columns = likely_columns(seed, lengths)
        cut = data.draw(st.integers(1, len(lengths) - 1))
        parts = [take(columns, list(range(cut))), take(columns, list(range(cut, len(lengths))))]
        whole, found = gather_facts(objective, [columns]), gather_facts(objective, parts)
        doubled = gather_facts(objective, parts, lambda sums: 2 * sums)
        assert whole is not None
        for facts, times in ((found, 1), (doubled, 2)):
            assert facts is not None
            for mine, theirs in ((facts.exponents, whole.exponents), (facts.means, whole.means)):
                assert mine == tuple(None if x is None else pytest.approx(x, rel=1e-9, abs=1e-9) for x in theirs)
            assert (facts.denominators is None) == (whole.denominators is None) == (not objective.leaves)
            if facts.denominators is not None and whole.denominators is not None:
                left = whole.denominators
                assert facts.denominators == Denominators(times * left.num_tokens, times * left.num_sequences)
        counts = Denominators.of(columns.loss_mask, columns.cu_seqlens)
        values = torch.cat([coefficients(objective, part, counts, facts=whole).values for part in parts])
        torch.testing.assert_close(values, coefficients(objective, columns).values, rtol=1e-9, atol=1e-12)


class TestSums:
    def test_dropped_and_invalid_tokens_are_told_apart(self):
        columns = columns_of([0.0] * 4, mask=[True, True, True, False])
        columns.rollout_logprobs[0] = columns.logprobs[1] = columns.rollout_logprobs[3] = -math.inf
        result = coefficients(PLAIN, columns)
        metrics = finalize(result.metrics)
        assert (metrics["loss_tokens"], metrics["logprobs/invalid"], metrics["logprobs/dropped"]) == (2, 1, 1)
        assert result.values.tolist() == [0, 0, 0.5, 0]

    def test_a_log_probability_of_minus_infinity_beside_others_leaves_the_loss_finite(self):
        columns = columns_of([0.0, 0.0])
        columns.logprobs[1] = -math.inf
        assert policy_loss(PLAIN, columns)[0].item() == 15.0
        entropies = torch.tensor([0.5, math.inf], dtype=torch.float64)
        with_entropy = policy_loss(replaced(entropy_coef=0.2), columns, entropies=entropies)[0]
        assert with_entropy.item() == 15.0 - 0.2 * 0.5 / 2
