"""Functions over lists of tensors: norms, scaling, Adam. Each takes a chunk size and a flag for overflows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]


def multi_tensor_l2norm(
    chunk: int, flag: Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """(fp32 [1] norm of all, fp32 norms of each or none)."""
    del chunk
    squares = torch.stack([t.float().square().sum() for t in lists[0]])
    return squares.sum().sqrt()[None], squares.sqrt() if per_tensor else torch.empty(0, device=flag.device)


def multi_tensor_scale(chunk: int, flag: Tensor, lists: Lists, scale: float) -> None:
    """``lists[1] = scale lists[0]``; the flag is set if a value is not finite."""
    del chunk
    for source, target in zip(*lists, strict=True):
        scaled = source.float() * scale
        flag.copy_(flag | (~scaled.isfinite().all()).to(flag.dtype))
        target.copy_(scaled)


def multi_tensor_adam(
    chunk: int,
    flag: Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam on (gradients, parameters, first, second moments, with a fifth list also fp32 main weights).

    ``mode`` 0 adds ``weight_decay p`` to the gradient, 1 (AdamW) to the update.
    """
    del chunk, flag
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, first, second, *main in zip(*lists, strict=True):
        weight, g = (main[0] if main else parameter).float(), gradient.float()
        decay = weight_decay * weight
        g = g + decay if mode == 0 else g
        m, v = first.float() * beta1 + (1 - beta1) * g, second.float() * beta2 + (1 - beta2) * g * g
        update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps) + (decay if mode == 1 else 0.0)
        for target, value in zip((first, second, parameter, *main), (m, v, *[weight - lr * update] * 2), strict=False):
            target.copy_(value)


REFERENCES = {
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
    "multi_tensor_adam": multi_tensor_adam,
}
