"""Log-ratios between policies, and sums over sequences that are packed back to back.

Packed layout: ``T`` tokens of ``N`` sequences, sequence ``n`` is ``[cu_seqlens[n], cu_seqlens[n+1])``; cu_seqlens is
int64 [N+1].
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.errors import NumericsError, refusal

if TYPE_CHECKING:
    from megarl.core.choices.parts import Scope

LOG_RATIO_BOUND = 20.0
"""Per-token log-ratios are clamped to +-20: exp() is finite in fp32 (verl's SAFETY_BOUND)."""
LOGPROB_TOLERANCE = 1e-3
"""A log-probability up to this is 0 but for rounding: fp32 is off by some 1e-7 times the size of the logits."""


def widen(values: Tensor) -> Tensor:
    """Return the values [...] in fp32, or unchanged if they are fp64: log-probabilities are never reduced in less."""
    return values if values.dtype == torch.float64 else values.float()


def usable_mask(loss_mask: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return bool [T]: the loss tokens that the rollout engine can have sampled, i.e. without those at -inf.

    A sampler cannot draw a token of probability zero: -inf is a defect of the recorded log-probability. Tokens at -inf
    leave the loss and all denominators; ``coefficients`` counts them as ``logprobs/invalid``.
    """
    return loss_mask & ~torch.isneginf(rollout_logprobs)


def is_logprob(column: Tensor) -> Tensor:
    """Return bool [T], True where a value can be a log-probability: -inf, or a number up to ``LOGPROB_TOLERANCE``."""
    return column <= LOGPROB_TOLERANCE


def logprob_error(name: str, column: Tensor, bad: Tensor) -> NumericsError:
    """Return the error for a column [T] with impossible values where ``bad``, bool [T], is True at least once."""
    return NumericsError(refusal("no_logprob", first=describe_first(name, column, bad)))


def describe_first(name: str, column: Tensor, bad: Tensor) -> str:
    """Return where a column [T] is ``bad``, bool [T], first."""
    token, count = int(bad.nonzero()[0]), int(bad.sum())
    return f"{name} is {column[token].item():g} at token {token} of the packed batch ({count} such loss tokens)"


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """Return ``clamp(numerator - denominator, -bound, bound)`` where mask, else 0.

    numerator, denominator: log-probabilities [T]; mask: bool [T]; result: [T] in fp32 (fp64 if an input is).
    Masked entries are replaced before the subtraction: -inf minus -inf on a padding token would be NaN.
    """
    difference = torch.where(mask, widen(numerator), 0.0) - torch.where(mask, widen(denominator), 0.0)
    return difference.clamp(-bound, bound)


def segment_ids(cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Return int64 [T], the index of the sequence of each token; given T, the host does not wait for the device."""
    return torch.repeat_interleave(segment_lengths(cu_seqlens), output_size=num_tokens)


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return [..., N], the sum of values [..., T] over each sequence; 0 for an empty one. Bool sums are int64."""
    if not values.is_floating_point():  # exact as a difference of running sums
        return torch.nn.functional.pad(values.cumsum(-1), (1, 0))[..., cu_seqlens.long()].diff()
    total = values.new_zeros(*values.shape[:-1], cu_seqlens.numel() - 1)
    return total.index_add(-1, segment_ids(cu_seqlens, values.size(-1)), values)


def segment_cumsum(values: Tensor, cu_seqlens: Tensor, reverse: bool = False) -> Tensor:
    """Return the inclusive running sum of values [T] within each sequence (``reverse``: sums from the token to the
    end).

    values: [T], finite; result: float64 [T]. Computed as the running sum of the batch minus the sum before the
    sequence. To avoid cancellation, values are split into a multiple of a coarse grid plus a remainder. Sums of
    multiples are exact in float64, and rounding of the remainders is about 1e-25 of the largest running sum of a
    million tokens.
    """
    values = values.double()
    if not values.numel():
        return values
    # |sum of T multiples of grid| <= T * (max + grid) < 2^52 * grid, an integer below 2^53 times a power of 2.
    largest = values.abs().amax().clamp(min=torch.finfo(torch.float64).tiny * 2.0**60)
    grid = torch.exp2(torch.ceil(torch.log2(largest * (values.numel() + 1))) - 51)
    coarse = torch.round(values / grid) * grid
    return _segment_cumsum(coarse, cu_seqlens, reverse) + _segment_cumsum(values - coarse, cu_seqlens, reverse)


def segment_total(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return float64 [N], the sum of values [T] over each sequence, as exact as ``segment_cumsum``."""
    sums = torch.cat([values.new_zeros(1, dtype=torch.float64), segment_cumsum(values, cu_seqlens)])
    # The last token of a sequence holds its total; an empty one has no last token.
    return torch.where(segment_lengths(cu_seqlens) > 0, sums[cu_seqlens[1:].long()], 0.0)


def positions(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return int64 [T]: the position t of masked tokens within the sequence, counted from 1.

    A token outside the mask has the position of the previous masked token, 0 without a previous token.
    """
    return _segment_cumsum(mask.long(), cu_seqlens, reverse=False)


def aggregate(scope: "Scope", values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Aggregate one value per token, such as a log-ratio, over a scope: [T], 0 outside the mask.

    With l_k the values of the n masked tokens of a sequence, and t the position among them:

    - ``token``: l_t
    - ``prefix``: sum_{k<=t} l_k; of log-ratios, the exact weight of a token's past (CTPO, arXiv 2605.07331)
    - ``future_sum``: sum_{k>=t} l_k
    - ``future_mean``: mean_{k>=t} l_k
    - ``sequence_sum``: sum_k l_k
    - ``sequence_mean``: mean_k l_k (of log-ratios: GSPO, arXiv 2507.18071)
    - ``sequence_max``: max_k l_k, of values from 0 up

    values: [T], 0 outside the mask; mask: bool [T]; result: [T] in the dtype of values, accumulated in float64, not
    clamped. Tokens outside the mask add nothing and do not advance t.
    """
    if scope == "token":
        return values
    if scope == "prefix":
        sums = segment_cumsum(values, cu_seqlens)
    elif scope in ("future_sum", "future_mean"):
        sums = segment_cumsum(values, cu_seqlens, reverse=True)
        if scope == "future_mean":
            sums = sums / _segment_cumsum(mask.long(), cu_seqlens, reverse=True).clamp(min=1)
    else:
        sums = segment_expand(_over_sequences(scope, values, mask, cu_seqlens), cu_seqlens, mask.numel())
    return torch.where(mask, sums, 0.0).to(values.dtype)


def _over_sequences(scope: "Scope", values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    if scope == "sequence_max":
        largest = values.new_zeros(cu_seqlens.numel() - 1)
        return largest.scatter_reduce(0, segment_ids(cu_seqlens, values.numel()), values, reduce="amax")
    totals = segment_total(values, cu_seqlens)
    return totals / segment_sum(mask, cu_seqlens).clamp(min=1) if scope == "sequence_mean" else totals


def ratio_gradient(scope: "Scope", values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the transpose of ``aggregate`` [T]: from derivatives by aggregated log-ratios to derivatives by tokens.

    A token belongs to all later prefixes and all earlier futures, and has the share 1 / n of a mean over n tokens.
    """
    if scope == "future_mean":
        values = values / _segment_cumsum(mask.long(), cu_seqlens, reverse=True).clamp(min=1)
    return torch.where(mask, segment_cumsum(values, cu_seqlens, reverse=scope == "prefix"), 0.0).to(values.dtype)


def _segment_cumsum(values: Tensor, cu_seqlens: Tensor, reverse: bool) -> Tensor:
    """The running sum of a sequence as a difference of the running sum of the batch; exact only if all sums are."""
    running = torch.cat([values.new_zeros(1), values.cumsum(0)])
    bounds = running[cu_seqlens.long()]
    if reverse:
        return segment_expand(bounds[1:], cu_seqlens, values.numel()) - running[:-1]
    return running[1:] - segment_expand(bounds[:-1], cu_seqlens, values.numel())


def check_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless cu_seqlens is an integer [N+1] that rises from 0 to num_tokens; reads a device once."""
    if bool(is_wrong_cu_seqlens(cu_seqlens, num_tokens)):
        raise ValueError(f"cu_seqlens is {cu_seqlens.tolist()!s:.200}, expected to rise from 0 to {num_tokens} tokens")


def is_wrong_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return bool [], False if cu_seqlens rises from 0 to num_tokens. ValueError if it is no integer [N+1]."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be an integer tensor [N+1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    return (cu_seqlens[0] != 0) | (cu_seqlens[-1] != num_tokens) | (segment_lengths(cu_seqlens) < 0).any()


def segment_lengths(cu_seqlens: Tensor) -> Tensor:
    """Return int64 [N], the number of tokens of each sequence."""
    return cu_seqlens.long().diff()


def segment_expand(values: Tensor, cu_seqlens: Tensor, num_tokens: int | None = None) -> Tensor:
    """Return [T], the per-sequence values [N] repeated for every token of their sequence; T as in ``segment_ids``."""
    return torch.repeat_interleave(values, segment_lengths(cu_seqlens), output_size=num_tokens)
