"""Sample and judge one rank's share of the responses to a benchmark, as lines of responses.jsonl."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.core.types import SampleRequest
from megarl.data.benchmarks import HELDOUT, Benchmark
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.rollout.draw import Draw
from megarl.rollout.engine import Engine
from megarl.rollout.player import Sample
from megarl.run.progress import Advance
from megarl.train.environments import make_player, turn_ends
from megarl.train.sampling.assignment import FixedSamples, Key
from megarl.train.sampling.requests import EVALUATE, eval_params, sampling_seed


def draw_lines(
    engine: Engine,
    config: Config,
    benchmark: Benchmark,
    prompts: Sequence[Prompt],
    keys: Sequence[Key],
    tokenizer: PreTrainedTokenizerBase,
    on_finish: Advance | None = None,
) -> list[dict[str, Any]]:
    """Draw the samples ``keys``, (prompt, sample) each, in the environment of the configuration, if it has one.

    Returns a line of responses.jsonl for each, in no particular order. Not a collective call. Errors of a reward or an
    environment are in the lines; errors of the engine are raised.
    """

    def request_of(prompt: int, sample: int) -> tuple[SampleRequest, Prompt]:
        seed = response_seed(config.run.seed, benchmark.name, prompt, sample)
        return SampleRequest(prompts[prompt].tokens, group=prompt, sample=sample, seed=seed), prompts[prompt]

    with Judge(benchmark.reward, workers=config.reward.workers, timeout_s=config.reward.timeout_s) as judge:
        draw = Draw(FixedSamples(keys), request_of, make_player(config, tokenizer, judge))
        engine.converse(draw.begin, eval_params(config, turn_ends(config, tokenizer)), on_finish)
    return [_line(key, sample, tokenizer) for key, sample in draw.samples.items()]


def response_seed(run_seed: int, benchmark: str, prompt: int, sample: int) -> int:
    """Return the seed of one response. It depends on the benchmark's name, not on the other benchmarks of a call.

    For held-out prompts it is the seed of the trainer's evaluation, so that both give the same scores.
    """
    number = 0 if benchmark == HELDOUT else zlib.crc32(benchmark.encode())
    return sampling_seed(run_seed, EVALUATE, number, prompt, sample)


def _line(key: Key, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a line. ``length`` counts the model's tokens; ``response`` includes those of the environment."""
    prompt, number = key
    rollout = sample.rollout
    return {
        "prompt": prompt,
        "sample": number,
        "reward": sample.reward,
        "error": sample.reward_error or sample.episode_error,
        "finish_reason": "abort" if rollout is None else rollout.finish_reason,
        "length": 0 if rollout is None else int(rollout.loss_mask.sum()),
        "turns": sample.turns,
        "response": "" if rollout is None else tokenizer.decode(rollout.response_tokens, skip_special_tokens=True),
    }
