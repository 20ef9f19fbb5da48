"""Copies from host to device through pinned memory, so that the host does not wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | int | str) -> Tensor:
    """Return the tensor [...] on ``device``. A copy from the host to a GPU goes through pinned memory, without a wait.

    Later work of the current stream sees the copied values. The caller may change the host's tensor at once, unless it
    is pinned itself: then it is read until that stream has come to the copy.
    """
    if tensor.is_cuda or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
