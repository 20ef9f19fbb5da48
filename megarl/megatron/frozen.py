"""A model that only gives its weights away: what evaluation builds of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core.transformer.module import Float16Module

from megarl.config import Config, megatron_fields
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.config_errors import as_config_error
from megarl.megatron.hf_weights import export_hf
from megarl.megatron.model import build_model, transformer_config
from megarl.megatron.policy import DTYPES, layout_fields
from megarl.models.shapes import read_shape


class FrozenModel:
    """The model of a checkpoint on this rank's share of a layout, without optimizer, gradients or routing replay.

    ``model.path`` gives the architecture, ``checkpoint_path`` (a step folder) the weights, whatever layout wrote them.
    Needs ``distributed.initialize``; construction is a collective call. Raises ConfigError for settings that Megatron
    cannot serve, CheckpointError for a damaged checkpoint or one of another model.
    """

    def __init__(self, config: Config, checkpoint_path: Path) -> None:
        self.shape = read_shape(config.model.path)
        overrides = megatron_fields.realize(
            "TransformerConfig", megatron_fields.check(config.megatron)["TransformerConfig"]
        )
        with as_config_error("build the model", config.megatron):
            megatron_config = transformer_config(
                self.shape, {**layout_fields(config), **overrides}, DTYPES[config.model.dtype]
            )
            chunks: Sequence[torch.nn.Module] = build_model(self.shape, megatron_config)
        if config.model.dtype != "fp32":
            chunks = [Float16Module(megatron_config, chunk) for chunk in chunks]
        self.chunks = [chunk.requires_grad_(False) for chunk in chunks]
        self.step = checkpoint.load_weights(checkpoint_path, self.chunks, self.shape)
        """Global steps that the weights have seen."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names, on every rank; a collective call."""
        return export_hf(self.chunks, self.shape)
