"""What replay asks of Megatron: its release, the model inside wrappers, and this rank's place in its groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core
from megatron.core import parallel_state
from torch.nn import Module

RELEASE: str = megatron.core.__version__


def unwrap(chunk: Module) -> Any:
    """Return the GPTModel inside DistributedDataParallel and Float16Module."""
    while isinstance(inner := getattr(chunk, "module", None), Module):
        chunk = inner
    return chunk


@contextmanager
def replaced(target: object, **attributes: Any) -> Iterator[None]:
    """Give an object of Megatron or torch other attributes inside; afterwards it has its own, or those of its class."""
    originals = {name: vars(target)[name] for name in attributes.keys() & vars(target).keys()}
    vars(target).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(target).pop(name, None)
        vars(target).update(originals)


def tp_position() -> tuple[int, int]:
    """Return (size of this rank's tensor-parallel group, this rank in it)."""
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def split_position(config: Any) -> tuple[int, int]:
    """Return ``tp_position()`` where sequence parallelism divides the rows of routers, else (1, 0)."""
    return tp_position() if config.sequence_parallel else (1, 0)


def cp_position() -> tuple[int, int]:
    """Return (size of this rank's context-parallel group, this rank in it)."""
    return parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
