"""A sampling engine in the trainer's own process, on transformers: small, exact, and runs anywhere.

The quickstart and the tests use the engine. Log-probabilities are of the sampling distribution itself, and routes are
the expert ids in the calls of the model.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 # defines grouped_mm_fallback; loaded late up to transformers 5.6
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megarl.core.fp8 import round_activations, round_to_e4m3
from megarl.core.fp8_names import is_fp8_weight, is_known_precision
from megarl.core.types import REPLAYED, Rollout, SampleRequest
from megarl.engines import protocol
from megarl.engines.local.decode import Reader, RouteRecorder, decode
from megarl.engines.protocol import Begin, Engine, OnFinish, SamplingParams, Session, prompt_alone
from megarl.engines.weights import Intake, WeightForm, auto_class, checkpoint_views
from megarl.errors import RolloutError, WeightSyncError, refusal
from megarl.models.names import is_fp32

BUCKET_BYTES = 32 << 20
COPIED_ROWS = 16
"""Tokens of a pass that get copies of their experts' weights on a GPU in fp32, as ``generate`` of transformers does:
torch multiplies groups of fp32 matrices expert by expert there, and waits for each."""


class LocalEngine(Engine):
    """Samples with a transformers causal language model.

    A response is a function of weights, prompt and seed. The batch matters only by the float noise of batched matrix
    products, which can change a token whose uniform number lies very close to a boundary. The cache of keys and values
    lives for one batch, so no token is sampled with stale entries.
    """

    def __init__(
        self, config: PretrainedConfig, *,
        dtype: torch.dtype = torch.float32, device: str = "cpu", fp8_rounding: bool = False,
        fp8_activations: bool = False, fp8_kv_cache: bool = False, max_batch_size: int = 256,
        experts_implementation: str | None = None,
    ) -> None:  # fmt: skip
        """Build the model of a Hugging Face config without weights; ``update_weights`` must come first.

        fp8_rounding: round the linear weights of attention and experts through FP8 blocks of 128 x 128 as they arrive.
        fp8_activations: round the inputs of these weights too, with ``fp8_rounding`` only (``FP8Products``).
        fp8_kv_cache: round keys and values (``FP8Cache``). max_batch_size: most responses of a batch.
        experts_implementation: None: transformers' choice, "grouped_mm" (also fast on a CPU) where available.
        """
        if fp8_activations and not fp8_rounding:
            raise RolloutError("fp8_activations without fp8_rounding: FP8 engines round weights too, set both")
        if fp8_kv_cache and getattr(config.get_text_config(), "kv_lora_rank", None):
            raise RolloutError("fp8_kv_cache: engines hold the latents of latent attention, this one keys and values")
        with no_init_weights():
            # Attention is torch's SDPA where the class has that. Sparse attention adds SDPA's masks, bool, to scores.
            attention = "eager" if getattr(config, "index_topk", None) else None
            self._model = auto_class(config).from_config(
                config, dtype=dtype, attn_implementation=attention, experts_implementation=experts_implementation
            )
        self._model.tie_weights()  # no_init_weights skips ties, too
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if is_fp32(name):  # as ``from_pretrained`` does
                tensor.data = tensor.data.float()
        self._model = self._model.to(device).eval().requires_grad_(False)
        self._views = checkpoint_views(self._model)
        unknown = [name for name, view in self._views.items() if view.dim() > 1 and not is_known_precision(name)]
        if fp8_rounding and unknown:
            raise RolloutError(refusal("unknown_precision", num=len(unknown), first=unknown[0]))
        if fp8_activations:
            hold_in_fp32(self._model, self._views)
            self._views = checkpoint_views(self._model)
        self._shapes = {name: tuple(view.shape) for name, view in self._views.items()}
        is_grouped = self._model.config._experts_implementation == "grouped_mm" and not fp8_activations
        by_expert = is_grouped and dtype == torch.float32 and self._model.device.type == "cuda"
        self._copied_rows = COPIED_ROWS if by_expert else 0
        self._arithmetic = FP8Products(self._views, dtype) if fp8_activations else nullcontext()
        self._cache = FP8Cache if fp8_kv_cache else DynamicCache
        self._recorder = RouteRecorder(self._model)
        # In float32, because bfloat16 would round a second time.
        self._form = WeightForm(torch.float32, "rounded") if fp8_rounding else WeightForm()
        self._max_batch_size = max_batch_size
        self._missing: str | None = "no weights have arrived yet"

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See ``Engine.update_weights``. Tensors of the shapes in the checkpoint, on any device; ``BUCKET_BYTES`` are
        converted at a time."""
        self._missing = "the last weight update failed"
        moved = ((name, tensor.to(self._model.device)) for name, tensor in tensors)
        for bucket in Intake(self._shapes, version, self._form, BUCKET_BYTES).buckets(moved):
            views = [self._views[name] for name in bucket.names]
            torch._foreach_copy_(views, [tensor for _, tensor in bucket.tensors()])
        self.weight_version, self._missing = version, None

    def converse(self, begin: Begin, params: SamplingParams, on_finish: OnFinish = None) -> None:
        """See ``Engine.converse``. Samples once every episode waits, so batches do not depend on timing.

        A response ends early (``length``) at the model's last position. WeightSyncError without weights, RolloutError
        for routes of a model without experts.
        """
        if self._missing is not None:
            raise WeightSyncError(f"the engine cannot generate, {self._missing}: send all weights with update_weights")
        if params.return_routed_experts and self._recorder.num_layers == 0:
            raise RolloutError(f"{type(self._model).__name__} has no experts: set return_routed_experts to False")
        session = BatchSession(lambda requests: self._sample(requests, params, on_finish), self.weight_version)
        protocol.run_session(session.run_episodes(begin))

    def _sample(self, requests: Sequence[SampleRequest], params: SamplingParams, on_finish: OnFinish) -> list[Rollout]:
        config = self._model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
        for request in {id(request.prompt_tokens): request for request in requests}.values():  # samples share prompts
            protocol.check_prompt(request, params, config.vocab_size)
        limits = np.array([protocol.limit_response(request, params, positions) for request in requests])
        recorder = self._recorder if params.return_routed_experts else None
        # Requests of similar length share a batch, for little padding.
        order = np.argsort([len(request.prompt_tokens) for request in requests], kind="stable")
        rollouts: list[Rollout] = []
        asked = zip(REPLAYED, (True, params.return_gate_weights, params.return_indexer_topk), strict=True)
        columns = [name for name, is_asked in asked if is_asked]
        recording = nullcontext() if recorder is None else recorder.recording(columns)
        with self._arithmetic, recording:
            for start in range(0, len(requests), self._max_batch_size):  # refuses a generator, as ``sample_each``
                indices = order[start : start + self._max_batch_size]
                batch, cache = [requests[i] for i in indices.tolist()], self._cache(config=self._model.config)
                reader = Reader(self._model, recorder, cache, self._copied_rows)
                rollouts += decode(reader, batch, params, limits[indices], self.weight_version, on_finish)
        return [rollouts[i] for i in np.argsort(order).tolist()]

    def close(self) -> None:
        self._missing, self._views = "it is closed", {}
        for name in ("_model", "_recorder"):
            vars(self).pop(name, None)


class BatchSession(Session):
    """Samples one batch whenever every episode waits for a response.

    The content of a batch then depends on the episodes alone and not on timing, and with the content every float of the
    results.
    """

    def __init__(self, sample: Callable[[Sequence[SampleRequest]], list[Rollout]], version: int = 0) -> None:
        """``sample`` gets all waiting requests, in the order of (group, sample), and blocks the event loop.

        version: of the weights.
        """
        super().__init__()
        self._sample_batch, self._version = sample, version
        self._waiting: dict[asyncio.Future[Rollout], SampleRequest] = {}
        self._will_answer = self._is_paused = False

    def pause(self) -> None:
        self._is_paused = True
        for answer, request in self._waiting.items():
            if not answer.done():
                answer.set_result(prompt_alone(request, self._version))
        self._waiting.clear()

    async def sample(self, request: SampleRequest) -> Rollout:
        if self._is_paused:
            return prompt_alone(request, self._version)
        answer: asyncio.Future[Rollout] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = request
        self._after_episode()
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)

    def _after_episode(self) -> None:
        if not self._will_answer:
            asyncio.get_running_loop().call_soon(self._answer_all)
            self._will_answer = True

    def _answer_all(self) -> None:
        self._will_answer = False
        if not 0 < len(self._waiting) >= len(self.episodes):  # the next waiting or ending episode calls again
            return
        waiting = sorted(self._waiting.items(), key=lambda item: (item[1].group, item[1].sample))
        self._waiting.clear()
        try:
            rollouts = self._sample_batch([request for _, request in waiting])
        except Exception as error:  # the error must reach the waiting episodes, which end the session
            for answer, _ in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (answer, _), rollout in zip(waiting, rollouts, strict=True):
            if not answer.done():  # done: the episode was cancelled
                answer.set_result(rollout)


_PRODUCTS = {F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm}
"""Functions that multiply activations [..., K] (first) with a weight (second)."""
_GROUPED = ((F, "grouped_mm"), (torch, "_grouped_mm"), (torch.ops.transformers, "grouped_mm_fallback"))
_PRODUCTS |= {getattr(place, name) for place, name in _GROUPED if hasattr(place, name)}


class FP8Products(TorchFunctionMode):
    """While active, products with FP8 weights are as in an FP8 engine.

        y = dtype(sum over k of (q_x s_x)[k] (q_w s_w)[k]) + bias,    summed in float32

    ``q_x s_x`` are ``round_activations``; the weights arrive rounded. Weights are recognised by their memory, in any
    product: linear layers, the stacked experts of a layer, or experts one by one. RolloutError for another use.
    """

    def __init__(self, views: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """``views``: the tensors of the checkpoint in the model's memory; ``dtype`` of the results."""
        super().__init__()
        self._names = {_memory(view): name for name, view in views.items() if is_fp8_weight(name)}
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = next(filter(None, map(self._weight, _flat((*args, *kwargs.values())))), None)
        if weight is None:
            return func(*args, **kwargs)
        if func in _PRODUCTS and len(args) > 1 and self._weight(args[1]) and not self._weight(args[0]):
            activations, matrix, *extra = args
            bias = next((argument for argument in (*extra, kwargs.pop("bias", None)) if argument is not None), None)
            product = func(round_activations(activations), matrix, **kwargs).to(self._dtype)
            return product if bias is None else product + bias
        result = func(*args, **kwargs)
        # More than a view.
        if any(isinstance(output, torch.Tensor) and not self._weight(output) for output in _flat([result])):
            raise RolloutError(refusal("use_of_weight", weight=weight, function=getattr(func, "__name__", func)))
        return result

    def _weight(self, value: Any) -> str | None:
        """The name of the FP8 weight of a tensor, or of a view."""
        return self._names.get(_memory(value)) if isinstance(value, torch.Tensor) else None


class FP8Cache(DynamicCache):
    """Keys and values in e4m3 with a scale of 1, also for tokens of the current pass; queries unchanged."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append keys and values [B, heads, T, width]; return all keys and values, as ``DynamicCache`` does."""
        return super().update(round_to_e4m3(key_states), round_to_e4m3(value_states), *args, **kwargs)


def hold_in_fp32(model: PreTrainedModel, views: Mapping[str, torch.Tensor]) -> None:
    """Give FP8 weights [rows, columns] room for e4m3 times a float32 scale; bfloat16 would round a second time."""
    memory = {_memory(view) for name, view in views.items() if is_fp8_weight(name)}
    for parameter in model.parameters():
        if _memory(parameter) in memory:
            parameter.data = parameter.data.float()


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
