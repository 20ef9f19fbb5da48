"""Models that are never trained: the reference policy, and the model of a checkpoint for evaluation."""

from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.config import Config
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.hf_weights import export_hf, load_hf
from megarl.megatron.policy import build_chunks
from megarl.models.shapes import read_shape
from megarl.replay import RoutingReplay


class FrozenModel:
    """A model in this run's layout, without optimizer or gradients.

    ``model.path`` gives the architecture. weights: a step folder, whatever layout wrote it, or a Hugging Face folder of
    the same architecture; default ``model.path``. replays: with routing replay. Construction is a collective call.
    CheckpointError for a damaged checkpoint, or a checkpoint of another model.
    """

    def __init__(self, config: Config, weights: Path | None, replays: bool = False) -> None:
        self.config, self.shape = config, read_shape(config.model.path)
        _, self.chunks = build_chunks(config, self.shape)
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self.step = 0
        """Global steps that the weights of a step folder have seen."""
        folder = Path(config.model.path) if weights is None else weights
        if (folder / "config.json").is_file():
            load_hf(self.chunks, self.shape, folder)
        else:
            self.step = checkpoint.load_weights(folder, self.chunks, self.shape)
        self.replay = RoutingReplay(self.chunks) if replays else None

    def export(self, receive: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, whole [...], under Hugging Face names, on ranks that ``receive``; a collective call."""
        return export_hf(self.chunks, self.shape, receive)
