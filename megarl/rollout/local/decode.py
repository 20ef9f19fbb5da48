"""The decoding loop of the local engine: one batch of requests, from prompts to rollouts.

1. Equal prompts are read once, left-padded to one length; the cache is then copied to every response.
2. Each step draws a token for each row, and reads the tokens that were drawn.
3. A finished row leaves the batch: at once, or after its last token was read if the experts are recorded, so that
   this token has a row in the trace too.
Nothing in the loop runs per sequence in Python: each step appends whole columns, which are sorted into sequences at
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from megarl.core.types import Rollout, SampleRequest
from megarl.rollout.engine import OnFinish, SamplingParams, too_many_kept
from megarl.rollout.local.distribution import Noise, draw, sampling_logprobs
from megarl.rollout.local.recorder import RouteRecorder


class _Reader:
    """Feeds tokens to the model and keeps cache, positions and padding of the rows in step."""

    def __init__(self, model: PreTrainedModel, recorder: RouteRecorder | None, cache: DynamicCache) -> None:
        self._model = model
        self._recorder = recorder
        self._cache = cache
        self._mask: torch.Tensor | None = None
        self._positions = torch.empty(0)

    def read_prompts(self, prompts: Sequence[np.ndarray]) -> tuple[torch.Tensor, np.ndarray | None]:
        """Logits [U, V] after each prompt, and experts [U, P, L, K] of the left-padded prompts."""
        lengths = np.array([[len(prompt)] for prompt in prompts])
        mask = np.arange(lengths.max()) >= lengths.max() - lengths
        ids = np.zeros(mask.shape, dtype=np.int64)
        ids[mask] = np.concatenate(prompts)
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


@torch.inference_mode()
def decode(
    model: PreTrainedModel,
    recorder: RouteRecorder | None,
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    limits: np.ndarray,
    version: int,
    on_finish: OnFinish,
    cache: DynamicCache,
) -> list[Rollout]:
    """Samples one response per request, at most ``limits`` int64 [B] tokens long, in one batch.

    Experts are recorded if there is a ``recorder``. The ``cache`` is empty. The requests must have been checked.
    """
    reader = _Reader(model, recorder, cache)
    prompts, prompt_of_request = _distinct([request.prompt_tokens for request in requests])
    logits, prompt_routes = reader.read_prompts(prompts)
    if len(prompts) != len(requests):
        expand = torch.tensor(prompt_of_request, device=logits.device)
        reader.select(expand)
        logits = logits[expand]

    noise = Noise([request.seed for request in requests], int(limits.max()))
    stop_ids = np.array(params.stop_token_ids, dtype=np.int64)
    stopped = np.zeros(len(requests), dtype=bool)
    num_kept, kept_steps = np.zeros(len(requests), dtype=np.int64), []  # ids of the sets so far; counts, ids of a step
    steps: list[list[np.ndarray]] = []
    """Of each step: the requests of the rows, their tokens and log-probabilities, and their experts if recorded."""
    alive = np.arange(len(requests))  # the request of each row
    for step in range(int(limits.max())):
        tokens, logprobs, kept = _sample(logits, params, noise, step, alive)
        drawn = tokens.cpu().numpy()
        steps.append([alive, drawn, logprobs.cpu().numpy()])
        if kept is not None:
            kept_steps.append((kept.sum(dim=-1).cpu().numpy(), kept.nonzero()[:, 1].int().cpu().numpy()))
            num_kept[alive] += kept_steps[-1][0]
            if (most := num_kept.max()) > params.max_kept_ids:
                raise too_many_kept(requests[num_kept.argmax()], most, params.max_kept_ids, step + 1)
        at_stop = (drawn[:, None] == stop_ids).any(1)
        finished = at_stop | (step + 1 >= limits[alive])
        stopped[alive[at_stop]] = True
        if on_finish is not None and finished.any():
            on_finish(int(finished.sum()))
        if recorder is not None:
            logits, routes = reader.read_tokens(tokens)
            assert routes is not None
            steps[-1].append(routes[:, 0])
        if finished.any():
            alive = alive[~finished]
            if not alive.size:
                break
            stay = torch.from_numpy(np.flatnonzero(~finished)).to(logits.device)
            reader.select(stay)
            tokens, logits = tokens[stay], logits[stay]
        if recorder is None:
            logits, _ = reader.read_tokens(tokens)

    routes = None if prompt_routes is None else [prompt_routes[prompt] for prompt in prompt_of_request]
    return _cut_into_rollouts(requests, steps, kept_steps, stopped, version, routes)


def _cut_into_rollouts(
    requests: Sequence[SampleRequest],
    steps: Sequence[Sequence[np.ndarray]],
    kept_steps: Sequence[tuple[np.ndarray, np.ndarray]],
    stopped: np.ndarray,
    version: int,
    prompt_routes: Sequence[np.ndarray] | None,
) -> list[Rollout]:
    """The rollouts of a batch, as views of its columns: sequence after sequence, each the prompt and then the response.

    ``steps``, ``kept_steps`` and ``stopped`` are those of ``decode``. ``prompt_routes``: the experts of each request's
    prompt, padded on the left.
    """
    owners, drawn, logprobs_of, *routes_of = (np.concatenate(column) for column in zip(*steps, strict=True))
    order, sizes = np.argsort(owners, kind="stable"), np.bincount(owners)
    parts = np.stack([[len(request.prompt_tokens) for request in requests], sizes], 1)
    generated = np.repeat(np.tile([False, True], len(requests)), parts.ravel())
    rollout_logprobs = np.zeros(len(generated), np.float32)
    rollout_logprobs[generated] = logprobs_of[order]
    tokens = np.empty(len(generated), np.int32)
    tokens[generated] = drawn[order]
    tokens[~generated] = np.concatenate([request.prompt_tokens for request in requests])
    versions, present = np.full(len(generated), version, np.int32), np.ones(len(generated), bool)
    experts = None
    if prompt_routes is not None:
        experts = np.empty((len(generated), *routes_of[0].shape[1:]), routes_of[0].dtype)
        experts[generated] = routes_of[0][order]
        experts[~generated] = np.concatenate(
            [routes[-length:] for routes, (length, _) in zip(prompt_routes, parts, strict=True)]
        )
    ends = parts.sum(1).cumsum()
    kept_counts = kept_ids = None
    if kept_steps:
        kept_counts, ids = _sort_kept(kept_steps, owners, order, generated)
        kept_ids = np.split(ids, kept_counts.cumsum()[ends[:-1] - 1])
    return [
        Rollout(
            request.group,
            request.sample,
            tokens[start:end],
            generated[start:end],
            rollout_logprobs[start:end],
            None if experts is None else experts[start:end],
            None if experts is None else present[start:end],
            versions[start:end],
            "stop" if is_stopped else "length",
            kept_counts=None if kept_counts is None else kept_counts[start:end],
            kept_ids=None if kept_ids is None else kept_ids[index],
        )
        for index, (request, start, end, is_stopped) in enumerate(
            zip(requests, [0, *ends[:-1].tolist()], ends.tolist(), stopped.tolist(), strict=True)
        )
    ]


def _sort_kept(
    steps: Sequence[tuple[np.ndarray, np.ndarray]], owners: np.ndarray, order: np.ndarray, generated: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The counts int32 [T] and the ids int32 [M] of all sequences, from those of all steps."""
    counts, ids = (np.concatenate(column) for column in zip(*steps, strict=True))
    whole = np.zeros(len(generated), np.int32)
    whole[generated] = counts[order]
    return whole, ids[np.argsort(np.repeat(owners, counts), kind="stable")].astype(np.int32)


def _sample(
    logits: torch.Tensor, params: SamplingParams, noise: Noise, step: int, alive: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One token per row, int64 [B], its log-probability under the distribution it was drawn from [B], and bool [B, V],
    the ids it was drawn from, if they are asked for."""
    greedy = params.temperature == 0.0
    logprobs = sampling_logprobs(logits, 1.0 if greedy else params.temperature, 1.0 if greedy else params.top_p)
    if greedy:
        tokens = logprobs.argmax(dim=-1)
        return tokens, logprobs.new_zeros(len(tokens)), None  # the log-probability of a point mass
    tokens = draw(logprobs, noise.at(step, alive).to(logits.device))
    kept = None if params.max_kept_ids is None else logprobs > -torch.inf
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0], kept


def _distinct(prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[int]]:
    """The different prompts, and for each request the index of its prompt among them."""
    keys = [prompt.astype(np.int64).tobytes() for prompt in prompts]
    index = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [np.frombuffer(key, np.int64) for key in index], [index[key] for key in keys]
