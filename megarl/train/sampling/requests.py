"""What the engine is asked for: prompts, one seed per response, and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.config import Config
from megarl.core.types import SampleRequest
from megarl.data.prompts import Prompt, load_prompts
from megarl.rollout.draw import RequestOf
from megarl.rollout.engine import SamplingParams

TRAIN, EVALUATE, PRESAMPLE, KEEP = 0, 1, 2, 3
"""Purposes of a seed. They differ so that evaluation, for example, never repeats the noise of training."""


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """Return the seed of one response of a run. It does not depend on the rank that draws it."""
    words = np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)
    return int(words[0])


def request_maker(prompts: Sequence[Prompt], run_seed: int, purpose: int, step: int) -> RequestOf:
    """Return the function from (prompt, sample) to the request and its prompt."""

    def request_of(number: int, sample: int) -> tuple[SampleRequest, Prompt]:
        seed = sampling_seed(run_seed, purpose, step, number, sample)
        return SampleRequest(prompts[number].tokens, group=number, sample=sample, seed=seed), prompts[number]

    return request_of


def train_params(config: Config, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """Return the parameters of responses that train; ConfigError at temperature 0."""
    params = SamplingParams(
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=stop_tokens,
    )
    params.require_stochastic()
    return params


def eval_params(config: Config, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """Return the parameters of evaluation."""
    return SamplingParams(
        temperature=config.eval.temperature,
        top_p=config.rollout.top_p,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_ids=stop_tokens,
        return_routed_experts=False,
    )


def load_run_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, source: str, split: str | None, limit: int | None = None
) -> list[Prompt]:
    """Return at most ``limit`` prompts of a source, read as [data] says."""
    data = config.data
    return load_prompts(
        source,
        tokenizer=tokenizer,
        prompt_field=data.prompt_field,
        answer_field=data.answer_field,
        chat_template=data.chat_template,
        max_prompt_tokens=data.max_prompt_tokens,
        split=split,
        limit=limit,
    )
