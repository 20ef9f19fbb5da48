"""The one equation that every objective is a case of, and the advantages that it needs.

    grad J = sum_t  M_t * W_t * A_t * grad log pi_theta(y_t) / D

``A`` advantage, ``W`` importance weight, ``M`` trust mask (0 or 1), ``D`` denominator (aggregation). ``M`` and ``W``
carry no gradient, so an objective is nothing but one coefficient per token, and its loss is always
``-(coefficients * logprobs).sum()``. A KL penalty and the literal derivative of a prefix ratio are coefficients too.
Three policies are told apart: theta (being trained), old (the training engine before the update) and mu (the rollout
engine that sampled).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.core.advantages import Values, group_mean, grpo, raft, rloo, token_level_kl, uniform_groups
from megarl.core.choices.parts import Objective
from megarl.core.choices.stopping import POSITIVE
from megarl.core.metrics import Stat
from megarl.core.objectives.columns import Denominators, TokenColumns, TokenState, call_part, count_loss_tokens, prepare
from megarl.core.objectives.weights import (
    Total,
    adaptive_power,
    find_trusted,
    importance_weight,
    kl_penalty,
    weight_log_ratio,
)
from megarl.core.ratios import log_ratio, ratio_gradient, segment_expand, segment_sum
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """What multiplies ``grad log pi_theta`` of each token."""

    values: Tensor
    """[T], dJ/dlogprobs with the aggregation included; 0 on every token that does not train. fp32, or fp64."""
    metrics: dict[str, Stat]
    """Mergeable statistics; ``megarl.core.metrics`` merges and finalises them."""
    entropy: Tensor | None = None
    """[T], dJ/dH of the entropies; None where the objective has no entropy term."""


def sequence_advantages(objective: Objective, rewards: Values, groups: Values, threshold: float = POSITIVE) -> Tensor:
    """Return the objective's advantage of each response: rewards [N], groups integer [N] -> [N].

    threshold: a response is correct if its reward is above this; only "raft" asks. Raises ConfigError for
    "token_level_kl" (see ``token_advantages``) and "process" (see ``step_advantages``).
    """
    if callable(objective.advantage):
        given = torch.as_tensor(rewards, dtype=torch.float64, device="cpu").clone()
        ids, everywhere = torch.as_tensor(groups, device="cpu").clone(), torch.ones_like(given, dtype=torch.bool)
        return call_part("advantage", objective.advantage, given, ids, like=given, where=everywhere)
    match objective.advantage:
        case "group_mean":
            return group_mean(rewards, groups)
        case "grpo":
            return grpo(rewards, groups, ddof=objective.std_ddof, eps=objective.std_eps)
        case "rloo":
            return rloo(rewards, groups)
        case "raft":
            return raft(rewards, groups, threshold)
        case name:
            raise ConfigError(
                f"objective: advantage {name!r} differs between the tokens of a response, and this caller has one "
                "reward for each; use step_advantages() with the rewards of steps for 'process', token_advantages() "
                "with ref_logprobs for 'token_level_kl', or another advantage"
            )


def token_advantages(
    objective: Objective,
    rewards: Values,
    groups: Values,
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    threshold: float = POSITIVE,
) -> Tensor:
    """Return the objective's advantage of each token, whatever its kind: rewards, groups [N] -> [T].

    logprobs: [T], of the policy before the update; ref_logprobs: [T], None if the objective needs none (ConfigError
    if it does); loss_mask: bool [T]; cu_seqlens: int64 [N+1], of whole groups; threshold as in ``sequence_advantages``.
    """
    if objective.advantage != "token_level_kl":
        values = sequence_advantages(objective, rewards, groups, threshold).to(cu_seqlens.device)
        return segment_expand(values, cu_seqlens)
    if ref_logprobs is None:
        raise _missing_ref("advantage 'token_level_kl'")
    return token_level_kl(
        rewards,
        groups,
        logprobs,
        ref_logprobs,
        loss_mask,
        cu_seqlens,
        beta=objective.kl_coef,
        ddof=objective.std_ddof,
        eps=objective.std_eps,
        horizon=objective.kl_horizon,
    )


def step_advantages(
    objective: Objective, steps: Sequence[Sequence[tuple[int, float]]], groups: Values, lengths: Sequence[int]
) -> list[np.ndarray]:
    """Return the advantage "process": the sum of ``z_s`` over the steps s of the response that end at or after a token.

    result: one float64 [T_n] per response.
    ``z_s = (r_s - mean) / (std + eps)`` with statistics over all steps of all responses of the group, so a response of
    many steps weighs more in them. A response without steps is in no statistics and gets 0; so do tokens after the last
    step. Source: DeepSeekMath (arXiv 2402.03300), 4.1.3, process supervision.

    steps: by response, (index of the last token, reward) of its steps, ascending; groups: integer [N], whole groups;
    lengths: T_n, or 0 for a response whose tokens are not wanted. Raises NumericsError if a reward is not finite.
    """
    counts = [len(each) for each in steps]
    rewards = np.array([reward for each in steps for _, reward in each], dtype=np.float64)
    of_group = np.repeat(np.asarray(groups), counts)
    values = grpo(rewards, of_group, objective.std_ddof, objective.std_eps).numpy()
    found: list[np.ndarray] = []
    for each, own, length in zip(steps, np.split(values, np.cumsum(counts)[:-1]), lengths, strict=True):
        ends = np.array([end for end, _ in each], dtype=np.int64)
        to_go = np.append(own[::-1].cumsum()[::-1], 0.0)
        found.append(to_go[np.searchsorted(ends, np.arange(length))])
    return found


def select_responses(objective: Objective, rewards: Values, groups: Values, threshold: float = POSITIVE) -> Tensor:
    """Return bool [N]: the responses that train and count in denominators, by ``objective.selection``.

    threshold as in ``sequence_advantages``. Clear the loss_mask of the others before packing: advantages alone do not
    take a response out of a denominator.
    """
    contrast = ~uniform_groups(rewards, groups)
    if objective.selection == "mixed_groups":
        ids = torch.as_tensor(groups)
        return contrast[torch.unique(ids, return_inverse=True)[1]]
    if objective.selection == "positive":
        return sequence_advantages(objective, rewards, groups, threshold) > 0
    return torch.ones(len(rewards), dtype=torch.bool, device=contrast.device)


def coefficients(
    objective: Objective,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    power: float | None = None,
) -> Coefficients:
    """Return ``M_t * W_t * A_t / D`` for every token, less the KL's share: the derivative of J by its log-probability.

    denominators: global ones, over all micro-batches and data-parallel ranks of one optimizer step, so that the
    coefficients of the parts are exactly those of the whole; None if these columns are the whole batch. The columns
    must hold whole sequences: under context parallelism gather the log-probabilities and slice the result. power: the
    exponent of weight_fn "adaptive_power", to share one between micro-batches; None chooses it from these columns.

    Log-ratios are clamped to +-20 per token. A loss token with rollout_logprobs -inf leaves loss and denominators
    (``logprobs/invalid``); one with logprobs or old_logprobs -inf gets coefficient 0 and stands in no ratio of its
    sequence (``logprobs/dropped``). Any other non-finite value on a loss token, and a log-probability above 0 but for
    rounding (as raw logits are), raises NumericsError with the column and the first such token; a KL without
    ref_logprobs raises ConfigError.
    """
    return state_coefficients(objective, prepare(columns, denominators), columns.loss_mask, denominators, power)


def state_coefficients(
    objective: Objective, state: TokenState, loss_mask: Tensor, denominators: Denominators | None, power: float | None
) -> Coefficients:
    """Return what ``coefficients`` does, of columns that ``prepare`` has checked; the host does not wait here."""
    log_staleness = log_ratio(state.logprobs, state.old_logprobs, state.keep)
    weight, weight_metrics = importance_weight(objective, state, power)
    inside, trust_metrics = find_trusted(objective, state, log_staleness)
    scale = _aggregation_scale(objective, state, denominators)
    values = torch.where(inside, weight * state.advantages * scale, 0.0)
    if objective.prefix_grad:
        values = ratio_gradient(objective.ratio, values, state.keep, state.cu_seqlens)
    metrics = {
        "loss_tokens": Stat.total(state.usable.sum()),
        "logprobs/invalid": Stat.total((loss_mask & ~state.usable).sum()),
        "logprobs/dropped": Stat.total((state.usable & ~state.keep).sum()),
        "ratio": Stat.ratio(log_staleness, state.keep),
        **weight_metrics,
        **trust_metrics,
    }
    if objective.kl != "none":
        if state.ref_logprobs is None:
            raise _missing_ref(f"the penalty kl = {objective.kl!r}")
        gradient, kl_metrics = kl_penalty(objective.kl, state.logprobs, state.ref_logprobs, state.keep)
        values = values - torch.where(state.keep, objective.kl_coef * gradient * scale, 0.0)
        metrics |= kl_metrics
    return Coefficients(values, metrics)


def mini_batch_power(
    objective: Objective, micro_batches: Sequence[TokenColumns], total: Total = lambda sums: sums
) -> float | None:
    """Return the ``power`` that ``coefficients`` is to use for every micro-batch; None if the objective chooses none.

    micro_batches: all of one mini-batch on this rank, with log pi_theta as the update will find it; total: adds sums,
    float64 [S], over the ranks that hold the rest. Then the coefficients do not depend on how the mini-batch was cut.
    """
    if objective.weight_fn != "adaptive_power":
        return None
    states = [prepare(columns) for columns in micro_batches]
    log_ratios = torch.cat([weight_log_ratio(objective, state) for state in states])
    return adaptive_power(log_ratios, torch.cat([state.keep for state in states]), objective.ess_target, total)


def policy_loss(
    objective: Objective,
    columns: TokenColumns,
    denominators: Denominators | None = None,
    *,
    power: float | None = None,
) -> tuple[Tensor, dict[str, Stat]]:
    """Return the scalar ``-(coefficients * logprobs).sum()`` with gradient to ``columns.logprobs``, and its metrics.

    Arguments and errors as in ``coefficients``. Tokens with coefficient 0 are left out of the sum, for 0 times a
    log-probability of -inf is NaN.
    """
    result = coefficients(objective, columns, denominators, power=power)
    kept = torch.where(result.values != 0, columns.logprobs, 0.0)
    loss = -(result.values.detach() * kept).sum()
    return loss, {**result.metrics, "loss": Stat.total(loss)}


def _missing_ref(what: str) -> ConfigError:
    return ConfigError(
        f"objective: {what} needs the column ref_logprobs, which the batch does not have; compute the reference "
        f"policy's log-probabilities, or choose an objective without a KL"
    )


def _aggregation_scale(objective: Objective, state: TokenState, denominators: Denominators | None) -> Tensor:
    """Return 1/D, broadcastable to [T]. Empty sequences and batches divide by 1: they have no term to scale."""
    if denominators is None:
        num_tokens, num_sequences = count_loss_tokens(state.usable, state.cu_seqlens).clamp(min=1)
    else:
        num_tokens, num_sequences = max(denominators.num_tokens, 1), max(denominators.num_sequences, 1)
    one = torch.ones((), dtype=state.logprobs.dtype, device=state.logprobs.device)
    match objective.aggregation:
        case "token-mean":
            return one / num_tokens
        case "seq-mean-token-sum":
            return one / num_sequences
        case "seq-mean-token-mean":
            lengths = segment_sum(state.usable, state.cu_seqlens).clamp(min=1)
            return segment_expand(one / (lengths * num_sequences), state.cu_seqlens, state.usable.numel())
        case "seq-mean-token-sum-norm":
            assert objective.norm_length is not None, "checked when the objective was made"
            return one / objective.norm_length
