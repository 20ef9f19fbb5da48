"""A server in a thread that answers ``/generate`` as its subclass says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from aiohttp import web


class GenerateServer:
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

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        async def generate(request: web.Request) -> web.Response:
            return await self.generate(await request.json())

        async def health(request: web.Request) -> web.Response:
            return web.Response()

        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_get("/health", health)
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


Server = TypeVar("Server", bound=GenerateServer)


@contextmanager
def serving(*made: Server) -> Iterator[tuple[Server, ...]]:
    try:
        yield made
    finally:
        for server in made:
            server.close()
