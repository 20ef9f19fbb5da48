"""One connection to an SGLang server that is kept between requests: HTTP/1.1 over asyncio's streams.

Thousands of small posts to few servers are all that is asked of it, and they share the machine with what they wait for:
a request costs a tenth of the processor time that a general HTTP client takes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

BUFFER_BYTES = 1 << 20


class Connection:
    """Posts JSON to ``url``, one request at a time; connects when it must.

    A request raises OSError or EOFError (asyncio.IncompleteReadError) if the server cannot be reached or goes away, and
    ValueError if it does not answer in HTTP. The connection can be used again after that.
    """

    def __init__(self, url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None = None) -> None:
        """``tls`` is needed for https, and shared by connections: it takes long to make."""
        self._url, self._tls = urlsplit(url), tls
        lines = {"host": self._url.netloc, "content-type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. If this is cancelled, the connection is closed: an answer may be under way."""
        try:
            reader, writer = await self._connected()
            target = f"{self._url.path}/{path}"
            head = f"POST {target} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
            writer.write(head.encode("latin-1") + body)
            await writer.drain()
            status, headers = _parsed(await reader.readuntil(b"\r\n\r\n"))
            answer = await _body(reader, headers)
        except asyncio.LimitOverrunError as error:
            self.close()
            raise ValueError(f"the head of the answer has more than {BUFFER_BYTES} bytes") from error
        except BaseException:
            self.close()
            raise
        if headers.get("connection", "").lower() == "close":
            self.close()
        return status, answer

    def close(self) -> None:
        """Let go of the socket at once."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is not None and self._streams[0].at_eof():  # servers close what has been idle for seconds
            self.close()
        if self._streams is None:
            is_https = self._url.scheme == "https"
            self._streams = await asyncio.open_connection(
                self._url.hostname,
                self._url.port or (443 if is_https else 80),
                ssl=self._tls if is_https else None,
                limit=BUFFER_BYTES,
            )
        return self._streams


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """The status, and the headers under lower-case names."""
    first, *lines = head.decode("latin-1").split("\r\n")
    protocol, _, rest = first.partition(" ")
    if not protocol.startswith("HTTP/1."):
        raise ValueError(f"the answer begins with {first[:40]!r}, expected HTTP/1.1")
    fields = (line.partition(":") for line in lines if line)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields}


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        return b"".join(parts)
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    return await reader.read()  # up to the end of the connection
