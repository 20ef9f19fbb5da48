"""Agents unaware of megarl: any program that speaks OpenAI's chat completions plays an episode.

    messages -> text of the chat template -> longest recorded text that it begins with -> recorded tokens + new tokens

Sampled tokens stand for their text: a request is tokenized only behind the longest sequence whose text begins the text
of the request. Whole texts are compared, so that routes and log-probabilities stay with tokens and context. A request
whose text begins with no recorded sequence starts a new sequence, of context alone.

The result of the episode is the sequence of the last request that was answered. Tokens of other sequences are dropped.

The endpoint listens on the loopback address while a session runs; the key of a request names its episode. An answer is
sampled whole, so that a stream has the answer in one piece.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
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
from megarl.errors import DataError, describe, refusal, refuse_if, reworded
from megarl.files.foreign_json import parse_json
from megarl.files.texts import read_table
from megarl.routes.turns import cut

MOST_BYTES = 32 << 20
"""Of a request."""
CLOSE_S = 1.0
"""Wait for open connections at the end of a session."""
Json = dict[str, Any]
_VALUES: Json = read_table(__file__)


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
    _num_requests: int = 0
    _num_sampling: int = 0
    _ends_at: float | None = None
    """The deadline of the episode."""
    _last: int = -1
    """The request of the result."""
    _sequences: dict[str, EpisodeResult] = field(default_factory=dict)
    """By text."""
    _texts: dict[str | tuple[int, str], str] = field(default_factory=dict)
    """Name of an answer, and (its place in the conversation, name) -> the text that was sampled, without end token."""

    def answer(self, body: Json) -> Coroutine[Any, Any, Json]:
        """Read a request; return the coroutine that samples the answer.

        DataError for a request that cannot be served. The coroutine raises errors of the engine.
        """
        limits, index = self.player.limits, self._num_requests
        kinds = (ArithmeticError, AttributeError, EpisodeError, LookupError, TypeError, ValueError)
        with reworded(kinds, DataError, "the request cannot be read: ", tell=describe):
            for key, values in _VALUES.items():
                if body.get(key) not in (None, *values):
                    raise DataError(f"{key}: found {body[key]!r:.80}, expected one of {values}, or no {key}")
            tools = None if body.get("tool_choice") == "none" else body.get("tools")
            text = self.chat.render_agent([self._restore(*placed) for placed in enumerate(body["messages"])], tools)
            start = max(filter(text.startswith, self._sequences), key=len, default="")
            tokens = encode_text(self.player.tokenizer, text[len(start) :], limits.vocabulary)
            stop, max_tokens = body.get("stop") or [], body.get("max_completion_tokens") or body.get("max_tokens")
            body["stop"] = [stop] if isinstance(stop, str) else [*map(str, filter(None, stop))]
            longest = min(map(int, filter(None, (limits.turn_tokens, max_tokens, limits.response_tokens))))
            refuse_if(not text or longest < 1, DataError, "empty_request")
        if (earlier := self._sequences.get(start, EpisodeResult())).rollout is not None:
            tokens = np.concatenate([earlier.rollout.tokens, tokens])
        room = limits.tokens_left(len(tokens), 0)
        self.is_full = room < 1 or index == limits.turns
        if self.is_full:
            bounds = f"at most {len(tokens) + room - 1} in {limits.turns} requests"
            raise NoRoomError(f"found {len(tokens)} tokens in request {index + 1}, expected {bounds}")
        self._num_requests += 1
        request = replace(self.request, prompt_tokens=tokens, max_response_tokens=min(room, longest))
        return self._sample(body, index, text, request, earlier)

    async def _sample(self, body: Json, index: int, text: str, request: SampleRequest, earlier: EpisodeResult) -> Json:
        """Sample the turn after the request's tokens, whose text is ``text``, up to the first stop text."""
        limits, decode, start = self.player.limits, self._decode, len(request.prompt_tokens)
        self._num_sampling += 1
        self._limit(self._ends_at)
        whole, now = await sample_turn(self.session, request, index, earlier.rollout), asyncio.get_running_loop().time()
        self._num_sampling -= 1
        self._ends_at = self._ends_at or now + limits.episode_s
        self._limit(self._ends_at if self._num_sampling else min(self._ends_at, now + limits.step_s))
        written = decode(whole.tokens[start:])
        if ends := [written.find(stop) + len(stop) for stop in body["stop"] if stop in written]:
            last = step_tokens(self.player.tokenizer, whole.tokens[start:], [min(ends)], special_tokens=True)
            whole = cut(whole, start + int(last[0]) + 1)
        generated, turn_ends = whole.tokens[start:], [*earlier.turn_ends, whole.num_tokens - 1]
        self._sequences[text + decode(generated)] = EpisodeResult(whole, turn_ends)
        result, is_whole = self.result, whole.finish_reason == "stop"
        result.num_dropped += len(generated)
        if index > self._last:
            self._last, result.rollout, result.turn_ends = index, whole, turn_ends
            result.turn_rewards = [None] * len(turn_ends)
        content = decode(generated, True)
        content = content[: min((content.find(stop) for stop in body["stop"] if stop in content), default=None)]
        calls = Hermes().calls(content) if body.get("tools") and is_whole else []
        called = [] if any(call.error for call in calls) else [[call.tool, call.arguments] for call in calls]
        content = Hermes.remove_calls(content) if called else content
        # The template writes the end token.
        raw = decode(generated[: -1 if is_whole and generated[-1] in self.player.tokenizer.all_special_ids else None])
        self._texts |= dict.fromkeys([name := _name(content, called), (len(body["messages"]), name)], raw)
        parsed = enumerate({"name": name, "arguments": json.dumps(value)} for name, value in called)
        tools = [{"id": f"call_{index}_{i}", "index": i, "type": "function", "function": f} for i, f in parsed]
        message = {"role": "assistant", "content": content} | ({"tool_calls": tools} if tools else {})
        pieces = zip((decode([token]) for token in generated), whole.rollout_logprobs[start:].tolist(), strict=True)
        columns = [{"token": t, "logprob": p, "bytes": [*t.encode()], "top_logprobs": []} for t, p in pieces]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tools else whole.finish_reason}
        choice["logprobs"] = {"content": columns} if body.get("logprobs") else None
        usage = {"prompt_tokens": start, "completion_tokens": len(generated), "total_tokens": whole.num_tokens}
        about = {"id": f"chatcmpl-{index}", "object": "chat.completion", "created": 0, "model": str(body.get("model"))}
        return about | {"choices": [choice], "usage": usage}

    def _limit(self, when: float | None) -> None:
        if not self.deadline.expired():
            self.deadline.reschedule(when)

    def _restore(self, place: int, message: Json) -> Json:
        """Return a request's message as templates take it, with the text that was sampled for the message, if any."""
        role, content, calls = message["role"], message.get("content") or "", message.get("tool_calls") or ()
        content = content if isinstance(content, str) else "".join(piece["text"] for piece in content)
        called = [[call["function"]["name"], json.loads(call["function"]["arguments"])] for call in calls]
        if role == "assistant" and (name := _name(content, called)) in self._texts:
            return {"role": role, "content": self._texts.get((place, name), self._texts[name])}
        tools = [{"type": "function", "function": {"name": name, "arguments": value}} for name, value in called]
        role = "system" if role == "developer" else role
        return message | {"role": role, "content": content} | ({"tool_calls": tools} if tools else {})

    def _decode(self, tokens: Sequence[int] | np.ndarray, skip: bool = False) -> str:
        decode: Any = self.player.tokenizer.decode
        return str(decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _name(content: str, called: list[list[Any]]) -> str:
    """Return equal texts for answers that differ in outer white space or in the form of their JSON."""
    return json.dumps([content.strip(), called], sort_keys=True)


def _stream(body: Json, answer: Json) -> bytes:
    """Return an answer as events: the whole message, the reason of its end, and the usage if it is asked for."""
    (choice,), chunk = answer["choices"], answer | {"object": "chat.completion.chunk", "usage": None}
    whole = choice | {"delta": choice.pop("message"), "finish_reason": None}
    chunks = [chunk | {"choices": [piece]} for piece in (whole, choice | {"delta": {}, "logprobs": None})]
    if (body.get("stream_options") or {}).get("include_usage"):
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
            raise EpisodeError(refusal("agent_is_late", limits=limits)) from error
        except ExceptionGroup as several:
            if not (episode.is_full and isinstance(several.exceptions[0], EpisodeError)):
                raise several.exceptions[0] from None
        finally:
            del self._episodes[key]
            if result.rollout is not None:
                result.num_dropped -= int(result.rollout.loss_mask.sum())
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
        body: Any = parse_json(await request.read(), "the request", MOST_BYTES)
        episode, tasks = self._episodes[key]
        episode.answers.append(tasks.create_task(episode.answer(body)))
        answer = await episode.answers[-1]
        if not body.get("stream"):
            return web.json_response(answer)
        return web.Response(body=_stream(body, answer), content_type="text/event-stream")
