"""The requests of an agent as sequences of one episode.

    messages -> text of the chat template -> longest recorded text that it begins with -> recorded tokens + new tokens

Sampled tokens stand for their text: a request is tokenized only behind the longest sequence whose text begins the text
of the request. Whole texts are compared, so that routes and log-probabilities stay with their tokens and with all that
precedes. A request whose text begins with no recorded sequence starts a new sequence, of context alone.

The result of the episode is the sequence of the last request that was answered. Tokens of other sequences are dropped.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.core.types import Rollout, SampleRequest
from megarl.data.prompts import ChatTemplate
from megarl.data.tokenizer import step_tokens
from megarl.engines.agents.messages import ChatRequest, name_answer, write_answer
from megarl.engines.player import EpisodeError, EpisodeResult, Player, encode_observation, sample_turn
from megarl.engines.protocol import Session
from megarl.engines.tools.environment import Hermes
from megarl.errors import DataError
from megarl.routes.turns import cut


class RefusalError(Exception):
    """A request gets no answer; the episode goes on."""

    def __init__(self, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(eq=False)
class Conversation:
    """The requests of an agent in an episode, and the sequences of the answers."""

    player: Player
    session: Session
    request: SampleRequest
    result: EpisodeResult
    chat: ChatTemplate
    clock: asyncio.Timeout
    """The deadline of the episode; set at the end of the first turn."""
    pause: asyncio.Timeout
    """The deadline of the agent's next request; none while a turn is sampled."""
    failure: asyncio.Future[None]
    """Gets the first error that is no fault of the agent."""
    answers: dict[str | bytes, asyncio.Task[dict[str, Any]]] = field(default_factory=dict)
    """By idempotency key or body of the request."""
    is_full: bool = False
    """Whether the last request found no room: the agent may well give up."""
    num_generated: int = 0
    _num_requests: int = 0
    _num_sampling: int = 0
    _last: int = -1
    """The request of the result."""
    _sequences: dict[str, tuple[Rollout, list[int]]] = field(default_factory=dict)
    """By text: a sequence, and the last token of each turn."""
    _texts: dict[str, str] = field(default_factory=dict)
    """Name of an answer -> the text that was sampled, without end token."""

    async def reply(self, asked: ChatRequest) -> dict[str, Any]:
        """Sample the answer to a request.

        RefusalError without room, and for messages that template or tokenizer cannot read; errors of the engine.
        """
        index, self._num_requests = self._num_requests, self._num_requests + 1
        text, earlier, tokens = self._read(asked)
        before, turn_ends = self._sequences.get(earlier, (None, []))
        whole = await self._sample(index, tokens, before, asked)
        generated, turn_ends = whole.tokens[len(tokens) :], [*turn_ends, whole.num_tokens - 1]
        raw, content = self._decode(generated, False), self._decode(generated, True)
        self._sequences[text + raw] = whole, turn_ends
        self.num_generated += len(generated)
        if index > self._last:
            self._last, result = index, self.result
            result.rollout, result.turn_ends, result.turn_rewards = whole, turn_ends, [None] * len(turn_ends)
        content = content[: min((content.find(stop) for stop in asked.stops if stop in content), default=None)]
        # The template writes the end token.
        has_end = whole.finish_reason == "stop" and generated[-1] in self.player.tokenizer.all_special_ids
        found = Hermes().calls(content) if asked.tools and whole.finish_reason == "stop" else []
        calls = [] if any(call.error for call in found) else [(str(call.tool), call.arguments) for call in found]
        content = Hermes.remove_calls(content) if calls else content
        self._texts[name_answer(content, calls)] = self._decode(generated[:-1], False) if has_end else raw
        pieces = [self._decode(generated[i : i + 1], False) for i in range(len(generated))]
        columns = list(zip(pieces, whole.rollout_logprobs[len(tokens) :].tolist(), strict=True))
        return write_answer(asked, index, content, calls, whole.finish_reason, len(tokens), columns)

    def _read(self, asked: ChatRequest) -> tuple[str, str, np.ndarray]:
        """Return the text of a request, the recorded text that it begins with, and all tokens, int32 [T]."""
        tools = None if asked.tool_choice == "none" else asked.tools
        try:
            text = self.chat.render_agent([self._restore(message.for_template()) for message in asked.messages], tools)
            earlier = max(filter(text.startswith, self._sequences), key=len, default="")
            tokens = encode_observation(self.player.tokenizer, text[len(earlier) :], self.player.limits.vocabulary)
        except (DataError, EpisodeError) as error:
            raise RefusalError(f"the messages cannot be tokenized: {error}") from error
        return text, earlier, np.concatenate([self._sequences[earlier][0].tokens, tokens]) if earlier else tokens

    async def _sample(self, index: int, tokens: np.ndarray, earlier: Rollout | None, asked: ChatRequest) -> Rollout:
        """Sample a turn within all limits, and cut the turn behind the first stop text."""
        limits, now = self.player.limits, asyncio.get_running_loop().time
        room = limits.tokens_left(len(tokens), 0)
        self.is_full = room < 1 or not len(tokens) or index >= limits.turns
        if self.is_full:
            facts = f"request {index} has {len(tokens)} tokens, expected 1 to {len(tokens) + room - 1}"
            raise RefusalError(f"{facts}, and {limits.turns} requests at most", "context_length_exceeded")
        self._num_sampling += 1
        self.pause.reschedule(None)
        longest = filter(None, (room, limits.turn_tokens, asked.max_completion_tokens or asked.max_tokens))
        whole = await sample_turn(self.session, self.request, index, tokens, min(longest), earlier)
        self._num_sampling -= 1
        if not self._num_sampling:
            self.pause.reschedule(now() + limits.step_s)
        if self.clock.when() is None:  # the first turn may have waited long in the engine's queue
            self.clock.reschedule(now() + limits.episode_s)
        generated = whole.tokens[len(tokens) :]
        text = self._decode(generated, False)
        if not (ends := [text.find(stop) + len(stop) for stop in asked.stops if stop in text]):
            return whole
        (last,) = step_tokens(self.player.tokenizer, generated, [min(ends)], special_tokens=True)
        return cut(whole, len(tokens) + int(last) + 1)

    def _restore(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with the text that was sampled for the message, if any."""
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        text = self._texts.get(name_answer(message["content"], calls)) if message["role"] == "assistant" else None
        return message if text is None else {"role": "assistant", "content": text}

    def _decode(self, tokens: np.ndarray, skip: bool) -> str:
        decode: Any = self.player.tokenizer.decode
        return str(decode(tokens.tolist(), skip_special_tokens=skip, clean_up_tokenization_spaces=False))
