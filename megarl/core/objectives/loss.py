"""The equation of all objectives.

    grad J = sum_t [ prod_k M_k * prod_f F_f * S_t * A_t - sum_j P_j ] * grad log pi_theta(y_t) / D

``M`` masks (0 or 1), ``F`` factors of the importance weight, ``S`` gate, ``A`` advantage, ``P`` derivatives of KL
penalties, ``D`` denominator (aggregation). No term carries a gradient: an objective is a coefficient per token, with
the loss ``-(coefficients * logprobs).sum()``. The literal derivative of a prefix ratio is a coefficient too. The
entropy bonus is the only second stream: a coefficient per token for the gradient of the token's entropy.
Policies: theta (being trained), old (the training engine before the update), mu (the rollout engine).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor

from megarl.core.choices.parts import Mask, Objective
from megarl.core.choices.table import find_objective
from megarl.core.devices import DeviceChecks
from megarl.core.metrics import Stat
from megarl.core.objectives import weights
from megarl.core.objectives.columns import (
    Denominators,
    PolicyRatios,
    TokenColumns,
    TokenState,
    count_loss_tokens,
    prepare,
)
from megarl.core.objectives.masks import Trusted, batch_bound, find_trusted
from megarl.core.ratios import ratio_gradient, segment_expand, segment_sum
from megarl.errors import ConfigError, refusal


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """The factor of ``grad log pi_theta`` of each token, and the factor of ``grad H`` of the token's entropy."""

    values: Tensor
    """[T], dJ/dlogprobs with the aggregation included; 0 on tokens without training. fp32, or fp64."""
    metrics: dict[str, Stat]
    """Mergeable statistics; ``megarl.core.metrics`` merges and finalises them."""
    entropy: Tensor | None = None
    """[T], dJ/dH of the entropies; None without an entropy term."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Numbers of a whole mini-batch, over all ranks, needed to weigh any micro-batch of the mini-batch."""

    exponents: tuple[float | None, ...]
    """By factor: q of "adaptive_power", else None."""
    means: tuple[float | None, ...]
    """By factor: the divisor of ``batch_normalize``, else None."""
    bounds: tuple[float | None, ...]
    """By mask: the least value dropped by the scope "batch_mean", else None."""
    denominators: Denominators | None = None
    """Counts without the tokens that masks remove; None if no mask removes tokens from denominators."""

    @classmethod
    def of_equal_policies(cls, objective: Objective, device: torch.device | int | str = "cpu") -> "BatchFacts":
        """Return the facts of a batch in which all ratios are 1."""
        exponents = tuple(1.0 if factor.fn == "adaptive_power" else None for factor in objective.factors)
        means = (weights.factor_at_one(f, device) if f.batch_normalize else None for f in objective.factors)
        return cls(exponents, tuple(means), tuple(math.inf if _by_batch(mask) else None for mask in objective.masks))


def coefficients(
    objective: Objective | str,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    facts: BatchFacts | None = None,
    checks: DeviceChecks | None = None,
) -> Coefficients:
    """Return ``(M_t F_t S_t A_t - P_t) / D`` for every token: the derivative of J by its log-probability.

    - objective: a row of ``OBJECTIVES``, or its name.
    - columns: T tokens of whole sequences. Under context parallelism gather the log-probabilities first and slice the
      result.
    - denominators: global, over all micro-batches and data-parallel ranks of an optimizer step, so that coefficients do
      not depend on the split. None: the columns are the whole batch. If masks remove tokens from denominators,
      ``facts`` has the denominators; without ``facts``, pass denominators that already exclude such tokens.
    - facts: of ``gather_facts``, shared by all micro-batches. None: the columns are the whole mini-batch.
    - checks: takes the checks of values on a GPU, so that all micro-batches of an update share one wait; the caller
      calls ``require`` before it uses the gradients. None: the host waits here, once.

    Log-ratios are clamped to +-20 per token. A loss token with rollout_logprobs -inf leaves loss and denominators
    (``logprobs/invalid``). A loss token with logprobs or old_logprobs -inf gets coefficient 0 and enters no ratio of
    its sequence (``logprobs/dropped``).

    NumericsError, with the column and the first token, if any other value of a loss token is not finite, or a
    log-probability is above 0 beyond rounding (raw logits). ConfigError if ``ref_logprobs`` (KL) or ``topk`` (mask of
    top K tokens) is missing, if a negative advantage is impossible (``NON_NEGATIVE_ADVANTAGES``).
    UnknownNameError for an unknown name.
    """
    objective = find_objective(objective)
    # Denominators without masked tokens are smaller than the count of loss tokens.
    state = prepare(columns, None if objective.leaves else denominators, objective, checks)
    return state_coefficients(objective, state, columns.loss_mask, denominators, facts)


def state_coefficients(
    objective: Objective,
    state: TokenState,
    loss_mask: Tensor,
    denominators: Denominators | None,
    facts: BatchFacts | None = None,
) -> Coefficients:
    """Return the coefficients of columns checked by ``prepare``, without a wait of the host for the device.

    loss_mask: bool [T], of the original columns; other arguments and ConfigError as in ``coefficients``.
    """
    check_columns(objective, state)
    ratios = PolicyRatios(state, objective.router_shift_floor)
    if facts is None:
        facts = _find_facts(objective, [(state, ratios)], lambda sums: sums)
    weight, weight_metrics = weights.importance_weight(objective, state, ratios, facts.exponents, facts.means)
    trusted, trust_metrics = find_trusted(objective, state, ratios, facts.bounds)
    scale = _aggregation_scale(objective, state, trusted, facts.denominators or denominators)
    if objective.gate is not None:
        weight = weight * weights.gate_values(objective.gate, state, ratios)
    weight = torch.where(trusted.inside, weight, 0.0)
    values = weight * state.advantages * scale
    if objective.prefix_grad:
        values = ratio_gradient(objective.factors[0].scope, values, state.keep, state.cu_seqlens)
    usable = torch.count_nonzero(state.usable)
    counts = torch.stack([usable, torch.count_nonzero(loss_mask) - usable, usable - ratios.count])
    names = ("loss_tokens", "logprobs/invalid", "logprobs/dropped")
    metrics = {name: Stat.total(count) for name, count in zip(names, counts.double().unbind(), strict=True)}
    metrics |= Stat.means({"tis/kept_weight": weight}, torch.count_nonzero(trusted.counted))
    plain = ratios if objective.router_shift_floor is None else PolicyRatios(state)
    metrics |= {"ratio": Stat.ratio(plain.log("theta_old"), state.keep), **weight_metrics, **trust_metrics}
    if state.router_drift is not None:
        metrics["router/drift"] = Stat.mean(state.router_drift, state.keep)
    for penalty in objective.penalties:
        if penalty.coef:
            gradient, kl_metrics = weights.kl_penalty(penalty, state, ratios)
            values = values - torch.where(state.keep, penalty.coef * gradient * scale, 0.0)
            metrics |= kl_metrics
    entropy = torch.where(state.keep, objective.entropy_coef * scale, 0.0) if objective.entropy_coef else None
    return Coefficients(values, metrics, entropy)


def gather_facts(
    objective: Objective, micro_batches: Sequence[TokenColumns], total: weights.Total = lambda sums: sums
) -> BatchFacts | None:
    """Return the facts of a mini-batch for ``coefficients``; None if the objective needs no facts.

    micro_batches: all of the mini-batch on this rank, with log pi_theta as the update will compute it; total: adds
    sums, float64 [S], over the other ranks. Coefficients then do not depend on the split. Errors as in ``prepare``.
    """
    if not objective.beforehand:
        return None
    batches = [(state, PolicyRatios(state, objective.router_shift_floor)) for state in map(prepare, micro_batches)]
    facts = _find_facts(objective, batches, total)
    if not objective.leaves:
        return facts
    trusted = [find_trusted(objective, *batch, facts.bounds)[0] for batch in batches]
    counts = [_count(decision, state.cu_seqlens) for decision, (state, _) in zip(trusted, batches, strict=True)]
    num_tokens, num_sequences = map(int, total(torch.stack(counts).sum(0).double()).tolist())
    return replace(facts, denominators=Denominators(num_tokens, num_sequences))


def policy_loss(
    objective: Objective | str,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    entropies: Tensor | None = None,
    facts: BatchFacts | None = None,
) -> tuple[Tensor, dict[str, Stat]]:
    """Return the scalar ``-(coefficients * logprobs).sum()`` with gradient to ``columns.logprobs``, and metrics.

    entropies: [T], with gradient, of the policy at each token. With ``entropy_coef`` the loss also subtracts
    ``(entropy coefficients * entropies).sum()``; ConfigError if entropies are missing. Other arguments and errors as in
    ``coefficients``. Tokens with coefficient 0 are left out of the sum: 0 times a log-probability of -inf is NaN.
    """
    objective = find_objective(objective)
    result = coefficients(objective, columns, denominators, facts=facts)
    loss = -(result.values.detach() * torch.where(result.values != 0, columns.logprobs, 0.0)).sum()
    if result.entropy is not None:
        if entropies is None:
            raise ConfigError(refusal("bonus_without_entropies", objective=objective))
        loss = loss - (result.entropy * torch.where(result.entropy != 0, entropies, 0.0)).sum()
    return loss, {**result.metrics, "loss": Stat.total(loss)}


def check_columns(objective: Objective, state: TokenState) -> None:
    """Raise ConfigError if a column needed by a penalty or a mask is missing."""
    if state.ref_logprobs is None and any(p.to == "ref" and p.coef for p in objective.penalties):
        raise ConfigError(refusal("no_reference", part="a penalty to the reference"))
    if state.router_drift is None and objective.router_shift_floor is not None:
        raise ConfigError("objective: router_shift_floor needs the column router_drift (RoutingReplay, option scored)")
    if state.topk is None and objective.needs_topk:
        raise ConfigError(refusal("mask_without_topk"))


def _by_batch(mask: object) -> TypeGuard[Mask]:
    return isinstance(mask, Mask) and mask.scope == "batch_mean"


def _find_facts(
    objective: Objective, batches: Sequence[tuple[TokenState, PolicyRatios]], total: weights.Total
) -> BatchFacts:
    """Return ``BatchFacts`` without denominators."""
    exponents: list[float | None] = []
    means: list[float | None] = []
    for factor in objective.factors:
        exponent = mean = None
        if factor.fn == "adaptive_power":
            log_ratios = torch.cat([weights.factor_log_ratio(factor, *batch) for batch in batches])
            keep = torch.cat([state.keep for state, _ in batches])
            exponent = weights.adaptive_power(log_ratios, keep, factor.ess_target, total)
        if factor.batch_normalize:
            sums = torch.stack([weights.sum_factor(factor, *batch, exponent) for batch in batches]).sum(0)
            summed, count = total(sums).tolist()
            mean = summed / count if summed else 1.0
        exponents.append(exponent)
        means.append(mean)
    bounds = tuple(batch_bound(mask, batches, total) if _by_batch(mask) else None for mask in objective.masks)
    return BatchFacts(tuple(exponents), tuple(means), bounds)


def _count(trusted: Trusted, cu_seqlens: Tensor) -> Tensor:
    """int64 [2]: tokens, and responses."""
    counts = count_loss_tokens(trusted.counted, cu_seqlens)
    if trusted.in_responses is trusted.counted:
        return counts
    return torch.stack([counts[0], count_loss_tokens(trusted.in_responses, cu_seqlens)[1]])


def _aggregation_scale(
    objective: Objective, state: TokenState, trusted: Trusted, denominators: Denominators | None
) -> Tensor:
    """Return 1/D, broadcastable to [T]. Empty sequences and batches divide by 1: they have no term to scale."""
    if denominators is None:
        num_tokens, num_sequences = _count(trusted, state.cu_seqlens).clamp(min=1)
    else:
        num_tokens, num_sequences = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
    unit = torch.ones((), dtype=state.logprobs.dtype, device=state.logprobs.device)
    match objective.aggregation:
        case "token-mean":
            return unit / num_tokens
        case "seq-mean-token-sum":
            return unit / num_sequences
        case "seq-mean-token-mean":
            lengths = segment_sum(trusted.counted, state.cu_seqlens).clamp(min=1)
            return segment_expand(unit / (lengths * num_sequences), state.cu_seqlens, trusted.counted.numel())
        case "seq-mean-token-sum-norm":
            assert objective.norm_length is not None, "checked when the objective was made"
            return unit / (num_sequences * objective.norm_length)
