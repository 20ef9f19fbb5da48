"""The per-token columns that an objective reads, and the rules that make them safe to compute with.

Functions of the user that stand for a part of an objective get copies, and what they return is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megarl.core.choices.own import call_own, name_of
from megarl.core.choices.parts import Policies
from megarl.core.ratios import is_logprob, logprob_error, usable_mask
from megarl.core.segments import check_cu_seqlens, cu_seqlens_error, is_wrong_cu_seqlens
from megarl.errors import ConfigError, NumericsError


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """What the sampler said of its K most likely tokens at each position, and what the policy says of them."""

    rollout_logprobs: Tensor
    """[T, K], log mu."""
    logprobs: Tensor
    """[T, K], log pi_theta of the same tokens; without gradient."""
    has_token: Tensor
    """bool [T], whether the sampled token is one of them."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """Packed per-token inputs of an objective: T tokens of N whole sequences. Raises ValueError if shapes differ."""

    logprobs: Tensor
    """[T], log pi_theta; the one column with gradient."""
    old_logprobs: Tensor
    """[T], log pi_old: the training engine before the update."""
    rollout_logprobs: Tensor
    """[T], log mu: the engine that sampled, under the distribution that it sampled from."""
    advantages: Tensor
    """[T]."""
    loss_mask: Tensor
    """bool [T], True where the model generated the token; other columns may hold anything where it is False."""
    cu_seqlens: Tensor
    """int64 [N+1]."""
    ref_logprobs: Tensor | None = None
    """[T], log pi_ref, where a KL penalty needs it."""
    topk: TopK | None = None
    """Where a mask compares the sampler's top K tokens."""

    def __post_init__(self) -> None:
        for name, column in {**self.float_columns(), "loss_mask": self.loss_mask}.items():
            if column.shape != self.logprobs.shape or column.dim() != 1:
                raise ValueError(
                    f"{name} is {list(column.shape)}, expected [T] like logprobs {list(self.logprobs.shape)}"
                )
            if name != "loss_mask" and not column.is_floating_point():
                raise ValueError(f"{name} is {column.dtype}, expected floating point")
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"loss_mask is {self.loss_mask.dtype}, expected torch.bool")
        if self.topk is not None and not (
            self.topk.logprobs.shape == self.topk.rollout_logprobs.shape
            and self.topk.logprobs.shape[:1] == self.topk.has_token.shape == self.logprobs.shape
        ):
            raise ValueError(f"topk has other shapes than [T, K] and [T], with T = {self.logprobs.numel()}")
        if not self.cu_seqlens.is_cuda:  # else ``prepare`` checks it with the values, so that the host waits once
            check_cu_seqlens(self.cu_seqlens, self.logprobs.numel())

    @classmethod
    def of_padded(cls, logprobs: Tensor, batch: Mapping[str, Any]) -> TokenColumns:
        """Flatten a padded batch: logprobs [b, s], and the other columns from ``batch`` under their names here.

        Each of the b rows is a sequence; ``loss_mask`` is False on its padding. ``ref_logprobs`` may be absent.
        """
        if logprobs.dim() != 2:
            raise ValueError(f"logprobs is {list(logprobs.shape)}, expected [b, s]; packed columns need no of_padded")
        names = ["old_logprobs", "rollout_logprobs", "advantages", "loss_mask", "ref_logprobs"]
        if missing := [name for name in names[:4] if name not in batch]:
            raise ValueError(
                f"the batch has no {missing[0]}, expected {', '.join(names[:4])}, each {list(logprobs.shape)}"
            )
        for name in names:
            if name in batch and batch[name].shape != logprobs.shape:
                raise ValueError(f"{name} is {list(batch[name].shape)}, expected {list(logprobs.shape)} like logprobs")
        bounds = torch.arange(0, logprobs.numel() + 1, logprobs.size(1), device=logprobs.device)
        given = {name: batch[name].flatten() for name in names if name in batch}
        return cls(logprobs.flatten(), **given, cu_seqlens=bounds)

    def float_columns(self) -> dict[str, Tensor]:
        """Return the floating-point columns by name."""
        columns = {
            "logprobs": self.logprobs,
            "old_logprobs": self.old_logprobs,
            "rollout_logprobs": self.rollout_logprobs,
            "advantages": self.advantages,
        }
        return columns if self.ref_logprobs is None else {**columns, "ref_logprobs": self.ref_logprobs}


@dataclass(frozen=True, slots=True)
class Denominators:
    """What an aggregation divides by; the sum over micro-batches and data-parallel ranks is the global one.

    The constant of "seq-mean-token-sum-norm" is no property of a batch: it is ``Objective.norm_length``.
    """

    num_tokens: int
    """Loss tokens."""
    num_sequences: int
    """Sequences with at least one loss token."""

    @classmethod
    def of(cls, loss_mask: Tensor, cu_seqlens: Tensor, rollout_logprobs: Tensor | None = None) -> Denominators:
        """Count a packed batch: loss_mask bool [T], cu_seqlens int64 [N+1].

        Give rollout_logprobs [T] to leave out tokens at -inf, as ``coefficients`` does when it counts by itself.
        """
        mask = loss_mask if rollout_logprobs is None else usable_mask(loss_mask, rollout_logprobs)
        return cls(*count_loss_tokens(mask, cu_seqlens).tolist())

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)

    def __le__(self, other: Denominators) -> bool:
        """Whether neither number is larger."""
        return self.num_tokens <= other.num_tokens and self.num_sequences <= other.num_sequences


def count_loss_tokens(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return int64 [2] on the device of the mask: the ``Denominators`` of a packed batch. Any cu_seqlens is safe."""
    running = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    at_bounds = running[cu_seqlens.long().clamp(0, mask.numel())]
    return torch.stack([running[-1], (at_bounds.diff() > 0).sum()])


@dataclass(frozen=True, slots=True, eq=False)
class TokenState:
    """The columns without gradient, in one dtype (fp32, or fp64 if any column is), 0 where not ``keep``."""

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    usable: Tensor
    """bool [T], loss tokens that the rollout engine can have sampled: the ones that denominators count."""
    keep: Tensor
    """bool [T], usable tokens to which pi_theta and pi_old give a probability above 0: the ones that may train."""
    cu_seqlens: Tensor
    """int64 [N+1]."""
    ref_logprobs: Tensor | None = None
    topk: TopK | None = None

    def pair(self, policies: Policies) -> tuple[Tensor, Tensor]:
        """The log-probabilities [T] of both policies."""
        columns = {"theta": self.logprobs, "old": self.old_logprobs, "mu": self.rollout_logprobs}
        first, second = policies.split("_")
        return columns[first], columns[second]


def prepare(columns: TokenColumns, denominators: Denominators | None = None) -> TokenState:
    """Check that every value on a loss token is admissible, and settle which tokens count. The host waits once.

    Raises NumericsError naming column and first token if a loss token has an advantage that is not finite, or no
    log-probability in another column: NaN, +inf, or more than ``LOGPROB_TOLERANCE``. ValueError for wrong cu_seqlens,
    and if the global denominators are smaller than this part's own.
    """
    state, bounds = token_state(columns), columns.cu_seqlens
    floats = {name: column.detach() for name, column in columns.float_columns().items()}
    advantages = floats.pop("advantages")
    # NaN where the advantage is not finite, or where a log-probability is NaN; else the largest of these, or 0.
    largest = functools.reduce(torch.maximum, floats.values(), advantages * 0)
    flags = [(columns.loss_mask & ~is_logprob(largest)).any()]
    if bounds.is_cuda:  # else they were checked when the columns were made
        flags.append(is_wrong_cu_seqlens(bounds, largest.numel()))
    # One transfer to the host for all checks; what it was is asked only when something is wrong.
    found = torch.cat([count_loss_tokens(state.usable, bounds), torch.stack(flags)]).tolist()
    if any(found[3:]):
        raise cu_seqlens_error(bounds, largest.numel())
    if found[2]:
        _refuse_values(columns)
    local = Denominators(*found[:2])
    if denominators is not None and not local <= denominators:
        raise ValueError(f"the global denominators {denominators} are smaller than this part's own {local}")
    return state


def token_state(columns: TokenColumns) -> TokenState:
    """Return the columns in one dtype with their masks, without checks."""
    floats = columns.float_columns()
    wide = torch.float64 if any(column.dtype == torch.float64 for column in floats.values()) else torch.float32
    values = {name: column.detach().to(wide) for name, column in floats.items()}
    usable = usable_mask(columns.loss_mask, values["rollout_logprobs"])
    keep = usable & ~torch.isneginf(values["logprobs"]) & ~torch.isneginf(values["old_logprobs"])
    # Masked once here, before any subtraction: -inf minus -inf on a padding token would be NaN.
    clean = {name: torch.where(keep, column, 0.0) for name, column in values.items()}
    return TokenState(**clean, usable=usable, keep=keep, cu_seqlens=columns.cu_seqlens, topk=columns.topk)


def split_state(state: TokenState, most: int) -> list[TokenState]:
    """Return views of whole sequences, each of at most ``most`` tokens unless one sequence is longer."""
    bounds, cuts = state.cu_seqlens, [0]
    while cuts[-1] < bounds.numel() - 1:
        end = int(torch.searchsorted(bounds, bounds[cuts[-1]] + most, right=True)) - 1
        cuts.append(max(end, cuts[-1] + 1))
    parts = []
    named = {field.name: getattr(state, field.name) for field in fields(TokenState)}
    for first, last in pairwise(cuts):
        begin, end = int(bounds[first]), int(bounds[last])
        part: dict[str, Any] = {name: column[begin:end] for name, column in named.items() if isinstance(column, Tensor)}
        topk = None if state.topk is None else TopK(*(getattr(state.topk, f.name)[begin:end] for f in fields(TopK)))
        parts.append(TokenState(**(part | {"cu_seqlens": bounds[first : last + 1] - begin, "topk": topk})))
    return parts


def _refuse_values(columns: TokenColumns) -> None:
    for name, column in columns.float_columns().items():
        bad = columns.loss_mask & ~(torch.isfinite(column) if name == "advantages" else is_logprob(column))
        if not bool(bad.any()):
            continue
        if name != "advantages":
            raise logprob_error(name, column, bad)
        token = int(bad.nonzero()[0])
        raise NumericsError(
            f"advantages is {column[token].item()} at token {token} of the packed batch ({int(bad.sum())} such loss "
            "tokens), expected a finite number: look at the pass that computed this column"
        )


def copy_columns(source: TokenColumns | TokenState, loss_mask: Tensor) -> TokenColumns:
    """Return columns without gradient that a function may change."""
    given = {field.name: getattr(source, field.name) for field in fields(TokenColumns) if field.name != "loss_mask"}
    topk = given.pop("topk")
    copies: dict[str, Any] = {name: column.detach().clone() for name, column in given.items() if column is not None}
    return TokenColumns(**copies, loss_mask=loss_mask.clone(), topk=topk)


def call_part(part: str, function: Callable[..., Any], *given: Any, like: Tensor, where: Tensor) -> Tensor:
    """Return ``function(*given)``, checked by ``check_returned``; ConfigError if it raises."""
    return check_returned(part, function, call_own(part, function, *given), like, where)


def check_returned(part: str, function: Callable[..., Any], found: object, like: Tensor, where: Tensor) -> Tensor:
    """Return what a function returned, without gradient and 0 outside of ``where``, bool [T].

    ConfigError unless it is a tensor of the shape, the device and the kind (bool or floating point) of ``like``,
    NumericsError if it is not finite somewhere in ``where``. Part and function are for the messages.
    """
    who, each = f"{part}: the function {name_of(function)} returned", "response" if part == "advantage" else "token"
    is_bool = like.dtype == torch.bool
    if (
        not isinstance(found, Tensor)
        or found.shape != like.shape
        or (found.dtype != torch.bool if is_bool else not found.is_floating_point())
        or found.device != like.device
    ):
        what = type(found).__name__
        if isinstance(found, Tensor):
            what = f"{found.dtype} {list(found.shape)} on {found.device}"
        kind = "bool" if is_bool else "float"
        raise ConfigError(f"{who} {what}, expected one {kind} for each {each}, {list(like.shape)} on {like.device}")
    values = torch.where(where, found.detach(), torch.zeros((), dtype=found.dtype, device=found.device))
    bad = ~torch.isfinite(values)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise NumericsError(
            f"{who} {values[first].item()} at {each} {first} of {len(values)} ({int(bad.sum())} such {each}s that "
            "train), expected finite numbers"
        )
    return values
