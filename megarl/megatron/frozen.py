"""Models that are never trained: the reference policy, and the model of a checkpoint for evaluation."""

from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.config import Config
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.hf_weights import export_hf, load_hf
from megarl.megatron.policy import Policy, build_chunks
from megarl.models.fit import check_reference
from megarl.models.shapes import ModelShape, read_shape
from megarl.replay import RoutingReplay


class FrozenModel:
    """The model of a checkpoint in this run's layout, without optimizer, gradients or routing replay.

    ``model.path`` gives the architecture, ``checkpoint_path`` (a step folder) the weights, whatever layout wrote them;
    None takes the weights of ``model.path``. Construction is a collective call. CheckpointError for a damaged
    checkpoint, or a checkpoint of another model.
    """

    def __init__(self, config: Config, checkpoint_path: Path | None) -> None:
        self.shape = read_shape(config.model.path)
        self.chunks = _build_frozen(config, self.shape)
        self.step = 0
        """Global steps that the weights have seen."""
        if checkpoint_path is None:
            load_hf(self.chunks, self.shape, config.model.path)
        else:
            verify = config.checkpoint.verify_gib
            self.step = checkpoint.load_weights(checkpoint_path, self.chunks, self.shape, verify)

    def export(self, receive: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, whole [...], under Hugging Face names, on ranks that ``receive``; a collective call."""
        return export_hf(self.chunks, self.shape, receive)


class Reference:
    """The reference policy: the weights of a Hugging Face checkpoint in the policy's layout, which never change.

    Construction is a collective call. ConfigError if the checkpoint is not of the policy's architecture.
    """

    def __init__(self, policy: Policy, path: str | Path) -> None:
        check_reference(path, policy.shape)
        self.chunks = _build_frozen(policy.config, policy.shape)
        load_hf(self.chunks, policy.shape, path)
        self.replay = RoutingReplay(self.chunks) if policy.config.train.replay_reference else None


def _build_frozen(config: Config, shape: ModelShape) -> list[torch.nn.Module]:
    _, chunks = build_chunks(config, shape)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return chunks
