"""A real HTTP server that answers as SGLang's /classify does, and the faults that it can have."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["Handler", dict[str, Any]], bytes | None]


def score_of(text: str) -> float:
    """What the server says of a text, unless it has a fault."""
    return len(text) + sum(map(ord, text)) / 1000


class Handler(BaseHTTPRequestHandler):
    server: RewardServer

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({**body, "path": self.path, "key": self.headers["Authorization"]})
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
            fault = self.server.faults.pop(0) if self.server.faults else self.server.always
        try:
            data = fault(self, body) if fault else self.good(body)
            if data is not None:
                self.answer(200, data)
        finally:
            with self.server.lock:
                self.server.now -= 1

    def good(self, body: dict[str, Any]) -> bytes:
        self.server.release.wait(60)
        pairs = zip(body["text"], body["rid"], strict=True)
        return json.dumps([{"embedding": [score_of(t)], "meta_info": {"id": rid}} for t, rid in pairs]).encode()

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


class RewardServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.release = threading.Lock(), threading.Event()
        self.release.set()
        self.requests: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        """Of the next requests, one each."""
        self.always: Fault | None = None
        self.now = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving() -> Iterator[RewardServer]:
    """A running server."""
    with RewardServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
