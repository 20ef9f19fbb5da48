"""Whatever a server answers to a step of an update, or of itself: it is used, or refused with an error of megarl's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest

from megarl.engines.sglang import http as sglang_http
from megarl.engines.sglang.http import is_ready, server_info
from megarl.engines.sglang.member import FleetState, Member
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.errors import MegarlError

JSON = {"Content-Type": "application/json"}
Answer = tuple[int, dict[str, str], bytes]
ODD: dict[str, Answer] = {
    "a list": (200, JSON, b'[{"version": "0.5.23"}]'),
    "null": (200, JSON, b"null"),
    "deep": (200, JSON, b"[" * 100_000),
    "other values": (200, JSON, json.dumps({name: [[]] for name in ("version", "ranks", "meta_info")}).encode()),
    "numbers": (200, JSON, b'{"version": 3, "ranks": 3, "meta_info": 3, "weight_version": 3, "success": 3}'),
    "infinite": (
        200, JSON,
        b'{"version": "0.5.23", "api_key": "x", "tp_size": Infinity, "dp_size": 1e999,'
        b' "max_total_num_tokens": Infinity, "pp_size": NaN,'
        b' "internal_states": [{"effective_max_running_requests_per_dp": Infinity}],'
        b' "meta_info": {"input_token_logprobs": [[null], ["x"]]}, "ranks": [{"checksums": 3}]}',
    ),
    "failed": (200, JSON, b'{"success": false}'),
    "404": (404, JSON, b'{"detail":"Not Found"}'),
    "redirection": (302, {"Location": "http://127.0.0.1:1/"}, b""),
    "too long": (200, JSON, b" " * (2 << 20)),
    "packed as something": (200, JSON | {"Content-Encoding": "br"}, b"abc"),
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    answer: Answer = ODD["404"]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, body = type(self).answer
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


STEPS: dict[str, Callable[[WeightSender], object]] = {
    "begin": WeightSender.begin,
    "session": WeightSender.open_session,
    "folder": lambda sender: sender.load_from_disk("/a"),
    "finish": lambda sender: sender.finish(3),
    "version": lambda sender: sender.weight_version(),
    "resume": WeightSender.resume,
    "memory": WeightSender.release_memory,
    "checksums": WeightSender.checksums,
}
OBJECTS = ("other values", "numbers", "infinite")
ACCEPTED = {
    *((step, odd) for step in ("begin", "session", "folder", "resume", "memory") for odd in ("null", *OBJECTS)),
    *(("version", odd) for odd in (*OBJECTS, "failed")),
    ("finish", "numbers"),
}
"""A step that answers 200 and not ``success: false`` was made; each version is compared with the one that was set."""


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_an_update(url: str, step: str, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_http, "MAX_BYTES", 1 << 20)
    Handler.answer = ODD[odd]
    sender = WeightSender(url)
    if (step, odd) in ACCEPTED:
        STEPS[step](sender)
        return
    with pytest.raises(MegarlError) as caught:
        STEPS[step](sender)
    assert url in str(caught.value)
    sender.close()


@pytest.mark.parametrize("odd", ODD)
def test_what_a_server_says_of_itself(url: str, odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_http, "MAX_BYTES", 1 << 20)
    Handler.answer = ODD[odd]
    if odd == "infinite":
        assert server_info(url, None)["version"] == "0.5.23"
    elif odd in ("numbers", "other values"):
        server_info(url, None)
    else:
        with pytest.raises(MegarlError, match="no SGLang server answers at"):
            server_info(url, None)
    member = Member(url, None, FleetState(source=tmp_path))
    with nullcontext() if odd == "infinite" else pytest.raises(MegarlError):  # numbers that are none are not said
        member.connect()

    async def ask() -> tuple[bool, bool]:
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            return await is_ready(http, url, None), await is_ready(http, url, "7")

    assert asyncio.run(ask()) == (ODD[odd][0] == 200, False)
