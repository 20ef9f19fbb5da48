"""Objectives against hand-computed numbers, invariants, unusual values and refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from core_batches import (
    ROWS,
    columns_of,
    columns_of_probabilities,
    lengths_strategy,
    random_columns,
    seed_strategy,
    slow_coefficients,
    take,
    variant,
    with_logprobs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.metrics import finalize, merge
from megarl.core.objectives import (
    OBJECTIVES,
    Denominators,
    Factor,
    Mask,
    Penalty,
    TokenColumns,
    TopK,
    coefficients,
    gather_facts,
    policy_loss,
)
from megarl.core.objectives.columns import prepare
from megarl.errors import ConfigError, NumericsError

PPO, RATIO, WEIGHT = Mask.ppo(), Factor("theta_old"), Factor("theta_mu")
EVERY_OBJECTIVE = {
    **{name: row for name, row in ROWS.items() if not row.needs_topk},
    "norm": variant("minirl", aggregation="seq-mean-token-sum-norm", norm_length=7),
    "ctpo literal": variant("ctpo", prefix_grad=True, factors=(Factor("theta_old", "prefix"),)),
    "ctpo with its sequence weight": variant(
        "ctpo", factors=(*OBJECTIVES["ctpo"].factors, Factor("old_mu", "sequence_sum", high=5.0))
    ),
    "dual clip": variant("grpo", masks=(PPO, Mask("theta_old", high=1.5, sign="negative"))),
    "future mean literal": variant("kl_grpo", prefix_grad=True, masks=(Mask.ppo(0.95, 1.05, scope="future_mean"),)),
    "future product literal": variant(
        "grpo", masks=(Mask.ppo(scope="future_sum"),), factors=(Factor("theta_old", "future_sum"),), prefix_grad=True
    ),
    "gap inside a window": variant(
        "dapo", masks=(Mask.ppo(high=1.28), Mask("old_mu", low=0.5, high=2.0)), factors=(RATIO, Factor("old_mu"))
    ),
    "adaptive prefix": variant(
        "adaptive_power", factors=(Factor("theta_old", "prefix", "adaptive_power", ess_target=0.9),)
    ),
    "k3": variant("minirl", penalties=(Penalty("k3", coef=0.3),)),
}
"""The rows, and records of the kinds that have no row; ``test_table`` draws any others."""


def assert_equal(actual: torch.Tensor, expected: object, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def one_response(advantage: float, theta=(0.60, 0.30, 0.90), old=(0.40, 0.32, 0.80), mu=(0.50, 0.05, 0.75)):
    return columns_of_probabilities(theta, old, mu, advantage)


@pytest.mark.parametrize(
    ("name", "changes", "advantage", "gradient", "value"),
    [
        ("minirl", {}, 0.5, [0, 2.5, 0.6], -3.073148320209536),
        ("minirl_length_norm", {}, -0.5, [-0.2, -2.5 / 3, -0.2], 3.3796436944691304 / 3),
        ("minirl", {"factors": (RATIO, Factor("old_mu", high=5.0))}, 0.5, [0, 2.34375, 0.6], None),
        ("grpo", {"masks": (Mask.ppo(high=1.27),)}, 0.5, [0, 0.46875 / 3, 0.5625 / 3], None),
    ],
)
def test_gradient_and_value_by_hand(name, changes, advantage, gradient, value):
    objective, columns = variant(name, **changes), one_response(advantage)
    assert_equal(coefficients(objective, columns).values, gradient)
    if value is not None:
        assert_equal(-policy_loss(objective, columns)[0], value)


class TestInvariants:
    @settings(max_examples=40, deadline=None)
    @given(name=st.sampled_from(sorted(EVERY_OBJECTIVE)), seed=seed_strategy, lengths=lengths_strategy, data=st.data())
    def test_micro_batches_with_shared_denominators_are_the_whole(self, name, seed, lengths, data):
        columns, objective = random_columns(seed, lengths), EVERY_OBJECTIVE[name]
        cut = data.draw(st.integers(0, len(lengths)))
        parts = [list(range(cut)), list(range(cut, len(lengths)))]
        micro = [take(columns, part) for part in parts if part]
        counts = [Denominators.of(part.loss_mask, part.cu_seqlens) for part in micro]
        denominators = sum(counts[1:], counts[0])
        assert denominators == Denominators.of(columns.loss_mask, columns.cu_seqlens)

        whole = coefficients(objective, columns)
        facts = gather_facts(objective, [columns])
        values = torch.cat([coefficients(objective, part, denominators, facts=facts).values for part in micro])
        torch.testing.assert_close(values, whole.values, rtol=1e-13, atol=0)

        loss, metrics = policy_loss(objective, columns)
        results = [policy_loss(objective, part, denominators, facts=facts) for part in micro]
        torch.testing.assert_close(sum(part for part, _ in results), loss, rtol=1e-11, atol=1e-12)
        merged = finalize(merge([stats for _, stats in results]))
        assert merged == pytest.approx(finalize(metrics), rel=1e-9, abs=1e-9)

    @settings(max_examples=40, deadline=None)
    @given(name=st.sampled_from(sorted(EVERY_OBJECTIVE)), seed=seed_strategy, lengths=lengths_strategy)
    def test_tokens_without_loss_change_nothing(self, name, seed, lengths):
        """Environment and padding tokens, full of garbage, between and after the model's own tokens."""
        columns, objective = random_columns(seed, lengths), EVERY_OBJECTIVE[name]
        garbage = itertools.cycle([math.nan, math.inf, -math.inf, 1e30])
        stretched: dict[str, list] = {name: [] for name in [*columns.float_columns(), "loss_mask"]}
        own, new_lengths = [], []
        for start, length in zip(columns.cu_seqlens.tolist(), lengths, strict=False):
            before = len(own)
            for token in range(start, start + length):
                for column, values in stretched.items():
                    values.append(getattr(columns, column)[token].item())
                    values.append(False if column == "loss_mask" else next(garbage))
                own += [True, False]
            for column, values in stretched.items():
                values.append(False if column == "loss_mask" else next(garbage))
            own.append(False)
            new_lengths.append(len(own) - before)
        wider = TokenColumns(
            **{
                column: torch.tensor(values, dtype=torch.bool if column == "loss_mask" else torch.float64)
                for column, values in stretched.items()
            },
            cu_seqlens=torch.tensor([0, *new_lengths]).cumsum(0),
        )
        values = coefficients(objective, wider).values
        inserted = ~torch.tensor(own)
        assert (values[inserted] == 0).all()
        torch.testing.assert_close(values[~inserted], coefficients(objective, columns).values, rtol=0, atol=0)
        loss, metrics = policy_loss(objective, wider)
        expected_loss, expected_metrics = policy_loss(objective, columns)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-14)
        assert finalize(metrics) == pytest.approx(finalize(expected_metrics), rel=1e-12, abs=1e-12)

    def test_denominators_smaller_than_the_part_are_refused(self):
        columns = random_columns(0, [3, 3], masked=0)
        with pytest.raises(ValueError, match="smaller than this part"):
            coefficients(OBJECTIVES["minirl"], columns, Denominators(3, 1))


class TestUnusualValues:
    @pytest.mark.parametrize("name", sorted(EVERY_OBJECTIVE))
    def test_impossible_rollout_token_leaves_the_batch(self, name):
        objective = EVERY_OBJECTIVE[name]
        columns = random_columns(3, [4, 3], masked=0)
        columns.rollout_logprobs[1] = -math.inf
        result = coefficients(objective, columns)
        mask = columns.loss_mask.clone()
        mask[1] = False
        without = coefficients(objective, dataclasses.replace(columns, loss_mask=mask))
        torch.testing.assert_close(result.values, without.values, rtol=0, atol=0)
        assert float(result.metrics["logprobs/invalid"]) == 1
        assert float(without.metrics["logprobs/invalid"]) == 0
        assert float(result.metrics["loss_tokens"]) == 6
        counted = Denominators.of(columns.loss_mask, columns.cu_seqlens, columns.rollout_logprobs)
        assert counted == Denominators(6, 2)
        torch.testing.assert_close(coefficients(objective, columns, counted).values, result.values, rtol=0, atol=0)

    @pytest.mark.parametrize("column", ["logprobs", "old_logprobs"])
    @pytest.mark.parametrize("name", sorted(EVERY_OBJECTIVE))
    def test_token_of_probability_zero_has_weight_zero(self, name, column):
        columns = random_columns(4, [4, 3], masked=0)
        getattr(columns, column)[2] = -math.inf
        expected = slow_coefficients(EVERY_OBJECTIVE[name], columns)
        leaf = columns.logprobs.clone().requires_grad_()
        loss, metrics = policy_loss(EVERY_OBJECTIVE[name], with_logprobs(columns, leaf))
        loss.backward()
        assert expected[2] == 0
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, -expected, rtol=1e-12, atol=1e-12)
        assert float(metrics["logprobs/dropped"]) == 1
        finalize(metrics)

    @pytest.mark.parametrize("column", ["logprobs", "old_logprobs", "rollout_logprobs", "advantages"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_and_plus_infinity_name_column_and_token(self, column, value):
        columns = random_columns(5, [4, 3], masked=0)
        getattr(columns, column)[5] = value
        with pytest.raises(NumericsError, match=rf"^{column} is .* at token 5 "):
            coefficients(OBJECTIVES["minirl"], columns)

    @pytest.mark.parametrize("function", [coefficients, policy_loss])
    @pytest.mark.parametrize("column", ["logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"])
    def test_raw_logits_are_refused_by_name(self, column, function):
        columns = random_columns(5, [4, 3], masked=0)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            logits = getattr(columns, column).to(dtype)
            logits[5:] = 3.5
            with pytest.raises(
                NumericsError, match=rf"^{column} is 3.5 at token 5 .*\(2 such loss tokens\).*at most 0.*raw logits"
            ):
                function(OBJECTIVES["minirl"], dataclasses.replace(columns, **{column: logits}))

    @pytest.mark.parametrize("column", ["logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"])
    def test_rounding_above_0_and_tokens_without_loss_are_no_logits(self, column):
        columns = random_columns(5, [4, 3], masked=0)
        getattr(columns, column)[1] = 1e-6
        columns.loss_mask[2] = False
        getattr(columns, column)[2] = 50.0
        assert torch.isfinite(coefficients(OBJECTIVES["minirl"], columns).values).all()

    @pytest.mark.parametrize("name", sorted(EVERY_OBJECTIVE))
    @pytest.mark.parametrize("lengths", [[4, 3], [0], []])
    def test_batch_without_loss_tokens(self, name, lengths):
        columns = random_columns(6, lengths, masked=1.1)
        leaf = columns.logprobs.clone().requires_grad_()
        loss, metrics = policy_loss(EVERY_OBJECTIVE[name], with_logprobs(columns, leaf))
        loss.backward()
        assert loss.item() == 0
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()
        assert finalize(metrics)["loss_tokens"] == 0

    def test_dtypes(self):
        columns = random_columns(8, [4], masked=0)
        assert coefficients(OBJECTIVES["minirl"], columns).values.dtype == torch.float64
        half = TokenColumns(
            **{name: column.bfloat16() for name, column in columns.float_columns().items()},
            loss_mask=columns.loss_mask,
            cu_seqlens=columns.cu_seqlens,
        )
        assert coefficients(OBJECTIVES["minirl"], half).values.dtype == torch.float32


class TestMetrics:
    def test_of_the_hand_computed_response(self):
        metrics = finalize(coefficients(OBJECTIVES["minirl"], one_response(0.5)).metrics)
        weights = [1.2, 5.0, 1.2]
        assert metrics["ratio/mean"] == pytest.approx((1.5 + 0.9375 + 1.125) / 3)
        assert (metrics["ratio/min"], metrics["ratio/max"]) == pytest.approx((0.9375, 1.5))
        assert metrics["clip/high"] == pytest.approx(1 / 3)
        assert metrics["clip/low"] == 0
        assert metrics["tis/truncated"] == pytest.approx(1 / 3)
        assert metrics["tis/weight/mean"] == pytest.approx(sum(weights) / 3)
        assert metrics["tis/kept_weight"] == pytest.approx(sum(weights[1:]) / 3)  # the window drops the first
        assert metrics["tis/ess"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights))


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"aggregation": "mean"}, "token-mean"),
            ({"advantage": "gae"}, "group_mean"),
            ({"norm_length": 2.0}, "norm_length is 2.0, expected int or None"),
            ({"prefix_grad": 1}, "prefix_grad is 1, expected bool"),
            ({"aggregation": None}, "aggregation is None, expected 'token-mean' or"),
            ({"advantage": "token_level_kl", "kl_coef": 0.1, "selection": "positive"}, "selection 'positive'"),
            ({"aggregation": "seq-mean-token-sum-norm"}, "norm_length"),
            ({"norm_length": 5}, "norm_length"),
        ],
    )
    def test_parts_that_do_not_fit(self, changes, message):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(OBJECTIVES["minirl"], **changes)

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("advantages", torch.zeros(3), r"advantages is \[3\], expected \[T\] like logprobs \[4\]$"),
            ("advantages", torch.ones(4, dtype=torch.int64), r"expected floating point: give advantages\.float\("),
            ("loss_mask", torch.zeros(4), r"torch\.float32, expected torch\.bool: give loss_mask\.bool\(\)"),
            ("loss_mask", torch.ones(2, dtype=torch.bool), r"loss_mask is \[2\], expected \[T\] like logprobs \[4\]$"),
            ("loss_mask", torch.ones(4, dtype=torch.bool, device="meta"), "on meta, logprobs on cpu: give loss_mask"),
            ("cu_seqlens", torch.ones(3, dtype=torch.int64, device="meta"), "cu_seqlens is on meta, logprobs on cpu"),
            ("ref_logprobs", torch.ones(4, device="meta"), "ref_logprobs is on meta"),
            ("old_logprobs", torch.zeros(4, dtype=torch.int64), "floating point"),
            ("cu_seqlens", torch.tensor([0, 3]), r"\[0, 3\], expected to rise from 0 to 4"),
            ("cu_seqlens", torch.tensor([1, 4]), r"\[1, 4\], expected"),
            ("cu_seqlens", torch.tensor([0, 3, 2, 4]), r"\[0, 3, 2, 4\], expected"),
            ("topk", TopK(torch.zeros(4, 3), torch.zeros(4, 2), torch.ones(4).bool()), "topk has other shapes"),
            ("topk", TopK(torch.zeros(3, 2), torch.zeros(3, 2), torch.ones(4).bool()), "topk has other shapes"),
        ],
    )
    def test_columns_that_do_not_fit(self, column, value, message):
        columns = random_columns(9, [4])
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(columns, **{column: value})

    @pytest.mark.parametrize(
        ("bounds", "message"),
        [([-9, 2, 4], r"is \[-9, 2, 4\]"), ([0, 9], r"is \[0, 9\]"), ([0, 3, 2, 4], r"is \[0, 3, 2, 4\]")],
    )
    def test_bounds_on_a_gpu_are_refused_with_the_values(self, bounds, message):
        class OnGpu(torch.Tensor):
            is_cuda = True

        columns = dataclasses.replace(random_columns(9, [4]), cu_seqlens=torch.tensor(bounds).as_subclass(OnGpu))
        with pytest.raises(ValueError, match=message):
            prepare(columns)

    @pytest.mark.parametrize("advantage", ["raft", "positive_part"])
    def test_only_a_negative_advantage_of_a_loss_token_is_refused(self, advantage):
        objective = variant("minirl", advantage=advantage)
        mask = [True, True, False, True]
        prepare(columns_of([0.0] * 4, advantages=[0.0, 0.5, -0.5, 0.25], mask=mask), None, objective)
        negative = columns_of([0.0] * 4, advantages=[0.0, 0.5, -0.5, -0.25], mask=mask)
        prepare(negative, None, variant("minirl"))
        with pytest.raises(ConfigError, match=r"is -0.25 at token 3 .*\(1 such loss tokens\).*never negative"):
            prepare(negative, None, objective)


class TestEntropy:
    def test_in_the_logits(self):
        """dz_v = c (1[v = y] - p_v) - e p_v (ln p_v + H), with c = 1 and e = 0.1."""
        logits = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        logs = logits.log_softmax(0)
        entropy = -(logs.exp() * logs).sum()
        columns = with_logprobs(columns_of_probabilities([0.5]), logs[:1])
        columns = dataclasses.replace(columns, old_logprobs=logs[:1].detach())
        policy_loss(variant("reinforce", entropy_coef=0.1), columns, entropies=entropy.reshape(1))[0].backward()
        assert logits.grad is not None
        assert (-logits.grad).tolist() == pytest.approx([0.9241511362, -0.2306514353, -0.6934997009], abs=1e-10)

    def test_without_its_column_it_is_refused(self):
        with pytest.raises(ConfigError, match="entropies"):
            policy_loss(variant("reinforce", entropy_coef=0.5), columns_of_probabilities([0.5]))


@pytest.mark.parametrize(("floor", "drift"), [(0.8, [0.1, 0.5, -0.3]), (1.0, [0.1, 0.5, 2.0])])
def test_routers_that_have_moved_make_a_ratio_smaller_down_to_the_floor(floor, drift):
    """At A = 1 and ratio 1 the coefficient is the factor itself; the metric of the ratio has no factor."""
    objective = variant("cispo", factors=(Factor("theta_old"),), router_shift_floor=floor)
    result = coefficients(objective, columns_of([0.0] * 3, drift=drift))
    expected = [max(math.exp(-max(d, 0.0)), floor) for d in drift]
    assert (3 * result.values).tolist() == pytest.approx(expected, rel=1e-12)
    metrics = finalize(result.metrics)
    assert metrics["ratio/max"] == metrics["ratio/min"] == 1.0
    assert metrics["router/drift"] == pytest.approx(sum(drift) / 3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gmpo", {"router_shift_floor": 0.0}),
        ("gmpo", {"router_shift_floor": 1.1}),
        ("minirl", {"router_shift_floor": 0.8}),
        ("gmpo", {"router_shift_floor": 0.8, "masks": (Mask("theta_old", "tv", high=0.1),)}),
    ],
)
def test_a_router_shift_that_no_ratio_takes_is_refused(name, changes):
    with pytest.raises(ConfigError, match="router_shift_floor is"):
        variant(name, **changes)


def test_a_row_that_reads_the_drift_of_routers_is_refused_without_it():
    columns = columns_of([0.0], drift=0.0)
    with pytest.raises(ConfigError, match="needs the column router_drift"):
        coefficients(OBJECTIVES["rspo"], dataclasses.replace(columns, router_drift=None))
    with pytest.raises(NumericsError, match="router_drift is nan at token 0"):
        coefficients(OBJECTIVES["rspo"], dataclasses.replace(columns, router_drift=columns.logprobs * math.nan))


def test_a_row_that_reads_top_tokens_is_refused_without_them():
    with pytest.raises(ConfigError, match="topk"):
        coefficients(OBJECTIVES["dppo_topk"], columns_of_probabilities([0.05], mu=[0.15]))
