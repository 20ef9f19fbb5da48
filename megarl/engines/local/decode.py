"""The decoding loop of the local engine: one batch of requests, from prompts to rollouts.

1. Equal prompts are read once, left-padded to one length; the cache is then copied to every response.
2. Each step draws a token for each row, and reads the drawn tokens.
3. A finished row leaves the batch at once; if experts are recorded, after its last token was read, because the last
   token needs a row in the trace too.
Nothing in the loop runs per sequence in Python: each step appends whole columns, which are sorted into sequences at the
end.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from megarl.core.types import REPLAYED, Rollout, SampleRequest
from megarl.engines.protocol import OnFinish, SamplingParams, too_many_kept
from megarl.errors import NumericsError, RolloutError, TraceError, refusal
from megarl.routes.trace import narrow_dtype


class Reader:
    """Feeds tokens to the model and keeps cache, positions and padding of the rows in step."""

    def __init__(
        self, model: PreTrainedModel, recorder: "RouteRecorder | None", cache: DynamicCache, copied_rows: int
    ) -> None:
        """The ``cache`` is empty. A ``recorder`` must be recording; None: no experts. Up to ``copied_rows`` tokens of a
        pass get copies of their experts' weights; 0: the model's implementation stays."""
        self._model, self.recorder, self._cache, self._copied_rows = model, recorder, cache, copied_rows
        self._mask: torch.Tensor | None = None
        self._positions = torch.empty(0)

    def read_prompts(self, ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
        """Logits [U, V] after each left-padded prompt; ids: int64 [U, P], mask: bool."""
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        device = self._model.device
        # Without padding the model needs no mask, and its attention is faster for it.
        self._mask = None if mask.all() else torch.from_numpy(mask).to(device)
        return self._forward(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device))

    def read_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after one more token per row."""
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        return self._forward(tokens[:, None], self._positions + 1)

    def select(self, rows: torch.Tensor) -> None:
        """Make row ``rows[i]`` the new row ``i``."""
        # The only selection that states of linear attention have.
        self._cache.reorder_cache(rows)  # type: ignore[arg-type] # any int64
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._positions = positions[:, -1:]
        model: Any = self._model
        if self._copied_rows:
            experts = "batched_mm" if ids.numel() <= self._copied_rows else "grouped_mm"
            if model.config._experts_implementation != experts:
                model.set_experts_implementation(experts)
        state = {"attention_mask": self._mask, "position_ids": positions, "past_key_values": self._cache}
        output = model(input_ids=ids, **state, use_cache=True, logits_to_keep=1)
        if self.recorder is not None:
            self.recorder.end_pass(ids.numel())
        return output.logits[:, -1]


@torch.inference_mode()
def decode(
    reader: Reader, requests: Sequence[SampleRequest], params: SamplingParams, limits: np.ndarray, version: int,
    on_finish: OnFinish,
) -> list[Rollout]:  # fmt: skip
    """Sample one response per request, at most ``limits`` int64 [B] tokens long, in one batch.

    With ``params.segment_tokens``, the batch ends after this number of steps, or a multiple, if a row has finished; the
    finish_reason of unfinished rows is "pause". The ``reader`` is new. The requests have been checked.
    """
    recorder = reader.recorder
    prompts, prompt_of_request = _distinct([request.prompt_tokens for request in requests])
    ids, mask = _pad_left(prompts)
    logits = reader.read_prompts(ids, mask)
    if len(prompts) != len(requests):
        expand = torch.from_numpy(prompt_of_request).to(logits.device)
        reader.select(expand)
        logits = logits[expand]

    last_limit = int(limits.max())
    noise = Noise([request.seed for request in requests], last_limit, [request.num_drawn for request in requests])
    is_stop = np.zeros(logits.shape[-1], dtype=bool)
    is_stop[list(params.stop_token_ids)] = True
    num_kept, kept_steps = np.zeros(len(requests), dtype=np.int64), []  # ids of the sets so far; counts, ids of a step
    owners, places = mask[prompt_of_request].nonzero()
    read_as = prompt_of_request[owners] * ids.shape[1] + places  # row of each token among the distinct prompts
    steps = [(owners, ids.ravel()[read_as])]
    """Tokens of all prompts, then of each step: request and token."""
    logprobs = [logits.new_zeros(len(owners))]
    alive = np.arange(len(requests))  # the request of each row
    for step in range(last_limit):
        tokens, logprobs_of_step, nucleus = _sample(logits, params, noise, step, alive)
        drawn = tokens.cpu().numpy()
        steps.append((alive, drawn))
        logprobs.append(logprobs_of_step)
        if nucleus is not None and params.max_kept_ids is not None:
            kept_steps.append((nucleus.sum(dim=-1).cpu().numpy(), nucleus.nonzero()[:, 1].int().cpu().numpy()))
            num_kept[alive] += kept_steps[-1][0]
            if (largest := num_kept.max()) > params.max_kept_ids:
                raise too_many_kept(requests[int(num_kept.argmax())], largest, params.max_kept_ids, step + 1)
        is_finished = is_stop[drawn] | (limits[alive] <= step + 1)
        num_finished = int(np.count_nonzero(is_finished))
        if on_finish is not None and num_finished:
            on_finish(num_finished)
        if recorder is not None:
            logits = reader.read_tokens(tokens)
        if num_finished:
            staying = np.flatnonzero(~is_finished)
            alive = alive[staying]
            if not alive.size:
                break
            stay = torch.from_numpy(staying).to(logits.device)
            reader.select(stay)
            tokens, logits = tokens[stay], logits[stay]
        if params.segment_tokens and len(alive) < len(requests) and (step + 1) % params.segment_tokens == 0:
            break
        if recorder is None:
            logits = reader.read_tokens(tokens)

    columns = [np.concatenate(column) for column in zip(*steps, strict=True)]
    columns.append(torch.cat(logprobs).float().cpu().numpy())
    rows = np.concatenate([read_as, np.arange(ids.size, ids.size + len(columns[0]) - len(owners))])
    recorded = {} if recorder is None else {name: column[rows] for name, column in recorder.take().items()}
    if (keys := recorded.get("indexer_topk")) is not None:
        keys -= np.count_nonzero(~mask, 1)[prompt_of_request][columns[0]][:, None, None]  # padding comes first
    rollouts = _cut_into_rollouts(requests, columns, recorded, len(owners), kept_steps, is_stop, version)
    for index in alive.tolist():
        rollouts[index] = replace(rollouts[index], finish_reason="pause")
    return rollouts


def _cut_into_rollouts(
    requests: Sequence[SampleRequest], columns: Sequence[np.ndarray], recorded: Mapping[str, np.ndarray], num_read: int,
    kept_steps: Sequence[tuple[np.ndarray, np.ndarray]], is_stop: np.ndarray, version: int,
) -> list[Rollout]:  # fmt: skip
    """The rollouts of a batch, as views of its columns: sequence after sequence, each the prompt and then the response.

    columns: request, token and log-probability of each token; first the ``num_read`` tokens of all prompts, then step
    after step, as ``kept_steps`` and the columns of a recorder.
    """
    owners = columns[0]
    order, ends = np.argsort(owners, kind="stable"), np.bincount(owners).cumsum()
    tokens, logprobs = (np.take(column, order, axis=0) for column in columns[1:])
    experts, gates, keys = (None if name not in recorded else recorded[name].take(order, 0) for name in REPLAYED)
    if keys is not None:  # a row has too few before the k-th token, and the engine fills it with others
        positions = np.arange(len(order)) - np.repeat(np.append(0, ends[:-1]), np.diff(ends, prepend=0))
        keys[(keys < 0) | (keys > positions[:, None, None])] = -1
    tokens = tokens.astype(np.int32)
    kept_counts, kept_ids = None, (empty := [None] * len(requests))
    if kept_steps:
        counts, ids = (np.concatenate(column) for column in zip(*kept_steps, strict=True))
        kept_counts = np.append(np.zeros(num_read, np.int32), counts)[order].astype(np.int32)
        ids = ids[np.argsort(np.repeat(owners[num_read:], counts), kind="stable")].astype(np.int32)
        kept_ids = np.split(ids, kept_counts.cumsum()[ends[:-1] - 1])
    generated, versions = order >= num_read, np.full(len(order), version, np.int32)
    mask = None if experts is None else np.ones(len(order), bool)
    bounds = [0, *ends.tolist()]
    whole = [tokens, generated, logprobs, experts, mask, versions, kept_counts, gates, keys]
    views = [empty if column is None else [column[i:j] for i, j in pairwise(bounds)] for column in whole]
    reasons = ["stop" if is_last else "length" for is_last in is_stop[tokens[ends - 1]].tolist()]
    groups, samples = [request.group for request in requests], [request.sample for request in requests]
    *first, counts, gate_weights, indexer_topk = views
    return [*map(Rollout, groups, samples, *first, reasons, empty, counts, kept_ids, empty, gate_weights, indexer_topk)]


def _sample(
    logits: torch.Tensor, params: SamplingParams, noise: "Noise", step: int, alive: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One token per row, int64 [B], its log-probability under the sampling distribution [B], and bool [B, V], the ids
    of the nucleus, if requested."""
    greedy = params.temperature == 0.0
    logprobs = sampling_logprobs(logits, 1.0 if greedy else params.temperature, 1.0 if greedy else params.top_p)
    if greedy:
        tokens = logprobs.argmax(dim=-1)
        return tokens, logprobs.new_zeros(len(tokens)), None  # the log-probability of a point mass
    tokens = draw(logprobs, noise.at(step, alive).to(logits.device))
    nucleus = None if params.max_kept_ids is None else logprobs > -torch.inf
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0], nucleus


def _distinct(prompts: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """The distinct prompts, and for each request the index of its prompt, int64 [B]."""
    index: dict[bytes, int] = {}
    index_of = [index.setdefault(prompt.astype(np.int64).tobytes(), len(index)) for prompt in prompts]
    return [np.frombuffer(key, np.int64) for key in index], np.array(index_of)


def _pad_left(prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as int64 [U, P], and bool [U, P], True at tokens of a prompt."""
    lengths = np.array([[len(prompt)] for prompt in prompts])
    mask = np.arange(lengths.max()) >= lengths.max() - lengths
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask] = np.concatenate(prompts)
    return ids, mask


def sampling_logprobs(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Log-probabilities of the sampling distribution.

    ``log_softmax(logits / temperature)``; for ``top_p < 1`` restricted to the nucleus, the smallest set of most likely
    tokens with mass >= top_p, and renormalised (equally likely tokens: the lower id first). Outside of the nucleus the
    value is -inf.

    ``logits`` [B, V] of any floating dtype, ``temperature > 0``; returns float32 [B, V] (float64 for float64 logits).
    Raises NumericsError if a row has a NaN, an infinite logit, or no finite logit. Source of the nucleus: Holtzman et
    al. 2020, section 3.1.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(wide if temperature == 1.0 else wide / temperature, dim=-1)
    if math.isnan(logprobs[:, 0].sum()):  # the sum of a bad row is NaN, and so are its log-probabilities
        raise NumericsError(refusal("logits_not_finite", bad=int(logprobs[:, 0].isnan().sum()), num=len(logits)))
    if top_p < 1.0:
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
        mass = ordered.double().exp()
        in_nucleus = mass.cumsum(dim=-1) - mass < top_p  # the mass before the token; always true for the first token
        nucleus = torch.zeros_like(in_nucleus).scatter_(-1, order, in_nucleus)
        logprobs = torch.where(nucleus, logprobs, float("-inf"))
        logprobs = logprobs - logprobs.logsumexp(dim=-1, keepdim=True)
    return logprobs


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one token per row by inverting the cumulative distribution: the first token with ``cdf > u``.

    ``logprobs`` [B, V], ``uniforms`` float64 [B] in [0, 1); returns int64 [B]. The sum runs in float64, and a token of
    probability 0 is never drawn.
    """
    cdf = logprobs.double().exp().cumsum(dim=-1)
    # Less than the total: u <= 1 - 2**-53 takes away at least half of the distance to the next smaller number.
    return torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)[:, 0]


class Noise:
    """Uniform numbers for a batch of requests: number ``t`` of a request is a function of its seed and ``t`` alone.

    Philox is a counter-based generator, so that the seeds 0, 1, 2, ... give independent streams (Salmon et al. 2011).
    """

    def __init__(self, seeds: Sequence[int], num_steps: int, num_drawn: Sequence[int] | None = None) -> None:
        """num_drawn: by request, the numbers that earlier parts of the response have used."""
        for seed in (min(seeds), max(seeds)):
            if not 0 <= seed < 2**128:
                raise RolloutError(f"seed of a request is {seed}, expected 0 <= seed < 2**128")
        streams = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]
        firsts = num_drawn or [0] * len(streams)
        numbers = [stream.random(first + num_steps)[first:] for stream, first in zip(streams, firsts, strict=True)]
        self._numbers = np.stack(numbers, axis=1)

    def at(self, step: int, rows: np.ndarray) -> torch.Tensor:
        """Uniforms float64 [len(rows)] of the requests ``rows`` for token ``step``."""
        return torch.from_numpy(self._numbers[step][rows])


class RouteRecorder:
    """Records columns of rollouts in the calls of a transformers model: the experts of each MoE layer, and if asked
    their gate weights, and the keys that each indexer of sparse attention selects.

    The hooks sit on the modules that hold the experts, not on the routers: some routers return logits only and leave
    the choice to the block around them, but every block calls ``experts(hidden_states, top_k_index, top_k_weights)``.
    Dense layers have no such module and so no place in the trace.
    """

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(model.named_modules())
        experts = [name for name, module in self._named.items() if _num_experts(module)]
        indexers = [name for name, module in self._named.items() if type(module).__name__.endswith("Indexer")]
        self._layers = dict(zip(REPLAYED, (experts, experts, indexers), strict=True))
        self.num_layers = len(experts)
        """Number of MoE layers, L."""
        num_experts = max((_num_experts(self._named[name]) for name in experts), default=0)
        self._dtype = narrow_dtype(num_experts)
        narrow = getattr(torch, narrow_dtype(num_experts, signed=True).__name__)
        self._dtypes = dict(zip(REPLAYED, (narrow, torch.float32, torch.int32), strict=True))
        self._begin(())

    @contextmanager
    def recording(self, columns: Collection[str] = REPLAYED[:1]) -> Iterator[None]:
        """Record columns of a rollout in the passes inside; outside the model has no hooks. RolloutError for a column
        of layers that the model has not.
        """
        if absent := [column for column in columns if not self._layers[column]]:
            raise RolloutError(f"the model has no layers of {absent[0]}: do not request it")
        self._begin(columns)
        with ExitStack() as hooks:
            for column, name in self._seen:
                add = partial(self._add, column, name)
                hooks.enter_context(self._named[name].register_forward_hook(add, with_kwargs=True))
            yield

    def end_pass(self, num_tokens: int) -> None:
        """End a forward pass; TraceError if a layer did not see exactly one row per input token."""
        for (_, name), passes in self._seen.items():
            shape = tuple(passes[-1].shape) if len(passes) > self._num_passes else None
            if shape is None or len(shape) != 2 or shape[0] != num_tokens:
                raise TraceError(f"{name} routed {shape}, expected [{num_tokens}, top-k]: one row per token")
        self._num_passes += 1

    def take(self) -> dict[str, np.ndarray]:
        """Returns the rows of all passes, one after the other, [rows, L, K], by column; once.

        Experts are uint8 (E <= 256) or uint16; keys count from the first token of the batch, padding included.
        """
        columns: dict[str, list[torch.Tensor]] = {}
        for (column, _), passes in self._seen.items():
            columns.setdefault(column, []).append(torch.cat(passes))
        rows = {name: torch.stack(layers, 1).to(self._dtypes[name]).cpu().numpy() for name, layers in columns.items()}
        self._begin(rows)
        return rows | {"routed_experts": rows["routed_experts"].view(self._dtype)}

    def _begin(self, columns: Iterable[str]) -> None:
        # By column and layer, pass after pass.
        keys = ((column, name) for column in columns for name in self._layers[column])
        self._seen: dict[tuple[str, str], list[torch.Tensor]] = {key: [] for key in keys}
        self._num_passes = 0

    def _add(self, column: str, name: str, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        passes = self._seen[column, name]
        if len(passes) > self._num_passes:
            raise TraceError(f"{name} ran twice in one forward pass")
        if column == "indexer_topk":
            keys = output.flatten(0, 1)
            passes.append(nn.functional.pad(keys, (0, module.index_topk - keys.size(1)), value=-1))
        else:
            place, argument = (1, "top_k_index") if column == "routed_experts" else (2, "top_k_weights")
            passes.append(args[place] if len(args) > place else kwargs[argument])


def _num_experts(module: nn.Module) -> int:
    """E for a module with the stacked weights [E, ., .] of all experts of a layer, else 0."""
    number = getattr(module, "num_experts", None)
    return number if isinstance(number, int) and any(p.dim() == 3 for p in module.parameters(recurse=False)) else 0
