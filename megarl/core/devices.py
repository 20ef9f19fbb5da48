"""Copies between host and device through pinned memory, and checks that the host reads together."""

from collections.abc import Callable, Sequence

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


class DeviceChecks:
    """Conditions on a device that the host reads together, with one wait for all."""

    def __init__(self) -> None:
        self._checks: list[tuple[Tensor, Callable[[], object]]] = []

    def add(self, is_wrong: Tensor, refuse: Callable[[], object]) -> None:
        """is_wrong: a bool scalar; refuse: raises the error, unless a closer look finds nothing wrong.

        A condition on the host is judged at once.
        """
        if not is_wrong.is_cpu:
            self._checks.append((is_wrong, refuse))
        elif bool(is_wrong):
            refuse()

    def require(self) -> None:
        """Read the conditions, and raise the error of the first that is wrong."""
        checks, self._checks = self._checks, []
        flags = torch.stack([is_wrong for is_wrong, _ in checks]).tolist() if checks else []
        for is_wrong, (_, refuse) in zip(flags, checks, strict=True):
            if is_wrong:
                refuse()


ARENA_BYTES = 1 << 30
"""Pinned memory is asked for in about this size, because torch rounds every request up to a power of two."""


class HostCopies:
    """Pinned host memory in which the same GPU tensors rest again and again; making it takes longer than copying."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def park(self, tensors: Sequence[Tensor]) -> None:
        """Move the data of GPU tensors of any shape to the host, which waits once."""
        forms = [[(tensor.shape, tensor.dtype) for tensor in group] for group in (self._copies, tensors)]
        if forms[0] != forms[1]:
            self._copies = _pinned_like(tensors)
        for tensor, copy in zip(tensors, self._copies, strict=True):
            copy.copy_(tensor.data, non_blocking=True)
        if tensors:
            torch.cuda.current_stream(tensors[0].device).synchronize()
        for tensor, copy in zip(tensors, self._copies, strict=True):
            tensor.data = copy


def _pinned_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    arenas: list[list[Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        used += tensor.nbytes
        if used > ARENA_BYTES and arenas[-1]:
            arenas.append([])
            used = tensor.nbytes
        arenas[-1].append(tensor)
    copies: list[Tensor] = []
    for arena in arenas:
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in arena]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        for piece, tensor in zip(memory.split(sizes), arena, strict=True):
            copies.append(piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
    return copies


_ALIGNMENT = 64
