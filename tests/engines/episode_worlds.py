"""What tests of episodes share: a tokenizer that merges, environments by script, and the check of a whole sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from rollout_oracle import Oracle
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.engines.player import EpisodeLimits, EpisodeResult, Player
from megarl.engines.protocol import Engine, SamplingParams, Session
from megarl.engines.tools.protocol import Environment, Episode, ModelTurn, Observation

LETTERS, DIGITS = "abcdefghij", "0123456789"
Answer = Callable[[ModelTurn], Awaitable[Observation]]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """For the tiny models' 32 ids: <pad>, <eos>, letters, digits, and one token for each letter followed by b."""
    vocabulary = {"<pad>": 0, "<eos>": 1}
    for text in [*LETTERS, *DIGITS, *(letter + "b" for letter in LETTERS)]:
        vocabulary[text] = len(vocabulary)
    core = Tokenizer(BPE(vocabulary, [(letter, "b") for letter in LETTERS]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


@dataclass
class Script:
    """An environment whose episodes answer by a function; it keeps what happened."""

    answer: Answer
    prompts: list[tuple[str, int]] = field(default_factory=list)
    turns: list[ModelTurn] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    """How often each episode was closed, in the order of their beginning."""
    now: int = 0
    most: int = 0
    """Steps at a time."""

    def begin(self, prompt: str, seed: int) -> Episode:
        self.prompts.append((prompt, seed))
        self.closed.append(0)
        return _ScriptEpisode(self, len(self.closed) - 1)


@dataclass
class _ScriptEpisode:
    script: Script
    index: int

    async def step(self, turn: ModelTurn) -> Observation:
        assert not self.script.closed[self.index]
        self.script.turns.append(turn)
        self.script.now += 1
        self.script.most = max(self.script.most, self.script.now)
        try:
            return await self.script.answer(turn)
        finally:
            self.script.now -= 1

    async def close(self) -> None:
        self.script.closed[self.index] += 1


def says(*texts: str, reward: float | None = None) -> Script:
    """Answers turn i with texts[i], and ends with the turn after the last one."""

    async def answer(turn: ModelTurn) -> Observation:
        done = turn.index >= len(texts)
        return Observation("ab" if done else texts[turn.index], done, reward)

    return Script(answer)


async def for_ever(_: ModelTurn) -> Observation:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def player_of(environment: Environment, limits: EpisodeLimits, concurrency: int = 4) -> Player:
    """A player of episodes, which nobody judges."""
    return Player(merging_tokenizer(), cast(Judge, None), limits, environment, concurrency)


def play_all(
    engine: Engine,
    requests: Sequence[SampleRequest],
    environments: Environment | Sequence[Environment],
    limits: EpisodeLimits | Sequence[EpisodeLimits],
    params: SamplingParams,
) -> list[EpisodeResult | None]:
    """The episodes of all requests in one session; None where one was cancelled."""
    found: list[EpisodeResult | None] = [None] * len(requests)

    def begin(session: Session) -> None:
        async def one(i: int) -> None:
            environment = environments[i] if isinstance(environments, Sequence) else environments
            bounds = limits[i] if isinstance(limits, Sequence) else limits
            found[i] = await player_of(environment, bounds).play_episode(session, requests[i], f"prompt {i}")

        for i in range(len(requests)):
            session.start(one(i))

    engine.converse(begin, params)
    return found


def check_columns(played: EpisodeResult, request: SampleRequest, last_row: bool) -> None:
    """Every column has an entry for every token; what the model did not generate is masked, with log-probability 0."""
    whole = played.rollout
    size = whole.num_tokens
    assert (whole.group, whole.sample) == (request.group, request.sample)
    assert np.array_equal(whole.tokens[: len(request.prompt_tokens)], request.prompt_tokens)
    assert whole.tokens.dtype == np.int32
    for column in (whole.loss_mask, whole.rollout_logprobs, whole.weight_versions, whole.routed_mask):
        assert len(column) == size
    assert whole.routed_mask.tolist() == [True] * (size - 1) + [last_row]
    assert not whole.rollout_logprobs[~whole.loss_mask].any()
    assert (whole.rollout_logprobs[whole.loss_mask] < 0).all()
    assert whole.rollout_logprobs.dtype == np.float32
    assert len(played.turn_rewards) == len(played.turn_ends)
    assert whole.loss_mask[list(played.turn_ends)].all()
    assert played.turn_ends[-1] == size - 1  # no observation at the end: nobody read it
    assert list(played.turn_ends) == sorted(set(played.turn_ends))


def check_teacher_forced(played: EpisodeResult, oracle: Oracle, close: float, same_order: bool) -> None:
    """One pass over the whole sequence finds the same log-probabilities and routes."""
    whole = played.rollout
    logprobs = oracle.logits(whole.tokens)[:-1].log_softmax(-1).numpy()
    expected = logprobs[np.arange(whole.num_tokens - 1), whole.tokens[1:]]
    before_ties = np.arange(whole.num_tokens) < oracle.clear(whole.tokens)
    generated = whole.loss_mask[1:] & before_ties[:-1]
    np.testing.assert_allclose(whole.rollout_logprobs[1:][generated], expected[generated], atol=close, rtol=0)
    rows, found = oracle.routes(whole.tokens), whole.routed_experts.astype(int)
    if not same_order:
        rows, found = np.sort(rows, -1), np.sort(found, -1)
    chosen = np.logical_and(whole.routed_mask, before_ties)
    assert np.array_equal(found[chosen], rows[chosen])


def check_joined(
    engine: Engine,
    requests: Sequence[SampleRequest],
    oracle: Oracle,
    params: SamplingParams,
    limits: EpisodeLimits,
    close: float,
    is_local: bool,
) -> list[Rollout]:
    """Tokens, log-probabilities and routes of all turns, with observations that would merge with what precedes."""
    script, tokenizer, merged, joined = says("b0", "bb7", "b"), merging_tokenizer(), 0, []
    for request, played in zip(requests, play_all(engine, requests, script, limits, params), strict=True):
        assert played.failure is None
        check_columns(played, request, last_row=is_local)
        check_teacher_forced(played, oracle, close, same_order=is_local)
        whole = played.rollout
        response = tokenizer.decode(whole.response_tokens, skip_special_tokens=False)
        again = tokenizer(response, add_special_tokens=False)["input_ids"]
        merged += again != whole.response_tokens.tolist()
        joined.append(whole)
    assert merged > len(requests) / 4  # else nothing here would see a sequence that is made from text again
    assert set(script.closed) == {1}
    return joined
