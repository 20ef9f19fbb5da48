"""The per-token columns that an objective reads, and the rules that make them safe to compute with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.core.ratios import (
    check_cu_seqlens,
    cu_seqlens_error,
    is_logprob,
    is_wrong_cu_seqlens,
    logprob_error,
    usable_mask,
)
from megarl.errors import NumericsError


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
        if not self.cu_seqlens.is_cuda:  # else ``prepare`` checks it with the values, so that the host waits once
            check_cu_seqlens(self.cu_seqlens, self.logprobs.numel())

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


def count_loss_tokens(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return int64 [2] on the device of the mask: the ``Denominators`` of a packed batch. Any cu_seqlens is safe."""
    running = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    at_bounds = running[cu_seqlens.long().clamp(0, mask.numel())]
    return torch.stack([running[-1], (at_bounds.diff() > 0).sum()])


@dataclass(frozen=True, slots=True, eq=False)
class TokenState:
    """The columns without gradient, in one dtype (fp32, or fp64 if any column is), with their masks."""

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


def prepare(columns: TokenColumns, denominators: Denominators | None = None) -> TokenState:
    """Check that every value on a loss token is admissible, and settle which tokens count. The host waits once.

    Raises NumericsError naming column and first token if a loss token has an advantage that is not finite, or no
    log-probability in another column: NaN, +inf, or more than ``LOGPROB_TOLERANCE``. ValueError for wrong cu_seqlens,
    and if the global denominators are smaller than this part's own.
    """
    state, num_tokens = token_state(columns), columns.logprobs.numel()
    refused = {
        name: columns.loss_mask & ~(torch.isfinite(column) if name == "advantages" else is_logprob(column))
        for name, column in columns.float_columns().items()
    }
    counts = count_loss_tokens(state.usable, columns.cu_seqlens)
    limits = counts if denominators is None else (denominators.num_tokens, denominators.num_sequences)
    too_many = [count > limit for count, limit in zip(counts, limits, strict=True)]
    wrong_bounds = is_wrong_cu_seqlens(columns.cu_seqlens, num_tokens)
    # One transfer to the host for all checks; what it was is asked only when something is wrong.
    if not bool(torch.stack([wrong_bounds, *too_many, *(bad.any() for bad in refused.values())]).any()):
        return state
    if bool(wrong_bounds):
        raise cu_seqlens_error(columns.cu_seqlens, num_tokens)
    for name, bad in refused.items():
        if bool(bad.any()):
            raise _value_error(name, columns.float_columns()[name], bad)
    local = Denominators(*counts.tolist())
    raise ValueError(f"the global denominators {denominators} are smaller than this part's own {local}")


def token_state(columns: TokenColumns) -> TokenState:
    """Return the columns in one dtype with their masks, without checks."""
    floats = columns.float_columns()
    wide = torch.float64 if any(column.dtype == torch.float64 for column in floats.values()) else torch.float32
    values = {name: column.detach().to(wide) for name, column in floats.items()}
    usable = usable_mask(columns.loss_mask, values["rollout_logprobs"])
    keep = usable & ~torch.isneginf(values["logprobs"]) & ~torch.isneginf(values["old_logprobs"])
    return TokenState(**values, usable=usable, keep=keep, cu_seqlens=columns.cu_seqlens)


def _value_error(name: str, column: Tensor, bad: Tensor) -> NumericsError:
    if name != "advantages":
        return logprob_error(name, column, bad)
    token = int(bad.nonzero()[0])
    return NumericsError(
        f"advantages is {column[token].item()} at token {token} of the packed batch ({int(bad.sum())} such loss "
        "tokens), expected a finite number: look at the pass that computed this column"
    )
