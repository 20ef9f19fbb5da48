"""Agents that know nothing of megarl: any program that speaks OpenAI's chat completions plays an episode.

    messages -> text of the chat template -> longest recorded text that it begins with -> recorded tokens + new tokens

Sampled tokens stand for their text: a request is tokenized only behind the longest sequence whose text begins the text
of the request. Whole texts are compared, so that routes and log-probabilities stay with their tokens and with all that
precedes. A request whose text begins with no recorded sequence starts a new sequence, of context alone.

The result of the episode is the sequence of the last request that was answered. Tokens of other sequences are dropped.

The endpoint listens on the loopback address while a session runs; the key of a request names its episode. An answer is
sampled whole, so that a stream has the answer in one piece.
"""

import asyncio
import json
import secrets
import time
import tomllib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from aiohttp import web

from megarl.core.types import SampleRequest
from megarl.data.prompts import ChatTemplate
from megarl.data.tokenizer import step_tokens
from megarl.engines.player import Agent, EpisodeError, EpisodeResult, Player, encode_text, foreign_code, sample_turn
from megarl.engines.protocol import Session
from megarl.engines.tools.environment import Hermes
from megarl.errors import DataError, describe
from megarl.files.foreign_json import parse_json
from megarl.routes.turns import cut

MOST_BYTES = 32 << 20
"""Of a request."""
CLOSE_S = 1.0
"""Wait for open connections at the end of a session."""
Json = dict[str, Any]
_VALUES: Json = tomllib.loads(Path(__file__).with_name("agents.toml").read_text("utf-8"))


class NoRoomError(DataError):
    """A request is too long, or comes after the last turn."""

    code = "context_length_exceeded"


@dataclass(eq=False)
class Conversation:
    """The requests of an agent in an episode, and the sequences of the answers."""

    player: Player
    session: Session
    request: SampleRequest
    result: EpisodeResult
    chat: ChatTemplate
    deadline: asyncio.Timeout
    """Of the agent's next request, or of the episode; none during the first turn, which may wait in a queue."""
    answers: list[asyncio.Task[Json]] = field(default_factory=list)
    is_full: bool = False
    """Whether the last request found no room: the agent may well give up."""
    num_generated: int = 0
    _num_requests: int = 0
    _num_sampling: int = 0
    _ends_at: float | None = None
    """The deadline of the episode."""
    _last: int = -1
    """The request of the result."""
    _sequences: dict[str, EpisodeResult] = field(default_factory=dict)
    """By text."""
    _texts: dict[str, str] = field(default_factory=dict)
    """Name of an answer -> the text that was sampled, without end token."""

    def answer(self, asked: Json) -> Coroutine[Any, Any, Json]:
        """Read a request; return the coroutine that samples the answer.

        DataError for a request that cannot be served. The coroutine raises errors of the engine.
        """
        for key, values in _VALUES.items():
            if asked.get(key) not in (None, *values):
                raise DataError(f"{key}: found {asked[key]!r:.80}, expected one of {values}, or no {key}")
        limits = self.player.limits
        try:
            tools = None if asked.get("tool_choice") == "none" else asked.get("tools")
            text = self.chat.render_agent([self._restore(message) for message in asked["messages"]], tools)
            before = max(filter(text.startswith, self._sequences), key=len, default="")
            tokens = encode_text(self.player.tokenizer, text[len(before) :], limits.vocabulary)
            stop, most = asked.get("stop") or [], asked.get("max_completion_tokens") or asked.get("max_tokens")
            stops = [stop] if isinstance(stop, str) else [*filter(str.strip, stop)]
            longest = [int(limit) for limit in (limits.turn_tokens, most) if limit is not None]
        except (AttributeError, EpisodeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the request cannot be read: {describe(error)}") from error
        if (earlier := self._sequences.get(before, EpisodeResult())).rollout is not None:
            tokens = np.concatenate([earlier.rollout.tokens, tokens])
        room, index = limits.tokens_left(len(tokens), 0), self._num_requests
        self.is_full = room < 1 or index == limits.turns
        if self.is_full:
            facts = f"found request {index} with {len(tokens)} tokens, expected at most {len(tokens) + room - 1}"
            raise NoRoomError(f"{facts}, and {limits.turns} requests")
        if not len(tokens) or min(room, *longest) < 1:
            raise DataError("found messages without text, or max_tokens below 1, expected at least 1 token")
        self._num_requests += 1
        request = replace(self.request, prompt_tokens=tokens, max_response_tokens=min(room, *longest))
        return self._sample(asked, index, text, request, earlier, stops)

    async def _sample(
        self, asked: Json, index: int, text: str, request: SampleRequest, earlier: EpisodeResult, stops: list[str]
    ) -> Json:
        """Sample the turn after the request's tokens, whose text is ``text``, up to the first stop text."""
        limits, decode, start = self.player.limits, self._decode, len(request.prompt_tokens)
        self._num_sampling += 1
        self.deadline.reschedule(self._ends_at)
        whole, now = await sample_turn(self.session, request, index, earlier.rollout), asyncio.get_running_loop().time()
        self._num_sampling -= 1
        self._ends_at = self._ends_at or now + limits.episode_s
        self.deadline.reschedule(self._ends_at if self._num_sampling else min(self._ends_at, now + limits.step_s))
        written = decode(whole.tokens[start:])
        if ends := [written.find(stop) + len(stop) for stop in stops if stop in written]:
            last = step_tokens(self.player.tokenizer, whole.tokens[start:], [min(ends)], special_tokens=True)
            whole = cut(whole, start + int(last[0]) + 1)
        generated, turn_ends = whole.tokens[start:], [*earlier.turn_ends, whole.num_tokens - 1]
        self._sequences[text + decode(generated)] = EpisodeResult(whole, turn_ends)
        self.num_generated += len(generated)
        if index > self._last:
            self._last, result = index, self.result
            result.rollout, result.turn_ends, result.turn_rewards = whole, turn_ends, [None] * len(turn_ends)
        content, ends = decode(generated, True), whole.finish_reason == "stop"
        content = content[: min((content.find(stop) for stop in stops if stop in content), default=None)]
        calls = Hermes().calls(content) if asked.get("tools") and ends else []
        called = (
            [] if any(call.error for call in calls) else [{"name": c.tool, "arguments": c.arguments} for c in calls]
        )
        content = Hermes.remove_calls(content) if called else content
        # The template writes the end token.
        num_ends = int(ends and generated[-1] in self.player.tokenizer.all_special_ids)
        self._texts[_name(content, called)] = decode(generated[: len(generated) - num_ends])
        pieces = zip((decode([token]) for token in generated), whole.rollout_logprobs[start:].tolist(), strict=True)
        columns = [{"token": t, "logprob": p, "bytes": [*t.encode()], "top_logprobs": []} for t, p in pieces]
        return _write(asked, index, content, called, whole.finish_reason, columns, start)

    def _restore(self, message: Json) -> Json:
        """Return the message as templates take it, with the text that was sampled for the message, if any."""
        role, content, calls = message["role"], message.get("content") or "", message.get("tool_calls") or ()
        content = content if isinstance(content, str) else "".join(part["text"] for part in content)
        functions = [call["function"] for call in calls]
        called = [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in functions]
        if role == "assistant" and (text := self._texts.get(_name(content, called))) is not None:
            return {"role": role, "content": text}
        made = {"tool_calls": [{"type": "function", "function": call} for call in called]} if called else {}
        return message | made | {"role": "system" if role == "developer" else role, "content": content}

    def _decode(self, tokens: Sequence[int] | np.ndarray, skip: bool = False) -> str:
        decode: Any = self.player.tokenizer.decode
        return str(decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _name(content: str, called: list[Json]) -> str:
    """Return equal texts for answers that differ in outer white space or in the form of their JSON."""
    return json.dumps([content.strip(), called], sort_keys=True)


def _write(
    asked: Json, index: int, content: str, called: list[Json], reason: str, columns: list[Json], start: int
) -> Json:
    """Return a turn as a chat completion; ``start`` counts the tokens before it."""
    functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in called]
    calls = [
        {"id": f"call_{index}_{i}", "type": "function", "function": f, "index": i} for i, f in enumerate(functions)
    ]
    message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else reason}
    logprobs = {"content": columns} if asked.get("logprobs") else None
    counts = {"prompt_tokens": start, "completion_tokens": len(columns), "total_tokens": start + len(columns)}
    about = {"id": f"chatcmpl-{index}", "object": "chat.completion", "created": int(time.time())}
    about |= {"model": asked.get("model", "policy"), "usage": counts}
    return about | {"choices": [choice | {"logprobs": logprobs}]}


def _stream(asked: Json, answer: Json) -> bytes:
    """Return an answer as events: the whole message, the reason of its end, and the usage if it is asked for."""
    (choice,), chunk = answer["choices"], answer | {"object": "chat.completion.chunk", "usage": None}
    whole = choice | {"delta": choice.pop("message"), "finish_reason": None}
    chunks = [chunk | {"choices": [part]} for part in (whole, choice | {"delta": {}, "logprobs": None})]
    if (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append(answer | {"object": "chat.completion.chunk", "choices": []})
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"]).encode()


@dataclass(eq=False)
class ForeignAgent(Agent):
    """Plays episodes with a coroutine of the user, which speaks OpenAI's chat completions."""

    agent: Callable[..., Awaitable[object]]
    """Called with ``options`` and prompt, base_url, api_key, seed."""
    options: Json
    chat: ChatTemplate
    _servers: WeakKeyDictionary[Session, asyncio.Task[str]] = field(default_factory=WeakKeyDictionary)
    """The base URL of a session's server."""
    _episodes: dict[str, tuple[Conversation, asyncio.TaskGroup]] = field(default_factory=dict)
    """By key: the requests, and the tasks of their answers. An error of the engine ends the tasks and the agent."""

    async def play(
        self, player: Player, session: Session, request: SampleRequest, prompt: str, result: EpisodeResult
    ) -> None:
        """See ``Agent.play``; also EpisodeError if the agent fails, is late, or asks for no turn.

        An agent may fail once a request found no room: the episode then ends at its length, and is judged.
        """
        if session not in self._servers:
            self._servers[session] = asyncio.create_task(self._start(session))
        url, key, limits = await asyncio.shield(self._servers[session]), f"sk-{secrets.token_hex(16)}", player.limits
        deadline, tasks = asyncio.timeout(limits.step_s), asyncio.TaskGroup()
        episode = Conversation(player, session, request, result, self.chat, deadline)
        try:
            async with deadline, tasks:
                self._episodes[key] = episode, tasks
                with foreign_code("the agent failed"):
                    await self.agent(**self.options, prompt=prompt, base_url=url, api_key=key, seed=request.seed)
                for answer in episode.answers:
                    answer.cancel()
        except TimeoutError as error:
            told = f"the agent took more than {limits.step_s:g} s for a request, or {limits.episode_s:g} s in all"
            raise EpisodeError(told) from error
        except ExceptionGroup as several:
            if not (episode.is_full and isinstance(several.exceptions[0], EpisodeError)):
                raise several.exceptions[0] from None
        finally:
            del self._episodes[key]
            if result.rollout is not None:
                result.num_dropped = episode.num_generated - int(result.rollout.loss_mask.sum())
        if result.rollout is None:
            raise EpisodeError("the agent asked for no turn")
        if episode.is_full:
            result.rollout = replace(result.rollout, finish_reason="length")

    async def _start(self, session: Session) -> str:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        session.closing.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return "http://{}:{}/v1".format(*runner.addresses[0])

    async def _handle(self, request: web.Request) -> web.Response:
        """Answer a request; errors have OpenAI's form."""
        try:
            return await self._answer(request)
        except (DataError, web.HTTPException) as error:
            status, text, code = getattr(error, "status", 400), str(error), getattr(error, "code", None)
        except Exception as error:
            status, text, code = 500, f"the episode ends: {describe(error)}", None
        kind = "server_error" if status == 500 else "invalid_request_error"
        return web.json_response({"error": {"message": text, "type": kind, "param": None, "code": code}}, status=status)

    async def _answer(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self._episodes:
            raise web.HTTPUnauthorized(reason="the key names no episode, expected the key that the agent got")
        if request.path == "/v1/models":
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megarl"}
            return web.json_response({"object": "list", "data": [model]})
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            raise web.HTTPNotFound(reason=f"found {request.method} {request.path}, expected POST /v1/chat/completions")
        (episode, tasks), asked = self._episodes[key], parse_json(await request.read(), "the request", MOST_BYTES)
        if not isinstance(asked, dict):
            raise DataError(f"the request is a {type(asked).__name__}, expected a JSON object")
        episode.answers.append(tasks.create_task(episode.answer(asked)))
        answer = await episode.answers[-1]
        if not asked.get("stream"):
            return web.json_response(answer)
        return web.Response(body=_stream(asked, answer), content_type="text/event-stream")
