"""The weights of a ``torch_dist`` checkpoint as Megatron itself reads the weights, for comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def read_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Restore weights that have the model's own names; a collective call."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    from megarl.megatron.checkpoints.state import sharded_weights

    state = dist_checkpointing.load(sharded_weights(chunks), str(path))
    for index, chunk in enumerate(unwrap_model(list(chunks))):
        chunk.load_state_dict(state[f"model{index}"])
