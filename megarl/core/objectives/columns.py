"""The per-token columns of a batch, their checks, and the tokens that count.

Ratios of two policies are computed once each. Functions of the user get copies of the columns; their results are
checked.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor

from megarl.core import ratios
from megarl.core.choices.parts import NON_NEGATIVE_ADVANTAGES, Objective, Policies, Scope
from megarl.core.choices.records import call_own, name_of
from megarl.core.devices import DeviceChecks
from megarl.errors import ConfigError, NumericsError, refusal


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The sampler's K most likely tokens at each position, with log-probabilities of sampler and policy."""

    rollout_logprobs: Tensor
    """[T, K], log mu."""
    logprobs: Tensor
    """[T, K], log pi_theta of the sampler's tokens; without gradient."""
    has_token: Tensor
    """bool [T], True if the sampled token is among the K."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Packed per-token inputs of an objective: T tokens of N whole sequences, all on one device.

    Raises ValueError, with the correction, for another shape, dtype or device.
    """

    logprobs: Tensor
    """[T], log pi_theta; the only column with gradient."""
    old_logprobs: Tensor
    """[T], log pi_old: the training engine before the update."""
    rollout_logprobs: Tensor
    """[T], log mu: the rollout engine, under the distribution sampled from (temperature, top-p)."""
    advantages: Tensor
    """[T], of ``advantages_of``, repeated for the tokens of a response."""
    loss_mask: Tensor
    """bool [T], True where the model generated the token. Elsewhere columns may hold any value."""
    cu_seqlens: Tensor
    """int64 [N+1], bounds of the sequences: sequence n is ``[cu_seqlens[n], cu_seqlens[n+1])``."""
    ref_logprobs: Tensor | None = None
    """[T], log pi_ref, for a KL penalty."""
    topk: TopK | None = None
    """For masks that compare the sampler's top K tokens."""
    router_drift: Tensor | None = None
    """[T], D of ``Objective.router_shift_floor``, from 0 up, of the routers at the position that predicts the token."""

    def __post_init__(self) -> None:
        logprobs = self.logprobs
        columns = {**self.float_columns(), "loss_mask": self.loss_mask}
        for name, column in columns.items():
            if column.shape != logprobs.shape or column.dim() != 1:
                raise ValueError(f"{name} is {list(column.shape)}, expected [T] like logprobs {list(logprobs.shape)}")
            if name != "loss_mask" and not column.is_floating_point():
                raise ValueError(f"{name} is {column.dtype}, expected floating point: give {name}.float()")
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask is {self.loss_mask.dtype}, expected torch.bool: give loss_mask.bool()")
        for name, column in (*columns.items(), ("cu_seqlens", self.cu_seqlens)):
            if column.device != logprobs.device:
                raise ValueError(refusal("column_elsewhere", name=name, column=column, logprobs=logprobs))
        if (topk := self.topk) is not None:
            are_rows = topk.logprobs.shape[:1] == topk.has_token.shape == logprobs.shape
            if not are_rows or topk.logprobs.shape != topk.rollout_logprobs.shape:
                raise ValueError(f"topk has other shapes than [T, K] and [T], with T = {logprobs.numel()}")
        if not self.cu_seqlens.is_cuda:  # on a GPU ``prepare`` checks them with the values: one wait instead of two
            ratios.check_cu_seqlens(self.cu_seqlens, logprobs.numel())

    @classmethod
    def of_padded(cls, logprobs: Tensor, batch: Mapping[str, Any]) -> "TokenColumns":
        """Flatten a padded batch of b sequences: logprobs [b, s], other columns [b, s] by their names in ``batch``.

        ``loss_mask`` is False on padding. ``ref_logprobs`` and ``router_drift`` may be absent. ValueError if another
        column is absent or has another shape.
        """
        if logprobs.dim() != 2:
            raise ValueError(f"logprobs is {list(logprobs.shape)}, expected [b, s]; packed columns need no of_padded")
        names = ["old_logprobs", "rollout_logprobs", "advantages", "loss_mask", "ref_logprobs", "router_drift"]
        if missing := [name for name in names[:4] if name not in batch]:
            facts = {"column": missing[0], "columns": ", ".join(names[:4]), "shape": list(logprobs.shape)}
            raise ValueError(refusal("batch_lacks", **facts))
        columns = {name: batch[name] for name in names if name in batch}
        for name, column in columns.items():
            if column.shape != logprobs.shape:
                raise ValueError(f"{name} is {list(column.shape)}, expected {list(logprobs.shape)} like logprobs")
        bounds = torch.arange(0, logprobs.numel() + 1, logprobs.size(1), device=logprobs.device)
        return cls(logprobs.flatten(), **{name: x.flatten() for name, x in columns.items()}, cu_seqlens=bounds)

    def float_columns(self) -> dict[str, Tensor]:
        """Return the floating-point columns [T] by name."""
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs", "router_drift")
        return {name: column for name in names if (column := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class Denominators:
    """The divisors of an aggregation. The global ones are the sum over micro-batches and data-parallel ranks.

    (The constant of "seq-mean-token-sum-norm" is no property of a batch but ``Objective.norm_length``.)
    """

    num_tokens: int
    """Loss tokens."""
    num_sequences: int
    """Sequences with at least one loss token."""

    @classmethod
    def of(cls, loss_mask: Tensor, cu_seqlens: Tensor, rollout_logprobs: Tensor | None = None) -> "Denominators":
        """Count a packed batch: loss_mask bool [T], cu_seqlens int64 [N+1].

        rollout_logprobs: [T], to leave out tokens at -inf as ``coefficients`` does.
        """
        mask = loss_mask if rollout_logprobs is None else ratios.usable_mask(loss_mask, rollout_logprobs)
        return cls(*count_loss_tokens(mask, cu_seqlens).tolist())

    def __add__(self, other: "Denominators") -> "Denominators":
        return Denominators(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)


def count_loss_tokens(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the ``Denominators`` of a packed batch, int64 [2] on the device of the mask: mask bool [T], cu_seqlens
    int64 [N+1], also wrong bounds."""
    running = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    at_bounds = running[cu_seqlens.long().clamp(0, mask.numel())]
    return torch.stack([running[-1], (at_bounds.diff() > 0).sum()])


@dataclass(frozen=True, slots=True, eq=False)
class TokenState:
    """The columns [T] without gradient, in one dtype (fp32, or fp64 if any column is), 0 where not ``keep``."""

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    usable: Tensor
    """bool [T], loss tokens with rollout_logprobs above -inf: counted in denominators."""
    keep: Tensor
    """bool [T], usable tokens with logprobs and old_logprobs above -inf: may train."""
    cu_seqlens: Tensor
    """int64 [N+1]."""
    ref_logprobs: Tensor | None = None
    topk: TopK | None = None
    router_drift: Tensor | None = None

    def pair(self, policies: Policies) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities [T] of both policies."""
        columns = {"theta": self.logprobs, "old": self.old_logprobs, "mu": self.rollout_logprobs}
        first, second = policies.split("_")
        return columns[first], columns[second]


def prepare(
    columns: TokenColumns,
    denominators: Denominators | None = None,
    objective: Objective | None = None,
    checks: DeviceChecks | None = None,
) -> TokenState:
    """Check the values of loss tokens and find the tokens that count. The host waits for the device once.

    checks: takes the conditions on a device, for the caller to ``require`` later; None: they are required here.

    NumericsError, with the column and the first token, if a loss token has a non-finite advantage or no
    log-probability (NaN, +inf, above ``LOGPROB_TOLERANCE``). ValueError for wrong cu_seqlens, and if the global
    denominators are below the counts of these columns. ConfigError for a negative advantage of an objective with
    ``NON_NEGATIVE_ADVANTAGES``.
    """
    state, bounds, collected = token_state(columns), columns.cu_seqlens, DeviceChecks() if checks is None else checks
    floats = {name: column.detach() for name, column in columns.float_columns().items()}
    finite = [floats.pop(name) * 0 for name in _FINITE if name in floats]
    # NaN where an advantage or a drift is not finite, or where a log-probability is NaN; else the largest value, or 0.
    largest = reduce(torch.maximum, [*floats.values(), *finite])
    # The details are computed only after a failure.
    if bounds.is_cuda:
        arguments = bounds, largest.numel()
        collected.add(ratios.is_wrong_cu_seqlens(*arguments), partial(ratios.check_cu_seqlens, *arguments))
    collected.add((columns.loss_mask & ~ratios.is_logprob(largest)).any(), partial(_refuse_values, columns))
    if objective is not None and objective.advantage in NON_NEGATIVE_ADVANTAGES:
        is_negative = (columns.loss_mask & (columns.advantages < 0)).any()
        collected.add(is_negative, partial(_refuse_negative_advantages, objective, columns))
    if denominators is not None:
        num_tokens, num_sequences = counts = count_loss_tokens(state.usable, bounds)
        is_smaller = (num_tokens > denominators.num_tokens) | (num_sequences > denominators.num_sequences)
        collected.add(is_smaller, partial(_refuse_denominators, denominators, counts))
    if checks is None:
        collected.require()
    return state


_FINITE = ("advantages", "router_drift")
"""Columns with finite numbers; the others hold log-probabilities."""


def token_state(columns: TokenColumns) -> TokenState:
    """Return the columns in one dtype with their masks, without checks of values."""
    floats = columns.float_columns()
    wide = torch.float64 if any(column.dtype == torch.float64 for column in floats.values()) else torch.float32
    values = {name: column.detach().to(wide) for name, column in floats.items()}
    usable = ratios.usable_mask(columns.loss_mask, values["rollout_logprobs"])
    keep = usable & ~torch.isneginf(values["logprobs"]) & ~torch.isneginf(values["old_logprobs"])
    # Masked before any subtraction: -inf minus -inf on a padding token would be NaN.
    clean = {name: torch.where(keep, column, 0.0) for name, column in values.items()}
    return TokenState(**clean, usable=usable, keep=keep, cu_seqlens=columns.cu_seqlens, topk=columns.topk)


def _refuse_denominators(denominators: Denominators, counts: Tensor) -> None:
    own = Denominators(*counts.tolist())
    raise ValueError(f"the global denominators {denominators} are smaller than this part's own {own}")


def _refuse_values(columns: TokenColumns) -> None:
    for name, column in columns.float_columns().items():
        bad = columns.loss_mask & ~(torch.isfinite(column) if name in _FINITE else ratios.is_logprob(column))
        if bool(bad.any()):
            error = NumericsError(f"{ratios.describe_first(name, column, bad)}, expected a finite number")
            raise error if name in _FINITE else ratios.logprob_error(name, column, bad)


def _refuse_negative_advantages(objective: Objective, columns: TokenColumns) -> None:
    bad = columns.loss_mask & (columns.advantages < 0)
    first = ratios.describe_first("advantages", columns.advantages, bad)
    raise ConfigError(refusal("negative_advantage", first=first, objective=objective))


def copy_columns(source: TokenColumns | TokenState, loss_mask: Tensor) -> TokenColumns:
    """Return columns without gradient for a function of the user, which may change them; loss_mask: bool [T]."""
    columns = {name: getattr(source, name) for field in fields(TokenColumns) if (name := field.name) != "loss_mask"}
    topk = columns.pop("topk")
    copies: dict[str, Any] = {name: column.detach().clone() for name, column in columns.items() if column is not None}
    return TokenColumns(**copies, loss_mask=loss_mask.clone(), topk=topk)


def call_part(label: str, function: Callable[..., Any], *arguments: Any, expected: Tensor, trains: Tensor) -> Tensor:
    """Return ``function(*arguments)`` [T], checked by ``check_returned``; ConfigError if the function raises."""
    return check_returned(label, function, call_own(label, function, *arguments), expected, trains)


def check_returned(
    label: str, function: Callable[..., Any], result: object, expected: Tensor, trains: Tensor
) -> Tensor:
    """Return the result [T] of a function of the user, without gradient and 0 outside ``trains``, bool [T].

    label, function: for messages; expected: a tensor with the shape, device and kind (bool or floating point) of a
    valid result. ConfigError for another kind of result, NumericsError if it is not finite somewhere in ``trains``.
    """
    subject = f"{label}: the function {name_of(function)} returned"
    unit = "response" if label == "advantage" else "token"
    is_bool = expected.dtype == torch.bool
    if (
        not isinstance(result, Tensor)
        or result.shape != expected.shape
        or (result.dtype != torch.bool if is_bool else not result.is_floating_point())
        or result.device != expected.device
    ):
        text = type(result).__name__
        if isinstance(result, Tensor):
            text = f"{result.dtype} {list(result.shape)} on {result.device}"
        valid = f"{list(expected.shape)} on {expected.device}"
        raise ConfigError(f"{subject} {text}, expected one {'bool' if is_bool else 'float'} for each {unit}, {valid}")
    values = torch.where(trains, result.detach(), torch.zeros((), dtype=result.dtype, device=result.device))
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        facts = {"subject": subject, "value": values[first].item(), "unit": unit, "first": first}
        raise NumericsError(refusal("result_not_finite", count=len(values), bad=int(bad.sum()), **facts))
    return values


class PolicyRatios:
    """Ratios of a batch, [T]; log-ratios, computed once each, are 0 on tokens without training.

    router_shift_floor: of ``Objective``, multiplies theta/old of every token.
    """

    def __init__(self, state: TokenState, router_shift_floor: float | None = None) -> None:
        self._state, self._floor = state, router_shift_floor
        self._cache: dict[tuple[Policies, Scope], Tensor] = {}
        self.count = torch.count_nonzero(state.keep)
        """int64 [], tokens that train."""

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T], the position t of each token among the trained tokens of its response, counted from 1."""
        return ratios.positions(self._state.keep, self._state.cu_seqlens)

    def log(self, policies: Policies, scope: Scope = "token") -> Tensor:
        """Return the log-ratio [T] over the tokens of ``scope``; single tokens are clamped to +-20, sums are not."""
        if (policies, scope) not in self._cache:
            if scope == "token":
                numerator, denominator = self._state.pair(policies)
                log_ratio = (numerator - denominator).clamp_(-ratios.LOG_RATIO_BOUND, ratios.LOG_RATIO_BOUND)
                if policies == "theta_old" and self._floor is not None and self._state.router_drift is not None:
                    log_ratio = log_ratio - self._state.router_drift.clamp(0, -math.log(self._floor))
            else:
                log_ratio = ratios.aggregate(scope, self.log(policies), self._state.keep, self._state.cu_seqlens)
            self._cache[policies, scope] = log_ratio
        return self._cache[policies, scope]

    def ratio(self, policies: Policies, scope: Scope = "token") -> Tensor:
        """Return ``exp(log)`` [T], which may overflow to inf over several tokens."""
        return self.log(policies, scope).exp()
