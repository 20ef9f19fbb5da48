"""What the engine is asked for: prompts, seeds and sampling parameters; and sampling in a thread of its own."""

import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.core.types import SampleRequest
from megarl.data.benchmarks import HELDOUT
from megarl.data.prompt_table import Prompt, PromptTable
from megarl.data.prompts import load_prompts
from megarl.engines.player import Sample
from megarl.engines.protocol import Engine, SamplingParams
from megarl.errors import RolloutError
from megarl.megatron import distributed
from megarl.run.progress import Advance
from megarl.trainer.sampling.seeds import sampling_seeds

MOST_DRAWS = 3
"""Draws of the same samples until nobody changes the engine's weights meanwhile."""
_SEEDS_AT_ONCE = 1024, 16
"""Prompts and samples whose seeds are computed together."""


def make_requests(
    run_seed: int, purpose: int, step: int, prompts: Sequence[Prompt]
) -> Callable[[int, int], tuple[SampleRequest, Prompt]]:
    """Return the function from (number of the prompt, sample) to its request, which has a seed of its own."""
    taken: dict[int, Prompt] = {}
    blocks: dict[tuple[int, int], list[list[int]]] = {}
    height, width = sizes = min(_SEEDS_AT_ONCE[0], len(prompts)), _SEEDS_AT_ONCE[1]

    def request_of(number: int, sample: int) -> tuple[SampleRequest, Prompt]:
        if (prompt := taken.get(number)) is None:
            prompt = taken[number] = prompts[number]
        key = number // height, sample // width
        if (seeds := blocks.get(key)) is None:
            numbers = (np.arange(size * block, size * (block + 1)) for size, block in zip(sizes, key, strict=True))
            seeds = blocks[key] = sampling_seeds(run_seed, purpose, step, *numbers).tolist()
        return SampleRequest(prompt.tokens, number, sample, seeds[number % height][sample % width]), prompt

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
        chat_template_args=data.chat_template_args,
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
    return distributed.largest(int(changed)) > 0


class BackgroundSampling:
    """Samples while the trainer's thread trains. Starts at once. ``result`` raises what ``sample`` raises.

    What ``on_finish`` raises, such as a request to stop, every further ``result`` raises too.
    """

    def __init__(self, sample: Callable[[Advance], dict[tuple[int, int], Sample]]) -> None:
        """``sample(on_finish)`` must make no collective call: those belong to the trainer's thread."""
        self._lock = threading.Lock()
        self._num_finished = 0
        self._on_finish: Advance | None = None
        self._refusal: BaseException | None = None
        self._future: Future[dict[tuple[int, int], Sample]] = Future()
        # A daemon thread: a trainer that ends with an error does not wait for responses that nobody wants.
        threading.Thread(target=self._run, args=(sample,), name="sampling", daemon=True).start()

    def result(self, on_finish: Advance | None = None) -> dict[tuple[int, int], Sample]:
        """Wait for the result. ``on_finish`` is called with what is complete now, then for every further response."""
        with self._lock:
            self._on_finish = on_finish
            if on_finish is not None and self._num_finished and self._refusal is None:
                try:
                    on_finish(self._num_finished)
                except BaseException as error:
                    self._refusal = error
        if self._refusal is not None:
            raise self._refusal
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
