"""The HTTP server of agents, on the loopback address, and the episode of an agent.

The key names the episode. An answer is sampled whole, so that a stream has the answer in one piece.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from aiohttp import web
from pydantic import ValidationError

from megarl.core.types import SampleRequest
from megarl.data.prompts import ChatTemplate
from megarl.engines.agents.conversation import Conversation, RefusalError
from megarl.engines.agents.messages import ChatRequest, write_stream
from megarl.engines.player import Agent, EpisodeError, EpisodeResult, Player, foreign_code
from megarl.engines.protocol import Session
from megarl.errors import describe

MOST_BYTES = 32 << 20
"""Of a request."""
CLOSE_S = 1.0
"""Wait for open connections at the end of the last episode."""


@dataclass(eq=False)
class Endpoint:
    """A server of an event loop, for all episodes of the loop; runs while there is an episode."""

    _episodes: dict[str, Conversation] = field(default_factory=dict)
    """By key."""
    _runner: web.AppRunner | None = None
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def serve(self, episode: Conversation) -> AsyncIterator[tuple[str, str]]:
        """Yield base URL and key of an episode. The end drops its open requests."""
        key = f"sk-{secrets.token_hex(16)}"
        self._episodes[key] = episode
        try:
            async with self._starting:
                runner = self._runner = self._runner or await self._start()
            yield "http://{}:{}/v1".format(*runner.addresses[0]), key
        finally:
            del self._episodes[key]
            for answer in episode.answers.values():
                answer.cancel()
            await asyncio.gather(*episode.answers.values(), return_exceptions=True)
            async with self._starting:
                if not self._episodes and self._runner is not None:
                    runner, self._runner = self._runner, None
                    await runner.cleanup()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _handle(self, request: web.Request) -> web.Response:
        """Answer a request; errors have OpenAI's form."""
        code, kind = None, "invalid_request_error"
        try:
            return await self._answer(request)
        except web.HTTPException as error:
            status, message = error.status, error.reason
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            status, message = 400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except RefusalError as error:
            status, message, code = error.status, str(error), error.code
        except Exception as error:
            status, message, kind = 500, f"the episode ends: {describe(error)}", "server_error"
        told = {"message": message, "type": kind, "param": None, "code": code}
        return web.json_response({"error": told}, status=status)

    async def _answer(self, request: web.Request) -> web.Response:
        """Answer a request; a repeated request gets the first answer."""
        episode = self._episodes.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        if episode is None:
            raise RefusalError("the key names no episode, expected the key that the agent got", "invalid_api_key", 401)
        if request.path == "/v1/models":
            model = {"id": "policy", "object": "model", "created": 0, "owned_by": "megarl"}
            return web.json_response({"object": "list", "data": [model]})
        if (request.method, request.path) != ("POST", "/v1/chat/completions"):
            raise RefusalError(f"found {request.method} {request.path}, expected POST /v1/chat/completions", status=404)
        body, headers = await request.read(), request.headers
        asked, name = ChatRequest.model_validate_json(body, strict=True), headers.get("Idempotency-Key", body)
        is_repeat = name != body or headers.get("X-Stainless-Retry-Count", "0") != "0"
        if name not in episode.answers or not is_repeat:
            episode.answers[name] = asyncio.create_task(episode.reply(asked))
        try:
            answer = await asyncio.shield(episode.answers[name])
        except RefusalError:
            raise
        except Exception as error:
            if not episode.failure.done():
                episode.failure.set_exception(error)
            raise
        if not asked.stream:
            return web.json_response(answer)
        return web.Response(body=write_stream(asked, answer), content_type="text/event-stream")


@dataclass(eq=False)
class ForeignAgent(Agent):
    """Plays episodes with a coroutine of the user, which speaks OpenAI's chat completions."""

    agent: Callable[..., Awaitable[object]]
    """Called with ``options`` and prompt, base_url, api_key, seed."""
    options: Mapping[str, Any]
    chat: ChatTemplate
    PARAMETERS: ClassVar = ("prompt", "base_url", "api_key", "seed")
    _endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = field(default_factory=WeakKeyDictionary)

    async def play(
        self, player: Player, result: EpisodeResult, session: Session, request: SampleRequest, prompt: str,
        clock: asyncio.Timeout,
    ) -> None:  # fmt: skip
        """See ``Agent.play``; also EpisodeError if the agent fails, waits longer than ``step_s``, or asks for no turn.

        An agent may fail once a request found no room: the episode then ends at its length, and is judged.
        """
        loop, step_s = asyncio.get_running_loop(), player.limits.step_s
        pause, failure = asyncio.timeout(step_s), loop.create_future()
        episode = Conversation(player, session, request, result, self.chat, clock, pause, failure)
        async with self._endpoints.setdefault(loop, Endpoint()).serve(episode) as (url, key):
            agent = asyncio.create_task(self._run(prompt=prompt, base_url=url, api_key=key, seed=request.seed))
            try:
                async with pause:
                    await asyncio.wait({agent, failure}, return_when=asyncio.FIRST_COMPLETED)
                if failure.done():
                    failure.result()
            except TimeoutError as error:
                raise EpisodeError(f"the agent took more than {step_s:g} s without a request") from error
            finally:
                failure.cancel()
                agent.cancel()
                await asyncio.wait({agent}, timeout=step_s)
                if result.rollout is not None:
                    kept = int(np.count_nonzero(result.rollout.loss_mask))
                    result.num_dropped = episode.num_generated - kept
        if result.rollout is not None and episode.is_full:
            result.rollout = replace(result.rollout, finish_reason="length")
        else:
            agent.result()
        if result.rollout is None:
            raise EpisodeError("the agent asked for no turn")

    async def _run(self, **facts: Any) -> None:
        with foreign_code("the agent failed"):
            await self.agent(**self.options, **facts)


async def program(command: Sequence[str], prompt: str, base_url: str, api_key: str, seed: int) -> None:
    """Run a program as an agent; RuntimeError, with the end of its errors, for an exit code above 0.

    The program reads the prompt as its input, and OPENAI_BASE_URL, OPENAI_API_KEY and MEGARL_SEED. All processes of its
    group end with the call.
    """
    proxies = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
    facts = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "MEGARL_SEED": str(seed), "NO_PROXY": proxies}
    pipes = dict.fromkeys(("stdin", "stderr"), asyncio.subprocess.PIPE) | {"stdout": asyncio.subprocess.DEVNULL}
    process = await asyncio.create_subprocess_exec(
        *command, **pipes, env={**os.environ, **facts}, start_new_session=True
    )
    assert process.stdin and process.stderr  # noqa: PT018
    try:
        process.stdin.write(prompt.encode())
        process.stdin.close()
        told = b""
        while part := await process.stderr.read(1 << 16):
            told = (told + part)[-500:]
        if code := await process.wait():
            raise RuntimeError(f"exit code {code}: {told.decode(errors='replace')}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
