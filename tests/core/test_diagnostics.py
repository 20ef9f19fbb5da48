from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from core_batches import random_columns
from oracles import reference

from megarl.core.measures import (
    effective_prompt_ratio,
    entropy,
    mismatch_metrics,
    surrogate_metrics,
)
from megarl.core.metrics import finalize, merge


def test_entropy():
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    assert entropy(logits).item() == pytest.approx(1.0397207708399179, abs=1e-12)
    assert entropy(logits + 123.0).item() == pytest.approx(1.0397207708399179, abs=1e-12)
    impossible = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)
    assert entropy(impossible).item() == pytest.approx(math.log(2), abs=1e-12)
    random = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slow = [reference.entropy(row) for row in random.tolist()]
    np.testing.assert_allclose(entropy(random), slow, rtol=1e-12)
    assert entropy(random.bfloat16()).dtype == torch.float32


def test_entropy_gradient_with_an_impossible_token():
    logits = torch.tensor([0.3, -0.2, -math.inf], dtype=torch.float64, requires_grad=True)
    entropy(logits).backward()
    finite = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    entropy(finite).backward()
    assert logits.grad is not None
    assert finite.grad is not None
    np.testing.assert_allclose(logits.grad, [*finite.grad.tolist(), 0.0], atol=1e-12)


def test_mismatch_hand_computed():
    old = torch.tensor([0.40, 0.32, 0.80], dtype=torch.float64).log()
    mu = torch.tensor([0.50, 0.05, 0.75], dtype=torch.float64).log()
    numbers = finalize(mismatch_metrics(old, mu, torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])))
    assert numbers["rollout/k1"] == pytest.approx(-0.5658976533963291, abs=1e-9)
    assert numbers["rollout/k3"] == pytest.approx(1.189657902159226, abs=1e-9)
    assert numbers["rollout/extreme_2"] == pytest.approx(1 / 3)
    product = 0.8 * 6.4 * (0.8 / 0.75)
    assert numbers["rollout/chi2_sequence"] == pytest.approx(product**2 - 1)
    assert numbers["rollout/ratio/max"] == pytest.approx(6.4)


@pytest.mark.parametrize("seed", range(4))
def test_mismatch_against_reference_and_merged(seed):
    columns = random_columns(seed, [6, 3, 0, 8])
    mask = columns.loss_mask
    arguments = (columns.old_logprobs, columns.rollout_logprobs, mask, columns.cu_seqlens)
    numbers = finalize(mismatch_metrics(*arguments))
    slow = reference.mismatch(columns.old_logprobs[mask].tolist(), columns.rollout_logprobs[mask].tolist())
    assert {name: numbers[name] for name in slow} == pytest.approx(slow, rel=1e-9)
    cut = 9
    old, mu = columns.old_logprobs, columns.rollout_logprobs
    parts = [
        mismatch_metrics(old[:cut], mu[:cut], mask[:cut], torch.tensor([0, 6, 9])),
        mismatch_metrics(old[cut:], mu[cut:], mask[cut:], torch.tensor([0, 0, 8])),
    ]
    assert finalize(merge(parts)) == pytest.approx(numbers, rel=1e-9, abs=1e-9)


def test_mismatch_leaves_out_impossible_tokens():
    old = torch.tensor([-1.0, -math.inf, -1.0, -1.0])
    mu = torch.tensor([-1.0, -1.0, -math.inf, -math.inf])
    mask = torch.tensor([True, True, True, False])
    old[0] = -2.0
    numbers = finalize(mismatch_metrics(old, mu, mask, torch.tensor([0, 1, 4])))
    assert numbers["rollout/k1"] == 1
    # The second sequence has no token left: it is no sequence of ratio 1.
    assert numbers["rollout/chi2_sequence"] == pytest.approx(math.exp(-2) - 1)
    assert numbers["rollout/ess"] == 1


def test_effective_prompt_ratio():
    rewards = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    groups = [0, 0, 1, 1, 2, 2]
    assert float(effective_prompt_ratio(rewards, groups)) == pytest.approx(1 / 3)


def _surrogate(log_weight, log_gap, lengths):
    """Policies with these log-ratios, [T] each: w = pi_theta / mu, of which pi_old / mu is one factor."""
    mu = torch.full_like(log_weight, -3.0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(len(mu), dtype=torch.bool)
    return finalize(surrogate_metrics(mu + log_weight, mu + log_gap, mu, mask, bounds))


@pytest.mark.parametrize("delta", [0.1, -0.05, 1e-4, 1e-7])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_first_order_error_of_equal_ratios(delta, length):
    """prod (1 + d) = (1 + d)^H, and the error is the binomial sum from its second term on."""
    log_weight = torch.full((length,), math.log1p(delta), dtype=torch.float64)
    found = _surrogate(log_weight, log_weight, [length])
    expected = sum(math.comb(length, k) * delta**k for k in range(2, length + 1))
    rounding = 1e-15 * length  # of log-probabilities near -3
    assert found["first_order/error/mean"] == pytest.approx(abs(expected), rel=1e-7, abs=rounding)
    assert found["first_order/product/mean"] == pytest.approx((1 + delta) ** length)
    assert found["first_order/overflow"] == 0


def test_first_order_error_by_hand_over_two_responses():
    weights, gaps = [1.5, 0.5, 3.0, 0.2], [1.0, 0.2, 3.0, 0.35]
    found = _surrogate(*(torch.tensor(x, dtype=torch.float64).log() for x in (weights, gaps)), [2, 0, 2])
    # |0.75 - (1 + 0.5 - 0.5)| = 0.25 and |0.6 - (1 + 2 - 0.8)| = 1.6; a response without tokens has none.
    assert found["first_order/error/mean"] == pytest.approx((0.25 + 1.6) / 2)
    assert (found["first_order/error/min"], found["first_order/error/max"]) == pytest.approx((0.25, 1.6))
    assert found["first_order/error/std"] == pytest.approx((1.6 - 0.25) / 2)
    assert found["gap/ratio/mean"] == pytest.approx(sum(gaps) / 4)
    assert found["gap/extreme_2"] == 0.75
    assert found["ratio/extreme_2"] == 0.25  # 1.5, 2.5, 1, 0.57


def test_a_product_that_overflows_is_counted_and_leaves_the_others_alone():
    log_weight = torch.cat([torch.full((6,), 19.0), torch.full((2,), math.log(1.5))]).double()
    found = _surrogate(log_weight, log_weight, [6, 2])
    assert found["first_order/overflow"] == 1
    assert found["first_order/error/max"] == pytest.approx(0.25)
    assert found["gap/ratio/max"] == pytest.approx(math.exp(19))
    vanishing = _surrogate(-log_weight * 1000, log_weight, [6, 2])
    assert vanishing["first_order/overflow"] == 0
    assert vanishing["first_order/error/max"] == pytest.approx(5.0)  # |0 - (1 - 6)|: a ratio below e^-20 counts as that


def test_surrogate_leaves_out_impossible_tokens_and_merges():
    columns = random_columns(3, [6, 3, 0, 8])
    policies = [columns.logprobs.detach(), columns.old_logprobs, columns.rollout_logprobs]
    for index, column in enumerate(policies):
        policies[index] = column.clone()
        policies[index][index + 1] = -math.inf
    mask = columns.loss_mask
    whole = finalize(surrogate_metrics(*policies, mask, columns.cu_seqlens))
    left = mask.clone()
    left[1:4] = False
    finite = [torch.where(torch.isinf(column), 0.0, column) for column in policies]
    assert finalize(surrogate_metrics(*finite, left, columns.cu_seqlens)) == pytest.approx(whole)
    cut = 9
    parts = [
        surrogate_metrics(*(c[:cut] for c in policies), mask[:cut], torch.tensor([0, 6, 9])),
        surrogate_metrics(*(c[cut:] for c in policies), mask[cut:], torch.tensor([0, 0, 8])),
    ]
    assert finalize(merge(parts)) == pytest.approx(whole, rel=1e-9)


def test_surrogate_metrics_never_wait_for_the_device():
    """Meta tensors hold no values, so reading one back raises."""
    column, mask = torch.empty(5, device="meta"), torch.empty(5, dtype=torch.bool, device="meta")
    found = surrogate_metrics(column, column, column, mask, torch.empty(3, dtype=torch.int64, device="meta"))
    assert {stat.sums.device.type for stat in found.values()} == {"meta"}


def test_a_ratio_of_2_is_not_extreme_and_a_long_product_stays_finite():
    mu, mask, bounds = torch.full((40,), -20.0, dtype=torch.float64), torch.ones(40, dtype=torch.bool), [0, 40]
    twice = torch.zeros_like(mu) + math.log(2)  # exactly log 2 above 0
    of_rho = finalize(mismatch_metrics(twice, torch.zeros_like(mu), mask, torch.tensor(bounds)))
    assert of_rho["rollout/extreme_2"] == 0
    factors = finalize(surrogate_metrics(twice, torch.zeros_like(mu), torch.zeros_like(mu), mask, torch.tensor(bounds)))
    assert factors["ratio/extreme_2"] == 0
    long = finalize(mismatch_metrics(mu + 19, mu, mask, torch.tensor(bounds)))
    assert long["rollout/chi2_sequence"] == pytest.approx(math.exp(40) - 1)
