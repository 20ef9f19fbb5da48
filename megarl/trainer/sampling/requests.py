"""Requests to the engine: prompts, seeds, sampling parameters; and sampling in a background thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import cache

import numpy as np

from megarl.config import Config
from megarl.core.sampling.collector import Key
from megarl.core.types import SampleRequest
from megarl.data.prompts import Prompt
from megarl.engines.player import Sample
from megarl.engines.protocol import Engine, SamplingParams
from megarl.errors import RolloutError, refusal
from megarl.megatron import distributed
from megarl.run.progress import Advance

TRAIN, EVALUATE, PRESAMPLE, KEEP = 0, 1, 2, 3
"""Purposes of a seed. Different purposes keep evaluation, for example, from repeating the noise of training."""
_LOOK_S = 0.2
"""Seconds between two looks at the responses of a background thread."""


def make_requests(
    run_seed: int, purpose: int, step: int, prompt_of: Callable[[int], Prompt]
) -> Callable[[int, int], tuple[SampleRequest, Prompt]]:
    """Return the function from (number of the prompt, sample) to its request with a separate seed."""
    prompt_of = cache(prompt_of)

    def request_of(number: int, sample: int) -> tuple[SampleRequest, Prompt]:
        prompt, seed = prompt_of(number), sampling_seed(run_seed, purpose, step, number, sample)
        return SampleRequest(prompt.tokens, number, sample, seed), prompt

    return request_of


def train_params(config: Config, stop_tokens: tuple[int, ...], routes: bool) -> SamplingParams:
    """Return the parameters of training responses, with or without routes."""
    rollout, train = config.rollout, config.train
    limits = rollout.temperature, rollout.top_p, rollout.max_response_tokens, stop_tokens
    max_kept_ids = rollout.max_kept_ids if rollout.keeps_sets else None
    gates, keys = routes and train.replay_gates, routes and train.replay_indexer
    return SamplingParams(*limits, routes, max_kept_ids, return_gate_weights=gates, return_indexer_topk=keys)


def eval_params(config: Config, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """Return the parameters of evaluation."""
    params = train_params(config, stop_tokens, routes=False)
    return replace(params, temperature=config.eval.temperature, max_kept_ids=None)


def sample_together(engine: Engine, sample: Callable[[], dict[Key, Sample]], work: str) -> dict[Key, Sample]:
    """Return this rank's samples; a collective call.

    sample: draws them, or waits for those under way. work: named in the error if a further rank fails. Errors of the
    engine are raised; RolloutError as in ``require_weights``.
    """
    samples = distributed.run_together(work, sample)
    require_weights(engine)
    return samples


def require_weights(engine: Engine) -> None:
    """RolloutError if a third party has changed the engine's weights on any rank; a collective call."""
    changed = distributed.run_together("the proof of the engine's weights", engine.prove_weights)
    if distributed.largest(int(changed)):
        raise RolloutError(refusal("server_changed"))


class BackgroundSampling:
    """Samples while the trainer's thread trains. Starts at once. ``result`` raises the errors of ``sample``.

    If ``on_finish`` raises, for example a request to stop, every further ``result`` raises the error again.
    """

    def __init__(self, sample: Callable[[Advance], dict[Key, Sample]]) -> None:
        """``sample(on_finish)`` must make no collective call: collective calls belong to the trainer's thread."""
        self._num_finished = 0
        self._refusal: BaseException | None = None
        self._future: Future[dict[Key, Sample]] = Future()
        # A daemon thread: a trainer ending with an error does not wait for unneeded responses.
        threading.Thread(target=self._run, args=(sample,), name="sampling", daemon=True).start()

    def result(self, on_finish: Advance | None = None) -> dict[Key, Sample]:
        """Wait for the result. ``on_finish`` gets the number of complete responses, then that of new ones."""
        told, is_done = 0, False
        while not is_done and self._refusal is None:
            is_done, finished = bool(wait([self._future], timeout=_LOOK_S).done), self._num_finished
            try:
                if on_finish is not None:
                    on_finish(finished - told)
            except BaseException as error:
                self._refusal = error
            told = finished
        if self._refusal is not None:
            raise self._refusal
        return self._future.result()

    def _run(self, sample: Callable[[Advance], dict[Key, Sample]]) -> None:
        try:
            self._future.set_result(sample(self._count))
        except BaseException as error:
            self._future.set_exception(error)

    def _count(self, number: int) -> None:
        self._num_finished += number


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """Return the seed of a response of a run, independent of the drawing rank."""
    return int(np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)[0])
