"""The reference policy: a frozen second model in the policy's layout, which only says log-probabilities."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.transformer.module import Float16Module

from megarl.errors import ConfigError
from megarl.megatron.hf_weights import load_hf
from megarl.megatron.model import build_model
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import MicroBatch
from megarl.megatron.policy import Policy
from megarl.models.shapes import read_shape


class Reference:
    """Model chunks with the weights of a Hugging Face checkpoint, without gradients, optimizer or routing replay.

    Nothing ever changes them, so a resumed run has the same reference as the run that it continues. Construction is a
    collective call. Raises ConfigError if the checkpoint is not of the policy's architecture.
    """

    def __init__(self, policy: Policy, path: str | Path) -> None:
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(
                f"model.reference: {path} holds no config.json; expected a Hugging Face checkpoint folder"
            )
        found, expected = read_shape(path), policy.shape
        for name in ("fields", "vocab_size", "rotary_base", "tied_embeddings"):
            if getattr(found, name) != getattr(expected, name):
                raise ConfigError(
                    f"model.reference: {path} has {name} {getattr(found, name)}, the policy {getattr(expected, name)}; "
                    "expected the same architecture"
                )
        # The policy's config also says how to finish gradients, which here are none.
        config = copy.copy(policy.megatron_config)
        config.finalize_model_grads_func = config.no_sync_func = config.grad_scale_func = None
        chunks: Sequence[torch.nn.Module] = build_model(expected, config)
        load_hf(chunks, expected, path)
        if policy.config.model.dtype != "fp32":
            chunks = [Float16Module(config, chunk) for chunk in chunks]
        self.chunks = [chunk.requires_grad_(False) for chunk in chunks]
        self._vocab_size = expected.vocab_size
        self._temperature = policy.config.rollout.temperature

    def logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """fp32 [T] per micro-batch on the last pipeline stage, an empty list elsewhere; a collective call."""
        outputs = forward.run(self.chunks, micro_batches, temperature=self._temperature, vocab_size=self._vocab_size)
        return [output.logprobs for output in outputs]
