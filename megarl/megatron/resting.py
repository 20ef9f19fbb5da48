"""Training memory that servers on the same GPUs may use while they sample: gradients and optimizer state.

Gradient buffers are empty between steps: their memory is given back and taken again. Adam's moments and fp32 main
weights wait in host memory. The weights themselves stay, because they are gathered for the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.megatron.policy import Policy


def rest(policy: Policy) -> int:
    """Give back the memory; returns how many bytes of the device that were. Nothing may train until ``wake``."""
    freed = 0
    for buffer in _grad_buffers(policy):
        storage = buffer.untyped_storage()
        freed += storage.nbytes()
        storage.resize_(0)
    for tensor in _optimizer_tensors(policy):
        if tensor.is_cuda:
            freed += tensor.untyped_storage().nbytes()
            tensor.data = tensor.data.cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return freed


def wake(policy: Policy) -> None:
    """Take the memory again: gradients are zero, optimizer state is what it was."""
    for buffer in _grad_buffers(policy):
        storage = buffer.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()
    if torch.cuda.is_available():
        for tensor in _optimizer_tensors(policy):
            tensor.data = tensor.data.to(torch.cuda.current_device())


def _grad_buffers(policy: Policy) -> Iterator[torch.Tensor]:
    for chunk in policy.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _optimizer_tensors(policy: Policy) -> Iterator[torch.Tensor]:
    """Moments, and main weights that are no views of the model's own."""
    of_the_model = {
        parameter.untyped_storage().data_ptr() for chunk in policy.chunks for parameter in chunk.parameters()
    }
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for state in part.optimizer.state.values():
            yield from (tensor for name, tensor in state.items() if name in ("exp_avg", "exp_avg_sq"))
        for group in part.optimizer.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in of_the_model)
