"""From the rewards of the steps of responses to one advantage per token.

A step of reward ``r`` ends at a token. As in ``megarl.core.advantages``, a group is all responses to one prompt, its
statistics are taken before a step of training is split, and a group without contrast gives exactly 0.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.core.advantages import Values, group_mean, grpo
from megarl.core.ratios import check_cu_seqlens, segment_cumsum, segment_ids
from megarl.errors import NumericsError

ProcessScale = Literal["std", "none"]


def process_advantages(
    step_rewards: Values,
    step_tokens: Values,
    groups: Values,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    scale: ProcessScale = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Return ``A_t = sum of z_s over the steps s of the sequence that end at or after token t``.

    ``z_s = (r_s - mean) / (std + eps)`` with statistics over all steps of all responses of the group, so a response of
    many steps weighs more in them; ``scale`` "none" leaves the division out. A sequence without steps (its reward
    failed, or was a plain number) is in no statistics and gets 0; so do tokens after the last step.

    step_rewards: [S]; step_tokens: integer [S], the last token of each step as an index into the packed batch, in any
    order; groups: integer [N]; loss_mask: bool [T]; cu_seqlens: int64 [N+1]; ddof, eps: as in ``grpo``; result: [T] in
    the dtype of step_rewards, 0 where not loss_mask. Raises NumericsError if a step reward is not finite, ValueError
    for shapes or indices that do not fit. Source: DeepSeekMath (arXiv 2402.03300), 4.1.3, process supervision.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"process_advantages: scale {scale!r}, expected 'std' or 'none'")
    if loss_mask.dim() != 1 or loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {loss_mask.dtype} {list(loss_mask.shape)}, expected bool [T]")
    check_cu_seqlens(cu_seqlens, loss_mask.numel())
    device = loss_mask.device
    rewards, ends, of_sequence = _tensor(step_rewards, device), _tensor(step_tokens, device), _tensor(groups, device)
    cu_seqlens = cu_seqlens.to(device)
    _check(rewards, ends, of_sequence, loss_mask.numel(), cu_seqlens.numel() - 1)
    step_groups = of_sequence[segment_ids(cu_seqlens)[ends.long()]]
    wide = rewards.double()
    values = grpo(wide, step_groups, ddof, eps) if scale == "std" else group_mean(wide, step_groups)
    at_ends = values.new_zeros(loss_mask.numel()).index_add(0, ends.long(), values)
    to_go = segment_cumsum(at_ends, cu_seqlens, reverse=True)
    return torch.where(loss_mask, to_go, 0.0).to(rewards.dtype if rewards.is_floating_point() else torch.float64)


def _tensor(values: Values, device: torch.device) -> Tensor:
    return (values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))).to(device)


def _check(rewards: Tensor, ends: Tensor, groups: Tensor, num_tokens: int, num_sequences: int) -> None:
    if rewards.dim() != 1 or rewards.shape != ends.shape:
        raise ValueError(f"step_rewards {list(rewards.shape)} and step_tokens {list(ends.shape)} must both be [S]")
    if groups.shape != (num_sequences,):
        raise ValueError(f"groups {list(groups.shape)}, expected one for each of {num_sequences} sequences")
    outside, wrong = (ends < 0) | (ends >= num_tokens), ~torch.isfinite(rewards)
    if bool(outside.any()):
        step = int(outside.nonzero()[0])
        raise ValueError(f"step {step} ends at token {ends[step].item()}, but the batch holds {num_tokens} tokens")
    if bool(wrong.any()):
        step = int(wrong.nonzero()[0])
        raise NumericsError(f"the reward of step {step} is {rewards[step].item()}, expected a finite number")
