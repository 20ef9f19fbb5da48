"""A sampling engine in the trainer's own process, on transformers: small, exact, and runs anywhere.

It is the engine of the quickstart and the tests. What it reports is true by construction: log-probabilities are those
of the distribution that was sampled from, and experts are those that the model was called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from megarl.core.fp8 import is_fp8_weight, round_through_fp8
from megarl.core.types import Rollout, SampleRequest
from megarl.errors import RolloutError, WeightSyncError
from megarl.rollout.engine import SamplingParams, Session, one_each, response_limit
from megarl.rollout.local.checkpoint_views import checkpoint_views
from megarl.rollout.local.decode import Sampled, decode
from megarl.rollout.local.recorder import RouteRecorder
from megarl.rollout.local.session import Batches

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class LocalEngine:
    """Samples with a transformers causal language model; implements ``megarl.rollout.engine.Engine``.

    A response is a function of weights, prompt and seed: it does not depend on the batch it is sampled in, up to the
    float noise of batched matrix products (a token changes only if its uniform number lies that close to a boundary).
    The cache lives for one ``generate`` call, so that no token is ever sampled from stale keys and values.
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
        """Builds the model of a Hugging Face config without weights: it generates after the first ``update_weights``.

        ``fp8_rounding`` rounds the linear weights of attention and experts through FP8 blocks of 128 x 128 as they
        arrive. At most ``max_batch_size`` responses are sampled at a time. ``experts_implementation`` is transformers'
        own choice if None: "grouped_mm", which is fast on a CPU too, where the architecture has it. Raises RolloutError
        for a bad batch size.
        """
        if max_batch_size < 1:
            raise RolloutError(f"max_batch_size is {max_batch_size}, expected at least 1")
        with no_init_weights():
            self._model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa", experts_implementation=experts_implementation
            )
        self._model.tie_weights()  # left out together with the initialisation
        self._model = self._model.to(device).eval().requires_grad_(False)
        self._views = checkpoint_views(self._model)
        self._recorder = RouteRecorder(self._model)
        self._fp8_rounding = fp8_rounding
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
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        fp8_rounding: bool = False,
        max_batch_size: int = 256,
        experts_implementation: str | None = None,
    ) -> LocalEngine:
        """Builds the engine from a Hugging Face checkpoint directory with safetensors files.

        Raises RolloutError if the directory holds no config or weights, WeightSyncError if they do not fit.
        """
        directory = Path(path)
        if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
            raise RolloutError(f"{directory} is no checkpoint: expected config.json and *.safetensors in it")
        engine = cls(
            AutoConfig.from_pretrained(directory, local_files_only=True),
            dtype=dtype,
            device=device,
            fp8_rounding=fp8_rounding,
            max_batch_size=max_batch_size,
            experts_implementation=experts_implementation,
        )
        engine.update_weights(_read_safetensors(directory), weight_version)
        return engine

    @property
    def weight_version(self) -> int:
        """Version of the weights in the engine; -1 before the first update."""
        return self._version

    @property
    def sync_seconds(self) -> Mapping[str, float]:
        """Nothing: the weights are written in one go."""
        return {}

    @property
    def num_moe_layers(self) -> int:
        """L, the layers of a routing trace."""
        return self._recorder.num_layers

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See ``Engine.update_weights``. Tensors may have any floating dtype and device, and are read one at a time."""
        self._require_open()
        self._missing = "the last weight update failed"
        outstanding = set(self._views)
        for name, tensor in tensors:
            if name not in self._views:
                raise WeightSyncError(f"{name} is unknown to {self._model_name}: send the names of its HF checkpoint")
            if name not in outstanding:
                raise WeightSyncError(f"{name} arrived twice in one update (version {version})")
            self._write(name, tensor)
            outstanding.remove(name)
        if outstanding:
            first = ", ".join(sorted(outstanding)[:3])
            raise WeightSyncError(
                f"{len(outstanding)} of {len(self._views)} tensors are missing from the update to version {version}, "
                f"for example {first}: send every tensor of the checkpoint"
            )
        self._version = version
        self._missing = None

    def generate(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """See ``Engine.generate``. A response ends early (``length``) where the model's positions end."""
        return one_each(lambda begin: self.converse(begin, params, on_finish), requests)

    def converse(
        self,
        begin: Callable[[Session], None],
        params: SamplingParams,
        on_finish: Callable[[int], None] | None = None,
    ) -> None:
        """See ``Engine.converse``. Samples when all episodes wait for it, so that batches do not depend on timing."""
        self._require_open()
        if self._missing is not None:
            raise WeightSyncError(f"the engine cannot generate, {self._missing}: send all weights with update_weights")
        if params.return_routed_experts and self.num_moe_layers == 0:
            raise RolloutError(f"{self._model_name} has no experts: set return_routed_experts to False")
        Batches(lambda requests: self._sample(requests, params, on_finish)).run(begin)

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
                rollouts[i] = _rollout(request, result, self._version)
        return [rollout for rollout in rollouts if rollout is not None]

    def rest(self) -> None:
        """See ``Engine.rest``; its weights stay where they are."""

    def close(self) -> None:
        """See ``Engine.close``."""
        if not self._closed:
            self._closed = True
            self._recorder.close()
            self._views = {}
            del self._model

    @property
    def _model_name(self) -> str:
        return type(self._model).__name__

    def _require_open(self) -> None:
        if self._closed:
            raise RolloutError("the engine is closed: build a new one")

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        view = self._views[name]
        if tensor.shape != view.shape:
            raise WeightSyncError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(view.shape)}")
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise WeightSyncError(f"{name} is {tensor.dtype}, expected one of {_WEIGHT_DTYPES}")
        if not torch.isfinite(tensor).all():
            raise WeightSyncError(f"{name} holds NaN or infinite values: look at the trainer's weights")
        view.copy_(round_through_fp8(tensor) if self._fp8_rounding and is_fp8_weight(name) else tensor)

    def _check(self, requests: Sequence[SampleRequest], params: SamplingParams) -> np.ndarray:
        """Raises RolloutError for a request that cannot be served; returns the longest responses, int64 [B]."""
        config = self._model.config.get_text_config()
        vocab_size = config.vocab_size
        max_positions = getattr(config, "max_position_embeddings", None)
        if any(token >= vocab_size for token in params.stop_token_ids):
            raise RolloutError(f"stop_token_ids {params.stop_token_ids} leave the vocabulary of {vocab_size} tokens")
        limits = np.array([response_limit(request, params) for request in requests], dtype=np.int64)
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


def _rollout(request: SampleRequest, sampled: Sampled, version: int) -> Rollout:
    prompt = np.asarray(request.prompt_tokens, dtype=np.int32)
    num_tokens = len(prompt) + len(sampled.response_tokens)
    loss_mask = np.arange(num_tokens) >= len(prompt)
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    logprobs[len(prompt) :] = sampled.logprobs
    routes = sampled.routed_experts
    return Rollout(
        group=request.group,
        sample=request.sample,
        tokens=np.concatenate([prompt, sampled.response_tokens]),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        routed_experts=routes,
        routed_mask=None if routes is None else np.ones(num_tokens, dtype=bool),
        weight_versions=np.full(num_tokens, version, dtype=np.int32),
        finish_reason="stop" if sampled.stopped else "length",
    )


def _read_safetensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a checkpoint, one at a time."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, safe_open is no mapping
                yield name, tensors.get_tensor(name)
