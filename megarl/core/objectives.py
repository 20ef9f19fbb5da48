"""The one equation, and the table of algorithms that are rows of it.

    grad J = sum_t  M_t * W_t * A_t * grad log pi_theta(y_t) / D

``A`` advantage, ``W`` importance weight, ``M`` trust mask (0 or 1), ``D`` denominator (aggregation). ``M`` and ``W``
carry no gradient, so an objective is nothing but one coefficient per token, and its loss is always
``-(coefficients * logprobs).sum()``. Three policies are told apart: theta (being trained), old (the training engine
before the update) and mu (the rollout engine that sampled).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor

from megarl.core.advantages import ADVANTAGES, AdvantageName, Values, grpo
from megarl.core.columns import Denominators, TokenColumns, TokenState, prepare
from megarl.core.metrics import Stat
from megarl.core.ratios import log_ratio, segment_expand, segment_sum
from megarl.errors import ConfigError

__all__ = [
    "OBJECTIVES",
    "Coefficients",
    "Denominators",
    "Objective",
    "TokenColumns",
    "coefficients",
    "policy_loss",
    "sequence_advantages",
]

RatioKind = Literal["token"]
WeightPolicies = Literal["none", "theta_mu", "theta_old", "old_mu"]
WeightFunction = Literal["identity"]
CappedRatio = Literal["theta_mu", "old_mu"]
MaskKind = Literal["none", "ppo"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass(frozen=True, slots=True)
class Objective:
    """One row of the table; ``dataclasses.replace`` gives a variant. Raises ConfigError if the parts do not fit."""

    advantage: AdvantageName
    """How rewards become advantages; see ``megarl.core.advantages``."""
    weight: WeightPolicies
    """The policies whose ratio weights a token, numerator first; "none" is weight 1."""
    mask: MaskKind
    """"ppo" drops a token with A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low, where r = theta/old."""
    aggregation: Aggregation
    """The denominator: all tokens | sequences | sequences and each one's tokens | the constant norm_length."""
    ratio: RatioKind = "token"
    """Over which tokens a ratio is taken: the token alone."""
    weight_fn: WeightFunction = "identity"
    """Function applied to the ratio before the cap."""
    cap: float | None = None
    """Truncated importance sampling: the weight is min(ratio, cap), not renormalised. None for no cap."""
    tis_on: CappedRatio = "theta_mu"
    """What the cap is on: the whole weight, or (decoupled) only its factor old/mu, times theta/old uncapped."""
    eps_low: float = 0.2
    """Lower clip distance of the mask."""
    eps_high: float = 0.2
    """Upper clip distance of the mask."""
    std_ddof: int = 1
    """Of the standard deviation in the "grpo" advantage: 1 unbiased, 0 population."""
    std_eps: float = 1e-6
    """Added to that standard deviation."""
    norm_length: int | None = None
    """Tokens; the constant L of "seq-mean-token-sum-norm", and of no other aggregation."""

    def __post_init__(self) -> None:
        choices = {
            "advantage": AdvantageName,
            "weight": WeightPolicies,
            "mask": MaskKind,
            "aggregation": Aggregation,
            "ratio": RatioKind,
            "weight_fn": WeightFunction,
            "tis_on": CappedRatio,
        }
        for field, literal in choices.items():
            if getattr(self, field) not in get_args(literal):
                raise ConfigError(
                    f"objective: {field} is {getattr(self, field)!r}, expected one of {get_args(literal)}"
                )
        if not (self.eps_low >= 0 and self.eps_high >= 0):
            raise ConfigError(f"objective: eps_low {self.eps_low} and eps_high {self.eps_high} must not be negative")
        if self.cap is not None and not self.cap > 0:
            raise ConfigError(f"objective: cap is {self.cap}, expected a positive number, or None for no cap")
        if self.cap is not None and self.weight == "none":
            raise ConfigError(f"objective: cap {self.cap} without a weight has nothing to cap; set cap to None")
        if self.tis_on == "old_mu" and self.weight not in ("theta_mu", "old_mu"):
            raise ConfigError(f"objective: tis_on is 'old_mu', but the weight {self.weight!r} has no factor old/mu")
        if (self.norm_length is not None) != (self.aggregation == "seq-mean-token-sum-norm"):
            raise ConfigError(
                f"objective: aggregation {self.aggregation!r} with norm_length {self.norm_length}; "
                f"seq-mean-token-sum-norm needs a norm_length in tokens, the others take none"
            )
        if self.norm_length is not None and self.norm_length < 1:
            raise ConfigError(f"objective: norm_length is {self.norm_length}, expected at least 1 token")


_MINIRL = Objective(
    advantage="group_mean",
    weight="theta_mu",
    mask="ppo",
    aggregation="seq-mean-token-sum",
    cap=5.0,
    eps_low=0.2,
    eps_high=0.27,
)

OBJECTIVES: Mapping[str, Objective] = MappingProxyType(
    {
        # MiniRL and its ablations: Zheng et al., arXiv 2512.01374, eq. 7.
        "minirl": _MINIRL,
        "minirl_length_norm": replace(_MINIRL, aggregation="seq-mean-token-mean"),
        "minirl_no_is": replace(_MINIRL, weight="theta_old", cap=None),
        "minirl_no_clip": replace(_MINIRL, mask="none"),
        # DeepSeekMath, arXiv 2402.03300, eq. 3 without its KL term; the PPO minimum in the form of its gradient.
        "grpo": Objective(
            advantage="grpo",
            weight="theta_old",
            mask="ppo",
            aggregation="seq-mean-token-mean",
        ),
        # Williams 1992 with the group's mean as baseline.
        "reinforce": Objective(
            advantage="group_mean",
            weight="none",
            mask="none",
            aggregation="seq-mean-token-sum",
        ),
    }
)
"""Named algorithms. Their gradients, not their loss values, are those of the papers."""


@dataclass(frozen=True, slots=True, eq=False)
class Coefficients:
    """What multiplies ``grad log pi_theta`` of each token."""

    values: Tensor
    """[T], dJ/dlogprobs with the aggregation included; 0 on every token that does not train. fp32, or fp64."""
    metrics: dict[str, Stat]
    """Mergeable statistics; ``megarl.core.metrics`` merges and finalises them."""


def sequence_advantages(objective: Objective, rewards: Values, groups: Values) -> Tensor:
    """Return the objective's advantage of each response: rewards [N], groups integer [N] -> [N]."""
    if objective.advantage == "grpo":
        return grpo(rewards, groups, ddof=objective.std_ddof, eps=objective.std_eps)
    return ADVANTAGES[objective.advantage](rewards, groups)


def coefficients(objective: Objective, columns: TokenColumns, denominators: Denominators | None = None) -> Coefficients:
    """Return ``M_t * W_t * A_t / D`` for every token: the derivative of J by its log-probability.

    denominators: global ones, over all micro-batches and data-parallel ranks of one optimizer step, so that the
    coefficients of the parts are exactly those of the whole; None if these columns are the whole batch. The columns
    must hold whole sequences: under context parallelism gather the log-probabilities and slice the result.

    Log-ratios are clamped to +-20 per token. A loss token with rollout_logprobs -inf leaves loss and denominators
    (``invalid_logprob``); one with logprobs or old_logprobs -inf gets coefficient 0 (``dropped_logprob``). Any other
    non-finite value on a loss token raises NumericsError with the column and the first such token.
    """
    state = prepare(columns)
    log_staleness = log_ratio(state.logprobs, state.old_logprobs, state.keep)
    weight, truncated = _weight(objective, state)
    high, low = _outside_trust(objective, log_staleness.exp(), state)
    scale = _aggregation_scale(objective, state, columns.cu_seqlens, denominators)
    trusted = state.keep & ~(high | low)
    values = torch.where(trusted, weight * state.advantages * scale, 0.0)
    metrics = {
        "loss_tokens": Stat.total(state.usable.sum()),
        "logprobs/invalid": Stat.total((columns.loss_mask & ~state.usable).sum()),
        "logprobs/dropped": Stat.total((state.usable & ~state.keep).sum()),
        "ratio": Stat.ratio(log_staleness, state.keep),
        "tis/weight": Stat.summary(weight, state.keep),
        "tis/ess": Stat.ess(weight, state.keep),
        "clip/high": Stat.mean(high, state.keep),
        "clip/low": Stat.mean(low, state.keep),
        "tis/truncated": Stat.mean(truncated, state.keep),
    }
    return Coefficients(values, metrics)


def policy_loss(
    objective: Objective, columns: TokenColumns, denominators: Denominators | None = None
) -> tuple[Tensor, dict[str, Stat]]:
    """Return the scalar ``-(coefficients * logprobs).sum()`` with gradient to ``columns.logprobs``, and its metrics.

    Arguments and errors as in ``coefficients``. Tokens with coefficient 0 are left out of the sum, for 0 times a
    log-probability of -inf is NaN.
    """
    result = coefficients(objective, columns, denominators)
    kept = torch.where(result.values != 0, columns.logprobs, 0.0)
    loss = -(result.values.detach() * kept).sum()
    return loss, {**result.metrics, "loss": Stat.total(loss)}


def _weight(objective: Objective, state: TokenState) -> tuple[Tensor, Tensor]:
    """Return the importance weight [T] and, bool [T], where the cap has cut it."""
    if objective.weight == "none":
        return torch.ones_like(state.logprobs), torch.zeros_like(state.keep)
    policies = {"theta": state.logprobs, "old": state.old_logprobs, "mu": state.rollout_logprobs}
    decoupled = objective.weight == "theta_mu" and objective.tis_on == "old_mu"
    numerator, denominator = ("old_mu" if decoupled else objective.weight).split("_")
    ratio = log_ratio(policies[numerator], policies[denominator], state.keep).exp()
    if objective.cap is None:
        truncated = torch.zeros_like(state.keep)
    else:
        truncated = state.keep & (ratio > objective.cap)
        ratio = ratio.clamp(max=objective.cap)
    if decoupled:
        ratio = ratio * log_ratio(state.logprobs, state.old_logprobs, state.keep).exp()
    return ratio, truncated


def _outside_trust(objective: Objective, staleness: Tensor, state: TokenState) -> tuple[Tensor, Tensor]:
    """Return where the mask drops a token, bool [T] each: above the window with A > 0, below it with A < 0."""
    if objective.mask == "none":
        nowhere = torch.zeros_like(state.keep)
        return nowhere, nowhere
    high = state.keep & (state.advantages > 0) & (staleness > 1 + objective.eps_high)
    low = state.keep & (state.advantages < 0) & (staleness < 1 - objective.eps_low)
    return high, low


def _aggregation_scale(
    objective: Objective, state: TokenState, cu_seqlens: Tensor, denominators: Denominators | None
) -> Tensor:
    """Return 1/D, broadcastable to [T]. Empty sequences and batches divide by 1: they have no term to scale."""
    local = Denominators.of(state.usable, cu_seqlens)
    if denominators is None:
        denominators = local
    elif denominators.num_tokens < local.num_tokens or denominators.num_sequences < local.num_sequences:
        raise ValueError(f"the global denominators {denominators} are smaller than this part's own {local}")
    one = torch.ones((), dtype=state.logprobs.dtype, device=state.logprobs.device)
    match objective.aggregation:
        case "token-mean":
            return one / max(denominators.num_tokens, 1)
        case "seq-mean-token-sum":
            return one / max(denominators.num_sequences, 1)
        case "seq-mean-token-mean":
            lengths = segment_sum(state.usable, cu_seqlens).clamp(min=1)
            return segment_expand(one / (lengths * max(denominators.num_sequences, 1)), cu_seqlens)
        case "seq-mean-token-sum-norm":
            assert objective.norm_length is not None, "checked when the objective was made"
            return one / objective.norm_length
