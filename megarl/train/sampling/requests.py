"""What the engine is asked for: prompts, seeds and sampling parameters; and sampling in a thread of its own."""

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.core.types import SampleRequest
from megarl.data.benchmarks import HELDOUT
from megarl.data.prompt_table import Prompt, PromptTable
from megarl.data.prompts import load_prompts
from megarl.errors import RolloutError
from megarl.megatron import distributed
from megarl.rollout.engine import Engine, SamplingParams
from megarl.rollout.player import Sample
from megarl.run.progress import Advance

MOST_DRAWS = 3
"""Draws of the same samples until nobody changes the engine's weights meanwhile."""
TRAIN, EVALUATE, PRESAMPLE, KEEP = 0, 1, 2, 3
"""Purposes of a seed. They differ so that evaluation, for example, never repeats the noise of training."""
_SEEDS_AT_ONCE = 16
"""Samples whose seeds are computed together, for all prompts."""
_WORD = 2**32 - 1


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """Return the seed of one response of a run. It does not depend on the rank that draws it."""
    words = np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)
    return int(words[0])


def sampling_seeds(run_seed: int, purpose: int, step: int, groups: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return ``sampling_seed`` of each pair, uint64 [groups, samples]: numpy's SeedSequence for all of them at once.

    groups, samples: uint32.
    """
    words = [np.array([[word & _WORD]], np.uint32) for number in (run_seed, purpose, step) for word in _words(number)]
    entropy = [*words, groups.astype(np.uint32)[:, None], samples.astype(np.uint32)[None, :]]
    factor = 0x43B0D7E5

    def spread(value: np.ndarray) -> np.ndarray:
        nonlocal factor
        value = value ^ np.uint32(factor)
        factor = factor * 0x931E8875 & _WORD
        value = value * np.uint32(factor)
        return value ^ (value >> np.uint32(16))

    def mix(pool: np.ndarray, value: np.ndarray) -> np.ndarray:
        mixed = pool * np.uint32(0xCA01F9DD) - spread(value) * np.uint32(0x4973F715)
        return mixed ^ (mixed >> np.uint32(16))

    pool = [spread(word) for word in entropy[:4]]
    for source in range(4):
        for place in range(4):
            if place != source:
                pool[place] = mix(pool[place], pool[source])
    for word in entropy[4:]:
        pool = [mix(value, word) for value in pool]
    halves, factor = [], 0x8B51F9DD
    for value in pool[:2]:
        value = value ^ np.uint32(factor)
        factor = factor * 0x58F38DED & _WORD
        value = value * np.uint32(factor)
        halves.append((value ^ (value >> np.uint32(16))).astype(np.uint64))
    return halves[0] | halves[1] << np.uint64(32)


def _words(number: int) -> list[int]:
    """The number in words of 32 bits, the lowest first; 0 is one word."""
    return [number >> shift for shift in range(0, max(number.bit_length(), 1), 32)]


def make_requests(
    run_seed: int, purpose: int, step: int, prompts: Sequence[Prompt]
) -> Callable[[int, int], tuple[SampleRequest, Prompt]]:
    """Return the function from (number of the prompt, sample) to its request, which has a seed of its own."""
    taken: dict[int, Prompt] = {}
    seeds: dict[int, np.ndarray] = {}

    def request_of(number: int, sample: int) -> tuple[SampleRequest, Prompt]:
        if (prompt := taken.get(number)) is None:
            prompt = taken[number] = prompts[number]
        block, place = divmod(sample, _SEEDS_AT_ONCE)
        if (found := seeds.get(block)) is None:
            places = np.arange(block * _SEEDS_AT_ONCE, (block + 1) * _SEEDS_AT_ONCE)
            found = seeds[block] = sampling_seeds(run_seed, purpose, step, np.arange(len(prompts)), places)
        return SampleRequest(prompt.tokens, group=number, sample=sample, seed=int(found[number, place])), prompt

    return request_of


def train_params(config: Config, stop_tokens: tuple[int, ...], routes: bool) -> SamplingParams:
    """Return the parameters of responses that train, with or without their routes."""
    rollout = config.rollout
    return SamplingParams(
        rollout.temperature,
        rollout.top_p,
        rollout.max_response_tokens,
        stop_tokens,
        routes,
        rollout.max_kept_ids if rollout.keeps_sets else None,
    )


def eval_params(config: Config, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """Return the parameters of evaluation."""
    params = train_params(config, stop_tokens, routes=False)
    return replace(params, temperature=config.eval.temperature, max_kept_ids=None)


def benchmark_number(name: str) -> int:
    """Return what stands for a benchmark in its seeds; it depends on no other benchmark. That of ``heldout`` is 0."""
    return 0 if name == HELDOUT else zlib.crc32(name.encode())


def load_run_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptTable:
    """Return the prompts that a run trains on."""
    data = config.data
    return load_prompts(
        data.train,
        tokenizer=tokenizer,
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        chat_template=data.chat_template,
        max_prompt_tokens=data.max_prompt_tokens,
        split=data.split,
    )


def sample_together(
    engine: Engine, sample: Callable[[int], dict[tuple[int, int], Sample]]
) -> dict[tuple[int, int], Sample]:
    """Return the samples of ``sample(number of earlier draws)`` on this rank; a collective call.

    Samples of weights that somebody else has changed meanwhile are dropped, and drawn again.
    """
    for redraws in range(MOST_DRAWS):
        samples = distributed.run_together("sampling", partial(sample, redraws))
        if not is_changed(engine):
            return samples
    raise RolloutError(
        f"somebody else has changed the weights of a server in each of {MOST_DRAWS} draws of the same responses: the "
        "lines above name the server; give it an API key that only this run knows (sglang.api_key_env)"
    )


def is_changed(engine: Engine) -> bool:
    """Return whether somebody else has changed the engine's weights on any rank; a collective call."""
    changed = distributed.run_together("the proof of the engine's weights", engine.prove_weights)
    return distributed.largest(int(changed), dist.group.WORLD) > 0


class BackgroundSampling:
    """Samples while the trainer's thread trains. Starts at once. ``result`` raises what ``sample`` raises."""

    def __init__(self, sample: Callable[[Advance], dict[tuple[int, int], Sample]]) -> None:
        """``sample(on_finish)`` must make no collective call: those belong to the trainer's thread."""
        self._lock = threading.Lock()
        self._num_finished = 0
        self._on_finish: Advance | None = None
        self._future: Future[dict[tuple[int, int], Sample]] = Future()
        # A daemon thread: a trainer that ends with an error does not wait for responses that nobody wants.
        threading.Thread(target=self._run, args=(sample,), name="sampling", daemon=True).start()

    def result(self, on_finish: Advance | None = None) -> dict[tuple[int, int], Sample]:
        """Wait for the result. ``on_finish`` is called with what is complete now, then for every further response."""
        with self._lock:
            self._on_finish = on_finish
            if on_finish is not None and self._num_finished:
                on_finish(self._num_finished)
        return self._future.result()

    def _run(self, sample: Callable[[Advance], dict[tuple[int, int], Sample]]) -> None:
        try:
            self._future.set_result(sample(self._count))
        except BaseException as error:
            self._future.set_exception(error)

    def _count(self, number: int) -> None:
        with self._lock:
            self._num_finished += number
            if self._on_finish is not None:
                self._on_finish(number)
