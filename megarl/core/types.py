"""The records that flow through megarl.

Shape legend, used everywhere: ``N`` sequences, ``T`` packed tokens, ``L`` MoE layers, ``K`` top-k, ``E`` experts,
``V`` vocabulary, ``B`` prompts of a step, ``G`` responses to a prompt.

Every per-token column is aligned with the token itself: ``rollout_logprobs[t]`` is the log-probability of token
``t`` given the tokens before it, ``routed_experts[t]`` are the experts that were used while token ``t`` was the
input. Nothing is shifted by one until the model is called (``megarl.megatron.passes.micro_batches``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:  # routing traces are read where torch is not installed
    import torch

FinishReason = Literal["stop", "length", "abort", "pause"]
"""pause: the engine was asked to stop. The rollout holds what it has so far, perhaps only the prompt; the response goes
on later."""
REPLAYED: tuple[str, ...] = ("routed_experts", "gate_weights", "indexer_topk")
"""Columns of a rollout that stay on the sampling rank, until the rows travel to the replaying layers."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One response that an engine is asked for."""

    prompt_tokens: np.ndarray
    """int32 [P], the prompt as token ids; never empty."""
    group: int
    """Index of the prompt in the global step, 0..B-1."""
    sample: int
    """Index of the response to that prompt, 0..G-1."""
    seed: int
    """Seeds this response alone: the same seed and weights give the same response in any batch, on any rank."""
    known_rows: int = 0
    """Leading tokens of the prompt whose routes are known from an earlier turn, 0..P: an engine may leave them out, and
    ``megarl.routes.turns.join`` puts them back."""
    max_response_tokens: int | None = None
    """Longest response to this request, where it is less than that of all requests; None for no limit of its own."""
    num_drawn: int = 0
    """Response tokens in prompt_tokens: the request goes on with a paused response."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"group {self.group} sample {self.sample}"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled sequence: prompt and response back to back, with one entry per token in each column."""

    group: int
    sample: int
    tokens: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T], True where the model itself generated the token (not prompt, not environment)."""
    rollout_logprobs: np.ndarray
    """float32 [T], log-probability under the distribution that was sampled from; 0 where not loss_mask."""
    routed_experts: np.ndarray | None
    """uint8 (E <= 256) or uint16 [T, L, K], MoE layers only; None if the engine records no routes."""
    routed_mask: np.ndarray | None
    """bool [T], True where there is a real row. The engine may miss rows (the last token, holes). With a mask and no
    routed_experts the routes lie on another rank; None without any."""
    weight_versions: np.ndarray
    """int32 [T], version of the weights that produced (generated tokens) or read (other tokens) the token."""
    finish_reason: FinishReason
    route_versions: np.ndarray | None = None
    """int32 [T], version of the weights that chose the experts of each row; None = weight_versions."""
    kept_counts: np.ndarray | None = None
    """int32 [T], how many vocabulary ids each token was drawn from; 0 stands for the whole vocabulary. None: all 0."""
    kept_ids: np.ndarray | None = None
    """int32 [M], these ids, token after token (``megarl.core.packing``); None without kept_counts."""
    reread_mask: np.ndarray | None = None
    """bool [T], True for a token whose keys, values and routes the engine has computed again after a retraction, while
    its log-probability is of the first time. None: no retraction."""
    gate_weights: np.ndarray | None = None
    """float32 [T, L, K], by which the engine multiplied the output of each of routed_experts, in their order; all
    scaling included. None without a request."""
    indexer_topk: np.ndarray | None = None
    """int32 [T, layers with an indexer, k], positions of the keys that sparse attention selected for each token t; the
    row has min(t + 1, k) of them, then -1. None without a request."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"group {self.group} sample {self.sample}"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first generated one; all of them if nothing was generated."""
        first = self.loss_mask.astype(bool, copy=False).tobytes().find(1)  # in a third of argmax's time
        return len(self.tokens) if first < 0 else first

    @property
    def response_tokens(self) -> np.ndarray:
        """int32 [R], everything after the prompt."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Sequences of one mini-batch (or micro-batch) packed back to back: T tokens of N sequences."""

    tokens: torch.Tensor
    """int64 [T]."""
    cu_seqlens: torch.Tensor
    """int64 [N+1], sequence n is tokens[cu_seqlens[n]:cu_seqlens[n+1]]."""
    loss_mask: torch.Tensor
    """bool [T]."""
    rollout_logprobs: torch.Tensor
    """float32 [T]."""
    advantages: torch.Tensor
    """float32 [T]."""
    routed_mask: torch.Tensor | None = None
    """bool [T]; rows that are False route natively and are counted. The routes themselves stay with the rollouts."""
    weight_versions: torch.Tensor | None = None
    """int32 [T]."""
    kept_ids: torch.Tensor | None = None
    """int32 [M], the vocabulary ids that tokens were drawn from; None: all from the whole vocabulary."""
    kept_offsets: torch.Tensor | None = None
    """int64 [T+1], token t was drawn from kept_ids[kept_offsets[t]:kept_offsets[t+1]]; if that is empty, as for
    prompts, from the whole vocabulary."""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.numel())

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens.numel()) - 1
