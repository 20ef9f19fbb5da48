"""What replay asks of Megatron: its release, the model inside wrappers, and this rank's place in its groups."""

from contextlib import AbstractContextManager
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


class Replaced(AbstractContextManager[None]):
    """Gives an object of Megatron or torch other attributes inside; afterwards the object has its former attributes.

    No generator, so that a model can be copied while a watch stands on it.
    """

    def __init__(self, target: object, **attributes: Any) -> None:
        self._target, self._attributes = target, attributes

    def __enter__(self) -> None:
        values = vars(self._target)
        self._originals = {name: values[name] for name in self._attributes.keys() & values.keys()}
        values.update(self._attributes)

    def __exit__(self, *_: object) -> None:
        values = vars(self._target)
        for name in self._attributes:
            values.pop(name, None)
        values.update(self._originals)


def tp_position() -> tuple[int, int]:
    """Return (size of the tensor-parallel group, rank in the group)."""
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def split_position(config: Any) -> tuple[int, int]:
    """Return ``tp_position()`` where sequence parallelism divides the rows of routers, else (1, 0)."""
    return tp_position() if config.sequence_parallel else (1, 0)


def cp_position() -> tuple[int, int]:
    """Return (size of the context-parallel group, rank in the group)."""
    return parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
