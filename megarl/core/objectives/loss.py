"""The one equation that every objective is a case of.

    grad J = sum_t [ prod_k M_k * prod_f F_f * S_t * A_t - sum_j P_j ] * grad log pi_theta(y_t) / D

``M`` masks (0 or 1), ``F`` factors of the importance weight, ``S`` gate, ``A`` advantage, ``P`` derivatives of KL
penalties, ``D`` denominator (aggregation). None of them carries a gradient, so an objective is nothing but one
coefficient per token, and its loss is always ``-(coefficients * logprobs).sum()``. The literal derivative of a prefix
ratio is a coefficient too. The one second stream is the entropy's, with a coefficient for each token's entropy.
Three policies are told apart: theta (being trained), old (the training engine before the update) and mu (the rollout
engine that sampled).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.core.choices.parts import Objective
from megarl.core.metrics import Stat, merge
from megarl.core.objectives.columns import (
    Denominators,
    TokenColumns,
    TokenState,
    count_loss_tokens,
    prepare,
    split_state,
)
from megarl.core.objectives.masks import Trusted, find_trusted
from megarl.core.objectives.policy_ratios import PolicyRatios
from megarl.core.objectives.weights import (
    Total,
    adaptive_power,
    factor_at_one,
    factor_log_ratio,
    gate_values,
    importance_weight,
    kl_penalty,
    sum_factor,
)
from megarl.core.ratios import ratio_gradient, segment_sum
from megarl.core.segments import segment_expand
from megarl.errors import ConfigError

PART_TOKENS = 1 << 15
"""Largest part of a batch that is weighed at once on a CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """What multiplies ``grad log pi_theta`` of each token, and ``grad H`` of its entropy."""

    values: Tensor
    """[T], dJ/dlogprobs with the aggregation included; 0 on every token that does not train. fp32, or fp64."""
    metrics: dict[str, Stat]
    """Mergeable statistics; ``megarl.core.metrics`` merges and finalises them."""
    entropy: Tensor | None = None
    """[T], dJ/dH of the entropies; None where the objective has no entropy term."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What an objective must know of a whole mini-batch, on all ranks, before it can weigh one of its parts."""

    exponents: tuple[float | None, ...]
    """By factor: q of "adaptive_power", else None."""
    means: tuple[float | None, ...]
    """By factor: what ``batch_normalize`` divides by, else None."""
    denominators: Denominators | None = None
    """Those without the tokens that masks take out; None if none does."""

    @classmethod
    def of_equal_policies(cls, objective: Objective, device: torch.device | int | str = "cpu") -> "BatchFacts":
        """Return those of a batch in which all ratios are 1."""
        exponents = tuple(1.0 if factor.fn == "adaptive_power" else None for factor in objective.factors)
        means = (factor_at_one(factor, device) if factor.batch_normalize else None for factor in objective.factors)
        return cls(exponents, tuple(means))


def coefficients(
    objective: Objective,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    facts: BatchFacts | None = None,
    detailed: bool = True,
) -> Coefficients:
    """Return ``(M_t F_t S_t A_t - P_t) / D`` for every token: the derivative of J by its log-probability.

    denominators: global ones, over all micro-batches and data-parallel ranks of one optimizer step, so that the
    coefficients of the parts are exactly those of the whole; None if these columns are the whole batch. The columns
    must hold whole sequences: under context parallelism gather the log-probabilities and slice the result. facts: from
    ``gather_facts``, to share between micro-batches; None takes these columns for the whole mini-batch. If masks take
    tokens out of the denominators, those of the facts are used; without facts, given ones must be without them.
    detailed: False leaves out all metrics but counts.

    Log-ratios are clamped to +-20 per token. A loss token with rollout_logprobs -inf leaves loss and denominators
    (``logprobs/invalid``); one with logprobs or old_logprobs -inf gets coefficient 0 and stands in no ratio of its
    sequence (``logprobs/dropped``). Any other non-finite value on a loss token, and a log-probability above 0 but for
    rounding (as raw logits are), raises NumericsError with the column and the first such token; a KL without
    ref_logprobs, and a mask of top K tokens without ``topk``, ConfigError.
    """
    # A mask that takes tokens out of the denominators makes the given ones smaller than the count of loss tokens.
    state = prepare(columns, None if objective.leaves else denominators)
    # Functions of the user are to see all columns, of which they may take means.
    if state.logprobs.is_cuda or state.logprobs.numel() <= PART_TOKENS or objective.own_functions:
        return state_coefficients(objective, state, columns.loss_mask, denominators, facts, detailed)
    return _by_parts(objective, state, columns.loss_mask, denominators, facts, detailed)


def state_coefficients(
    objective: Objective,
    state: TokenState,
    loss_mask: Tensor,
    denominators: Denominators | None,
    facts: BatchFacts | None = None,
    detailed: bool = True,
) -> Coefficients:
    """Return what ``coefficients`` does, of columns that ``prepare`` has checked; the host does not wait here."""
    check_columns(objective, state)
    ratios = PolicyRatios(state)
    if facts is None:
        facts = BatchFacts(*_find_facts(objective, [(state, ratios)], lambda sums: sums))
    weight, weight_metrics = importance_weight(objective, state, ratios, facts.exponents, facts.means, detailed)
    trusted, trust_metrics = find_trusted(objective, state, ratios, detailed)
    scale = _aggregation_scale(objective, state, trusted, facts.denominators or denominators)
    if objective.gate is not None:
        gate = gate_values(objective.gate, state, ratios)
        weight = gate if weight is None else weight * gate
    values = state.advantages if weight is None else weight * state.advantages
    values = torch.where(trusted.inside, values * scale, 0.0)
    if objective.prefix_grad:
        values = ratio_gradient(objective.factors[0].scope, values, state.keep, state.cu_seqlens)
    usable = torch.count_nonzero(state.usable)
    counts = torch.stack([usable, torch.count_nonzero(loss_mask) - usable, usable - ratios.count])
    names = ("loss_tokens", "logprobs/invalid", "logprobs/dropped")
    metrics = {name: Stat.total(count) for name, count in zip(names, counts.double().unbind(), strict=True)}
    if detailed:
        metrics |= {"ratio": Stat.ratio(ratios.log("theta_old"), state.keep), **weight_metrics, **trust_metrics}
    for penalty in objective.penalties:
        if penalty.coef:
            gradient, kl_metrics = kl_penalty(penalty, state, ratios)
            values = values - torch.where(state.keep, penalty.coef * gradient * scale, 0.0)
            metrics |= kl_metrics if detailed else {}
    entropy = torch.where(state.keep, objective.entropy_coef * scale, 0.0) if objective.entropy_coef else None
    return Coefficients(values, metrics, entropy)


def _by_parts(
    objective: Objective,
    state: TokenState,
    loss_mask: Tensor,
    denominators: Denominators | None,
    facts: BatchFacts | None,
    detailed: bool,
) -> Coefficients:
    """Weigh a large batch in parts of whole sequences, which fit into a processor's cache."""
    check_columns(objective, state)
    parts = split_state(state, PART_TOKENS)
    if facts is None:
        facts = _gather(objective, parts, lambda sums: sums)
        facts = facts if denominators is None else replace(facts, denominators=None)
    if denominators is None:
        denominators = Denominators(*count_loss_tokens(state.usable, state.cu_seqlens).tolist())
    masks = loss_mask.split([part.logprobs.numel() for part in parts])
    found = [
        state_coefficients(objective, part, mask, denominators, facts, detailed)
        for part, mask in zip(parts, masks, strict=True)
    ]
    entropy = (
        torch.cat([each.entropy for each in found if each.entropy is not None]) if objective.entropy_coef else None
    )
    return Coefficients(torch.cat([each.values for each in found]), merge(each.metrics for each in found), entropy)


def gather_facts(
    objective: Objective, micro_batches: Sequence[TokenColumns], total: Total = lambda sums: sums
) -> BatchFacts | None:
    """Return what ``coefficients`` is to use for every micro-batch; None if the objective needs nothing of the kind.

    micro_batches: all of one mini-batch on this rank, with log pi_theta as the update will find it; total: adds sums,
    float64 [S], over the ranks that hold the rest. Then the coefficients do not depend on how the mini-batch was cut.
    """
    if not objective.beforehand:
        return None
    return _gather(objective, [prepare(columns) for columns in micro_batches], total)


def policy_loss(
    objective: Objective,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    entropies: Tensor | None = None,
    facts: BatchFacts | None = None,
) -> tuple[Tensor, dict[str, Stat]]:
    """Return the scalar ``-(coefficients * logprobs).sum()`` with gradient to ``columns.logprobs``, and its metrics.

    entropies: [T], with gradient, of the policy at each token; an ``entropy_coef`` needs them (ConfigError), and
    subtracts ``(entropy coefficients * entropies).sum()``. Other arguments and errors as in ``coefficients``. Tokens
    with coefficient 0 are left out of the sum, for 0 times a log-probability of -inf is NaN.
    """
    result = coefficients(objective, columns, denominators, facts=facts)
    kept = torch.where(result.values != 0, columns.logprobs, 0.0)
    loss = -(result.values.detach() * kept).sum()
    if result.entropy is not None:
        if entropies is None:
            raise ConfigError(
                f"objective: entropy_coef {objective.entropy_coef} needs the entropies of the tokens; give them to "
                "policy_loss, or set entropy_coef to 0"
            )
        loss = loss - (result.entropy * torch.where(result.entropy != 0, entropies, 0.0)).sum()
    return loss, {**result.metrics, "loss": Stat.total(loss)}


def check_columns(objective: Objective, state: TokenState) -> None:
    """Raise ConfigError if a column is missing that a penalty or a mask needs."""
    if state.ref_logprobs is None and any(p.to == "ref" and p.coef for p in objective.penalties):
        raise missing_ref("a penalty to the reference")
    if state.topk is None and objective.needs_topk:
        raise ConfigError(
            "objective: a mask of the sampler's top K tokens needs the column topk (TokenColumns.topk), which the "
            "batch does not have: megarl's engines do not record it; choose statistic 'tv' or 'kl'"
        )


def missing_ref(what: str) -> ConfigError:
    """Return the error for a KL without a reference."""
    return ConfigError(
        f"objective: {what} needs the column ref_logprobs, which the batch does not have; compute the reference "
        f"policy's log-probabilities, or choose an objective without a KL"
    )


def _gather(objective: Objective, states: Sequence[TokenState], total: Total) -> BatchFacts:
    batches = [(state, PolicyRatios(state)) for state in states]
    left = None
    if objective.leaves:
        trusted = [find_trusted(objective, *batch, detailed=False)[0] for batch in batches]
        counts = [_count(found, state.cu_seqlens) for found, state in zip(trusted, states, strict=True)]
        left = Denominators(*(int(count) for count in total(torch.stack(counts).sum(0).double()).tolist()))
    return BatchFacts(*_find_facts(objective, batches, total), left)


def _find_facts(
    objective: Objective, batches: Sequence[tuple[TokenState, PolicyRatios]], total: Total
) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Return exponents and means of ``BatchFacts``."""
    exponents: list[float | None] = []
    means: list[float | None] = []
    for factor in objective.factors:
        exponent = mean = None
        if factor.fn == "adaptive_power":
            log_ratios = torch.cat([factor_log_ratio(factor, *batch) for batch in batches])
            kept = torch.cat([state.keep for state, _ in batches])
            exponent = adaptive_power(log_ratios, kept, factor.ess_target, total)
        if factor.batch_normalize:
            sums = torch.stack([sum_factor(factor, *batch, exponent) for batch in batches]).sum(0)
            summed, count = total(sums).tolist()
            mean = summed / count if summed else 1.0
        exponents.append(exponent)
        means.append(mean)
    return tuple(exponents), tuple(means)


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
    one = torch.ones((), dtype=state.logprobs.dtype, device=state.logprobs.device)
    match objective.aggregation:
        case "token-mean":
            return one / num_tokens
        case "seq-mean-token-sum":
            return one / num_sequences
        case "seq-mean-token-mean":
            lengths = segment_sum(trusted.counted, state.cu_seqlens).clamp(min=1)
            return segment_expand(one / (lengths * num_sequences), state.cu_seqlens, trusted.counted.numel())
        case "seq-mean-token-sum-norm":
            assert objective.norm_length is not None, "checked when the objective was made"
            return one / (num_sequences * objective.norm_length)
