"""The decoding loop of the local engine: one batch of requests, from prompts to tokens.

1. Equal prompts are read once, left-padded to one length; the cache is then copied to every response.
2. Each step draws a token for each row, and reads the tokens that were drawn.
3. A finished row leaves the batch: at once, or after its last token was read if the experts are recorded, so that
   this token has a row in the trace too.
Nothing in the loop runs per sequence in Python: each step appends whole columns, which are sorted into sequences at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from megarl.core.types import SampleRequest
from megarl.rollout.engine import SamplingParams
from megarl.rollout.local.distribution import Noise, draw, sampling_logprobs
from megarl.rollout.local.recorder import RouteRecorder


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the loop found for one request."""

    response_tokens: np.ndarray
    """int32 [R]."""
    logprobs: np.ndarray
    """float32 [R]."""
    routed_experts: np.ndarray | None
    """uint8 or uint16 [P + R, L, K]."""
    stopped: bool
    """True if the response ends with a stop token, False if it was cut at the length limit."""


class _Reader:
    """Feeds tokens to the model and keeps cache, positions and padding of the rows in step."""

    def __init__(self, model: PreTrainedModel, recorder: RouteRecorder | None) -> None:
        self._model = model
        self._recorder = recorder
        self._cache = DynamicCache(config=model.config)
        self._mask: torch.Tensor | None = None
        self._positions = torch.empty(0)

    def read_prompts(self, prompts: Sequence[np.ndarray]) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits [U, V] after each prompt, and experts [U, P, L, K] of the left-padded prompts."""
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), dtype=np.int64)
        mask = np.zeros((len(prompts), longest), dtype=bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = True
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        device = self._model.device
        # Without padding the model needs no mask, and its attention is faster for it.
        self._mask = None if mask.all() else torch.from_numpy(mask).to(device)
        return self._forward(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device))

    def read_tokens(self, tokens: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits [B, V] after one more token per row, and its experts [B, 1, L, K]."""
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        return self._forward(tokens[:, None], self._positions + 1)

    def select(self, rows: torch.Tensor) -> None:
        """Makes row ``i`` what was row ``rows[i]``."""
        self._cache.batch_select_indices(rows)
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        self._positions = positions[:, -1:]
        model: Any = self._model
        with nullcontext() if self._recorder is None else self._recorder.recording():
            output = model(
                input_ids=ids,
                attention_mask=self._mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1], None if self._recorder is None else self._recorder.take(*ids.shape)


@dataclass(slots=True)
class _Columns:
    """Values of all rows, step after step, and the request that each belongs to."""

    requests: list[np.ndarray]
    values: list[np.ndarray]

    def append(self, requests: np.ndarray, values: np.ndarray) -> None:
        self.requests.append(requests)
        self.values.append(values)

    def split(self, num_requests: int) -> list[np.ndarray]:
        """One array per request, its values in the order of the steps."""
        owners = np.concatenate(self.requests)
        values = np.concatenate(self.values)[np.argsort(owners, kind="stable")]
        return np.split(values, np.cumsum(np.bincount(owners, minlength=num_requests))[:-1])


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    recorder: RouteRecorder | None,
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    limits: np.ndarray,
    on_finish: Callable[[int], None] | None,
) -> list[Sampled]:
    """Samples one response per request, at most ``limits`` int64 [B] tokens long, in one batch.

    Experts are recorded if there is a ``recorder``. The requests must have been checked.
    """
    reader = _Reader(model, recorder)
    prompts, prompt_of_request = _distinct([request.prompt_tokens for request in requests])
    logits, prompt_routes = reader.read_prompts(prompts)
    if len(prompts) != len(requests):
        expand = torch.from_numpy(prompt_of_request).to(logits.device)
        reader.select(expand)
        logits = logits[expand]

    noise = Noise([request.seed for request in requests], int(limits.max()))
    stop_ids = np.array(params.stop_token_ids, dtype=np.int64)
    stopped = np.zeros(len(requests), dtype=bool)
    tokens_of, logprobs_of, routes_of = _Columns([], []), _Columns([], []), _Columns([], [])
    alive = np.arange(len(requests))  # the request of each row
    for step in range(int(limits.max())):
        tokens, logprobs = _sample(logits, params, noise, step, alive)
        drawn = tokens.cpu().numpy()
        tokens_of.append(alive, drawn)
        logprobs_of.append(alive, logprobs.cpu().numpy())
        at_stop = np.isin(drawn, stop_ids)
        finished = at_stop | (step + 1 >= limits[alive])
        stopped[alive[at_stop]] = True
        if on_finish is not None and finished.any():
            on_finish(int(finished.sum()))
        if recorder is None:
            alive, tokens = _drop(finished, alive, tokens, reader)
            if not alive.size:
                break
            logits, _ = reader.read_tokens(tokens)
        else:
            logits, routes = reader.read_tokens(tokens)
            assert routes is not None
            routes_of.append(alive, routes[:, 0])
            alive, logits = _drop(finished, alive, logits, reader)
            if not alive.size:
                break

    routes = _join_routes(prompt_routes, prompts, prompt_of_request, routes_of)
    columns = zip(tokens_of.split(len(requests)), logprobs_of.split(len(requests)), routes, stopped, strict=True)
    return [Sampled(t.astype(np.int32), lp.astype(np.float32), r, bool(s)) for t, lp, r, s in columns]


def _sample(
    logits: torch.Tensor, params: SamplingParams, noise: Noise, step: int, alive: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, int64 [B], and its log-probability under the distribution it was drawn from [B]."""
    greedy = params.temperature == 0.0
    logprobs = sampling_logprobs(logits, 1.0 if greedy else params.temperature, 1.0 if greedy else params.top_p)
    if greedy:
        tokens = logprobs.argmax(dim=-1)
        return tokens, logprobs.new_zeros(len(tokens))  # the log-probability of a point mass
    tokens = draw(logprobs, noise.at(step, alive).to(logits.device))
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _drop(
    finished: np.ndarray, alive: np.ndarray, values: torch.Tensor, reader: _Reader
) -> tuple[np.ndarray, torch.Tensor]:
    """Takes the finished rows out of the batch."""
    if not finished.any():
        return alive, values
    kept = np.flatnonzero(~finished)
    if kept.size:
        rows = torch.from_numpy(kept).to(values.device)
        reader.select(rows)
        values = values[rows]
    return alive[kept], values


def _distinct(prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """The different prompts, and for each request the index of its prompt among them."""
    index: dict[bytes, int] = {}
    distinct: list[np.ndarray] = []
    of_request = np.empty(len(prompts), dtype=np.int64)
    for request, prompt in enumerate(prompts):
        key = np.ascontiguousarray(prompt, dtype=np.int64).tobytes()
        if key not in index:
            index[key] = len(distinct)
            distinct.append(prompt)
        of_request[request] = index[key]
    return distinct, of_request


def _join_routes(
    prompt_routes: np.ndarray | None, prompts: list[np.ndarray], prompt_of_request: np.ndarray, routes_of: _Columns
) -> list[np.ndarray | None]:
    """Experts of prompt and response back to back, without the rows of the padding."""
    if prompt_routes is None:
        return [None] * len(prompt_of_request)
    unpadded = [rows[len(rows) - len(prompt) :] for rows, prompt in zip(prompt_routes, prompts, strict=True)]
    responses = routes_of.split(len(prompt_of_request))
    return [np.concatenate([unpadded[p], r]) for p, r in zip(prompt_of_request, responses, strict=True)]
