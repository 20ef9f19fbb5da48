"""A connection that is kept: every framing of answers, servers that close it, no bytes of an earlier request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from megarl.rollout.sglang_connection import Connection

Work = Callable[[Connection, list[bytes]], Awaitable[None]]


def with_server(answers: list[bytes | None], work: Work) -> list[bytes]:
    """Run ``work`` against a server that gives these answers in turn (None: hang up); returns what it has received.

    It hangs up after an answer that ends with "BYE", which it does not send. Each connection is noted as b"new".
    """
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(b"new")
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                received.append(head + await reader.readexactly(length))
                answer = answers.pop(0)
                if answer is None:
                    return
                writer.write(answer.removesuffix(b"BYE"))
                await writer.drain()
                if answer.endswith(b"BYE"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = Connection(f"http://127.0.0.1:{port}/prefix", {"x-key": "secret"})
        try:
            async with asyncio.timeout(20.0):
                await work(connection, received)
        finally:
            connection.close()
            server.close()

    asyncio.run(run())
    return received


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def test_requests_share_a_connection_and_carry_their_headers() -> None:
    async def work(connection: Connection, received: list[bytes]) -> None:
        for _ in range(3):
            assert await connection.post("generate", b"{}") == (200, b"hello")

    received = with_server([PLAIN] * 3, work)
    assert [part == b"new" for part in received] == [True, False, False, False]
    head = received[1].lower()
    assert head.startswith(b"post /prefix/generate http/1.1\r\n")
    assert b"\r\nx-key: secret\r\n" in head
    assert b"\r\ncontent-type: application/json\r\n" in head
    assert head.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhelloBYE",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhelloBYE",
        PLAIN + b"BYE",
    ],
    ids=["length", "chunks", "end of connection", "close", "close unsaid"],
)
def test_every_framing_is_read_and_the_next_request_goes_through(answer: bytes) -> None:
    async def work(connection: Connection, received: list[bytes]) -> None:
        assert await connection.post("generate", b"{}") == (200, b"hello")
        await asyncio.sleep(0.05)
        assert await connection.post("generate", b"[]") == (200, b"hello")

    assert with_server([answer, PLAIN], work)[-1].endswith(b"[]")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, EOFError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhelloBYE", EOFError),
        (b"HTTP/1.1 200 OK\r\nContent-LenBYE", EOFError),
        (b"SSH-2.0 what\r\n\r\nBYE", ValueError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\n", ValueError),
    ],
    ids=["no answer", "cut body", "cut head", "no HTTP", "no length"],
)
def test_what_goes_wrong_is_told_and_leaves_nothing_behind(answer: bytes | None, error: type[Exception]) -> None:
    async def work(connection: Connection, received: list[bytes]) -> None:
        with pytest.raises((error, ConnectionError)):
            await connection.post("generate", b"{}")
        assert await connection.post("generate", b"{}") == (200, b"hello")

    assert with_server([answer, PLAIN], work).count(b"new") == 2


def test_a_cancelled_request_does_not_leave_its_answer_to_the_next_one() -> None:
    slow = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel"  # the rest never comes

    async def work(connection: Connection, received: list[bytes]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await connection.post("generate", b"{}")
        assert await connection.post("generate", b"{}") == (200, b"hello")

    assert with_server([slow, PLAIN], work).count(b"new") == 2


def test_nobody_there_is_an_oserror() -> None:
    async def ask() -> None:
        await Connection("http://127.0.0.1:9", {}).post("generate", b"{}")

    with pytest.raises(OSError, match="127"):
        asyncio.run(ask())
