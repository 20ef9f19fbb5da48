"""Servers in a thread: one answers ``/generate`` as its subclass says; one as SGLang, with pauses and retractions."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from aiohttp import web


class GenerateServer:
    version = 0

    def __init__(self) -> None:
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(600.0)

    async def generate(self, body: Any) -> web.Response:
        """Answer a request; cancelled when its sender goes."""
        raise NotImplementedError

    async def abort(self, body: Any) -> web.Response:
        """Answer ``/abort_request``."""
        return web.Response()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        async def generate(request: web.Request) -> web.Response:
            return await self.generate(await request.json())

        async def abort(request: web.Request) -> web.Response:
            return await self.abort(await request.json())

        async def model_info(request: web.Request) -> web.Response:
            return web.json_response({"weight_version": str(self.version)})

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_post("/abort_request", abort)
        app.router.add_get("/health", health)
        app.router.add_get("/model_info", model_info)
        runner = web.AppRunner(app, handler_cancellation=True)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._end(runner))

    async def _end(self, runner: web.AppRunner) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()


class SamplingServer(GenerateServer):
    """Draws tokens as SGLang 0.5.23 does, and then waits until a request is to end (``/abort_request``).

    A request that is to end gets one more token; one in the queue has none, and neither counts nor routes.
    """

    def __init__(self, drawn: int, places: int = 9, last: int = 5, retractions: int = 0, **shape: int) -> None:
        """drawn: tokens until a request waits; last: the token that is drawn after the call to end; retractions: of
        each request; shape: ``layers``, ``experts`` and ``top_k``, all of them MoE layers."""
        self.drawn, self.last, self.retractions, self.shape = drawn, last, retractions, shape
        self.ends: dict[str, asyncio.Event] = {}
        self.running, self.asked, self.deaf = 0, 0, 0
        """deaf: how many calls to end it ignores, as those that overtake their request."""
        self._places = asyncio.Semaphore(places)
        super().__init__()

    async def generate(self, body: Any) -> web.Response:
        self.asked += 1
        end = self.ends[body["rid"]] = asyncio.Event()
        if self._places.locked():
            await end.wait()
            meta = {"id": body["rid"], "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
            meta |= {"weight_version": str(self.version), "completion_tokens": 0, "output_token_logprobs": []}
            return web.json_response({"output_ids": [], "prompt_token_ids": body["input_ids"], "meta_info": meta})
        async with self._places:
            self.running += 1
            output, limit = [7] * self.drawn, body["sampling_params"]["max_new_tokens"]
            reason: dict[str, Any] = {"type": "length", "length": limit}
            if self.drawn < limit:
                await end.wait()
                output, reason = [*output, self.last], {"type": "abort", "message": "Aborted", "status_code": None}
            self.running -= 1
        return web.json_response(self._answer(body, output[:limit], reason))

    async def abort(self, body: Any) -> web.Response:
        self.deaf -= 1
        if self.deaf < 0 and body["rid"] in self.ends:
            self.ends[body["rid"]].set()
        return web.Response()

    def _answer(self, body: Any, output: list[int], reason: dict[str, Any]) -> dict[str, Any]:
        prompt, shape = body["input_ids"], self.shape
        rows = len(prompt) + len(output) - 1 - body["routed_experts_start_len"]
        chosen = np.random.default_rng(0).random((rows, shape["layers"], shape["experts"])).argsort(2)
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output),
            "weight_version": str(self.version),
            "num_retractions": self.retractions,
            "output_token_logprobs": [[-1.0, token, None] for token in output],
            "routed_experts": base64.b64encode(chosen[..., : shape["top_k"]].astype("<i4").tobytes()).decode(),
        }
        return {"output_ids": output, "prompt_token_ids": prompt, "meta_info": meta}


Server = TypeVar("Server", bound=GenerateServer)


@contextmanager
def serving(*made: Server) -> Iterator[tuple[Server, ...]]:
    try:
        yield made
    finally:
        for server in made:
            server.close()
