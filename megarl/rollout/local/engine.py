"""A sampling engine in the trainer's own process, on transformers: small, exact, and runs anywhere.

The quickstart and the tests use it. Its log-probabilities are those of the distribution that it samples from, and its
routes are the expert ids that the model was called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from megarl.core.types import Rollout, SampleRequest
from megarl.errors import RolloutError, WeightSyncError
from megarl.rollout.engine import Engine, SamplingParams, Session, limit_response
from megarl.rollout.local.decode import Sampled, decode
from megarl.rollout.local.recorder import RouteRecorder
from megarl.rollout.local.session import BatchSession
from megarl.rollout.weights import WeightForm, checkpoint_views, require_each_once


class LocalEngine(Engine):
    """Samples with a transformers causal language model.

    A response is a function of weights, prompt and seed. It does not depend on its batch, up to the float noise of
    batched matrix products, which can change a token whose uniform number lies that close to a boundary. The cache of
    keys and values lives for one batch, so no token is ever sampled with stale entries.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        fp8_rounding: bool = False,
        max_batch_size: int = 256,
        experts_implementation: str | None = None,
    ) -> None:
        """Builds the model of a Hugging Face config without weights; ``update_weights`` must come first.

        fp8_rounding: round the linear weights of attention and experts through FP8 blocks of 128 x 128 as they arrive.
        max_batch_size: responses that are sampled at a time; RolloutError below 1.
        experts_implementation: None is transformers' choice, "grouped_mm" (also fast on a CPU) where there is one.
        """
        if max_batch_size < 1:
            raise RolloutError(f"max_batch_size is {max_batch_size}, expected at least 1")
        with no_init_weights():
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", experts_implementation=experts_implementation
            )
        self._model.tie_weights()  # no_init_weights skips this too
        self._model = self._model.to(device).eval().requires_grad_(False)
        self._views = checkpoint_views(self._model)
        self._recorder = RouteRecorder(self._model)
        # In each parameter's own dtype: transformers keeps some in float32 whatever the model's dtype is.
        self._form = WeightForm(fp8="rounded" if fp8_rounding else "off")
        self._max_batch_size = max_batch_size
        self._version = -1
        self._missing: str | None = "no weights have arrived yet"
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        weight_version: int = 0,
        **options: Any,
    ) -> LocalEngine:
        """Builds the engine from a Hugging Face checkpoint folder with safetensors files; ``options`` as above.

        Raises RolloutError if the folder holds no config or weights, WeightSyncError if they do not fit.
        """
        folder = Path(path)
        shards = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not shards:
            raise RolloutError(f"{folder} is no checkpoint: expected config.json and *.safetensors in it")
        engine = cls(AutoConfig.from_pretrained(folder, local_files_only=True), **options)
        engine.update_weights((item for shard in shards for item in load_file(shard).items()), weight_version)
        return engine

    @property
    def weight_version(self) -> int:
        """Version of the weights in the engine; -1 before the first update."""
        return self._version

    @property
    def num_moe_layers(self) -> int:
        """L, the number of layers in a routing trace."""
        return self._recorder.num_layers

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See ``Engine.update_weights``. Tensors may be on any device; they are read one at a time."""
        self._require_open()
        self._missing = "the last weight update failed"
        shapes = {name: tuple(view.shape) for name, view in self._views.items()}
        for name, tensor in self._form.convert(require_each_once(tensors, shapes, version)):
            self._views[name].copy_(tensor)
        self._version = version
        self._missing = None

    def converse(
        self,
        begin: Callable[[Session], None],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None = None,
    ) -> None:
        """See ``Engine.converse``. Samples once every episode waits, so batches do not depend on timing.

        A response ends early (``length``) at the model's last position.
        """
        self._require_open()
        if self._missing is not None:
            raise WeightSyncError(f"the engine cannot generate, {self._missing}: send all weights with update_weights")
        if params.return_routed_experts and self.num_moe_layers == 0:
            raise RolloutError(f"{type(self._model).__name__} has no experts: set return_routed_experts to False")
        BatchSession(lambda requests: self._sample(requests, params, on_finish)).run(begin)

    def _sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, on_finish: Callable[[int], None] | None
    ) -> list[Rollout]:
        limits = self._check(requests, params)
        recorder = self._recorder if params.return_routed_experts else None
        rollouts: list[Rollout | None] = [None] * len(requests)
        # Requests of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_tokens))
        for start in range(0, len(order), self._max_batch_size):
            chosen = order[start : start + self._max_batch_size]
            batch = [requests[i] for i in chosen]
            sampled = decode(self._model, recorder, batch, params, limits[chosen], on_finish)
            for i, request, result in zip(chosen, batch, sampled, strict=True):
                rollouts[i] = _make_rollout(request, result, self._version)
        return [rollout for rollout in rollouts if rollout is not None]

    def close(self) -> None:
        """See ``Engine.close``."""
        if not self._closed:
            self._closed = True
            self._recorder.close()
            self._views = {}
            del self._model

    def _require_open(self) -> None:
        if self._closed:
            raise RolloutError("the engine is closed: build a new one")

    def _check(self, requests: Sequence[SampleRequest], params: SamplingParams) -> np.ndarray:
        """Returns the longest response to each request, int64 [B]; RolloutError for one that cannot be served."""
        config = self._model.config.get_text_config()
        vocab_size = config.vocab_size
        max_positions = getattr(config, "max_position_embeddings", None)
        if any(token >= vocab_size for token in params.stop_token_ids):
            raise RolloutError(f"stop_token_ids {params.stop_token_ids} leave the vocabulary of {vocab_size} tokens")
        limits = np.array([limit_response(request, params) for request in requests], dtype=np.int64)
        for i, request in enumerate(requests):
            prompt, where = request.prompt_tokens, f"request (group {request.group}, sample {request.sample})"
            if prompt.ndim != 1 or not len(prompt) or not np.issubdtype(prompt.dtype, np.integer):
                raise RolloutError(f"{where}: prompt is {prompt.dtype} {prompt.shape}, expected integers [P], P >= 1")
            if prompt.min() < 0 or prompt.max() >= vocab_size:
                raise RolloutError(f"{where}: prompt has a token outside of 0..{vocab_size - 1}")
            if max_positions is not None:
                if len(prompt) >= max_positions:
                    raise RolloutError(f"{where}: prompt of {len(prompt)} tokens fills all {max_positions} positions")
                limits[i] = min(limits[i], max_positions - len(prompt))
        return limits


def _make_rollout(request: SampleRequest, sampled: Sampled, version: int) -> Rollout:
    prompt = np.asarray(request.prompt_tokens, dtype=np.int32)
    num_tokens = len(prompt) + len(sampled.response_tokens)
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    logprobs[len(prompt) :] = sampled.logprobs
    routes = sampled.routed_experts
    return Rollout(
        group=request.group,
        sample=request.sample,
        tokens=np.concatenate([prompt, sampled.response_tokens]),
        loss_mask=np.arange(num_tokens) >= len(prompt),
        rollout_logprobs=logprobs,
        routed_experts=routes,
        routed_mask=None if routes is None else np.ones(num_tokens, dtype=bool),
        weight_versions=np.full(num_tokens, version, dtype=np.int32),
        finish_reason="stop" if sampled.stopped else "length",
    )
