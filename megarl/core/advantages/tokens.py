"""Advantages that differ between the tokens of a response: returns to go with a KL to the reference policy."""

import numpy as np
import torch
from torch import Tensor

from megarl.core import ratios
from megarl.core.advantages.groups import Values, prepare, standardize


def token_level_returns(
    rewards: Values, logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, beta: float,
    horizon: int | None = None,
) -> Tensor:  # fmt: skip
    """Return ``r_j = R - beta / H * sum_{i>=j} K_i`` with ``K_i = log pi_theta(y_i) - log pi_ref(y_i)``, detached.

    H is ``horizon`` if given, else the number of loss tokens of the response. The policy gradient of ``E[R - beta / H *
    ln(pi_theta / pi_ref)]`` is ``E[sum_j r_j grad log pi(y_j)]`` exactly for a constant H; with H = length of the
    response the gradient is biased, because H depends on the sample.

    rewards: [N]; logprobs, ref_logprobs: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]; result: [T] in fp32 (fp64
    if a column is), 0 where not loss_mask. Per-token log-ratios are clamped to +-20; a token with logprobs -inf counts
    as if it were no loss token. Raises NumericsError if a reward is not finite, or a log-probability of a loss token is
    NaN or above 0. ValueError for other shapes, a negative beta or no horizon.
    """
    _check_columns(logprobs, ref_logprobs, loss_mask, cu_seqlens)
    if not beta >= 0 or (horizon is not None and horizon < 1):
        raise ValueError(f"beta is {beta}, horizon {horizon}; expected 0 or more, and at least 1 token or None")
    rewards, _ = prepare(rewards, np.zeros(len(rewards), dtype=np.int64))
    if rewards.numel() != cu_seqlens.numel() - 1:
        raise ValueError(f"{rewards.numel()} rewards for {cu_seqlens.numel() - 1} sequences, expected one per sequence")
    keep = loss_mask & ~torch.isneginf(logprobs)
    kl = ratios.log_ratio(logprobs.detach(), ref_logprobs.detach(), keep)
    lengths = ratios.segment_sum(keep, cu_seqlens).clamp(min=1) if horizon is None else torch.tensor(horizon)
    share = (beta / lengths.double()).to(kl.device).expand(rewards.numel())
    future = ratios.segment_cumsum(kl, cu_seqlens, reverse=True) * ratios.segment_expand(share, cu_seqlens)
    returns = ratios.segment_expand(rewards.to(kl.device).double(), cu_seqlens) - future
    return torch.where(keep, returns, 0.0).to(kl.dtype)


def token_level_kl(
    rewards: Values, groups: Values, logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor,
    beta: float, ddof: int = 0, eps: float = 1e-6, horizon: int | None = None,
) -> Tensor:  # fmt: skip
    """Return ``(r_j - mean_j) / (std_j + eps)``: returns to go, standardised per position over the group.

    r_j is that of ``token_level_returns``. Statistics at j are over the responses of the group with a j-th loss token;
    the advantage is exactly 0 for a single or equal return. Positions count loss tokens; environment tokens do not
    shift positions.

    rewards, groups: [N]; logprobs, ref_logprobs: [T]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]; result: [T].
    Errors as in ``token_level_returns``. ValueError for another ddof or a negative eps.
    """
    if ddof not in (0, 1) or not eps >= 0:
        raise ValueError(f"token_level_kl needs ddof 0 or 1 and eps >= 0, got ddof={ddof}, eps={eps}")
    returns = token_level_returns(rewards, logprobs, ref_logprobs, loss_mask, cu_seqlens, beta, horizon)
    _, inverse = prepare(rewards, groups)
    keep = loss_mask & ~torch.isneginf(logprobs)
    # One cell per (group, position): groups lie back to back with the length of the longest response.
    lengths = ratios.segment_sum(keep, cu_seqlens)
    inverse = inverse.to(lengths.device)
    num_groups = int(inverse.max()) + 1 if inverse.numel() else 0
    longest = lengths.new_zeros(num_groups).scatter_reduce(0, inverse, lengths, reduce="amax")
    first_cell = longest.cumsum(0) - longest
    cells = ratios.segment_expand(first_cell[inverse], cu_seqlens) + ratios.positions(keep, cu_seqlens) - 1
    values = returns.new_zeros(returns.shape).double()
    values[keep] = standardize(returns[keep].double(), cells[keep], ddof, eps)
    return values.to(returns.dtype)


def _check_columns(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> None:
    """Refuse columns of different shapes, and what is no log-probability on a loss token."""
    if not logprobs.shape == ref_logprobs.shape == loss_mask.shape or logprobs.dim() != 1:
        shapes = [list(column.shape) for column in (logprobs, ref_logprobs, loss_mask)]
        raise ValueError(f"logprobs, ref_logprobs and loss_mask are {shapes}, and must all be [T]")
    ratios.check_cu_seqlens(cu_seqlens, logprobs.numel())
    for name, column in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        bad = loss_mask & ~ratios.is_logprob(column)
        if bool(bad.any()):
            raise ratios.logprob_error(name, column, bad)
