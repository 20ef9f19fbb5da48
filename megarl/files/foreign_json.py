"""Reads JSON that somebody else wrote: the answer of a server, a file in a stranger's folder.

    parse_json(data, source, max_bytes) -> the value          DataError (a ValueError), in one line, for anything else

``data`` is bytes or text, ``source`` begins the message (a path, or the URL of a server), ``max_bytes`` limits the
length before anything is parsed. Deeper nesting than ``MAX_DEPTH`` is refused too, so that whatever walks through the
value ends. A value of ``NaN`` or ``Infinity`` is read as such: check numbers for the range that they must have.

``check_types`` compares a value with the schema of an endpoint. ``read_body`` and ``join_body`` read the answer of a
server up to a limit, before and after it is unpacked; send ``UNPACKED`` with the request.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megarl.errors import DataError

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

UNPACKED = {"Accept-Encoding": "identity"}
"""Header that asks for an answer as it is."""
MAX_DEPTH = 201
"""Lists and objects within each other; the limit of the parser. Honest files and answers have below 12."""


def parse_json(data: bytes | str, source: str, max_bytes: int) -> Any:
    """Returns the value that JSON text describes; DataError if it is too long, too deep, or no JSON."""
    from pydantic_core import from_json  # not above: a loop of one's own that replays routes reads no JSON

    if len(data) > max_bytes:
        raise DataError(f"{source} holds {len(data)} bytes of JSON, expected at most {max_bytes}")
    try:
        return from_json(data)
    except ValueError as error:
        is_deep = "recursion" in str(error)
        fault = f"more than {MAX_DEPTH} levels of lists and objects" if is_deep else f"no JSON, {error}"
        raise DataError(f"{source} holds {fault}") from error


class Schema(Protocol[T_co]):
    """A ``pydantic.TypeAdapter``, which takes long to import."""

    def validate_python(self, object: Any, /, *, strict: bool | None = None) -> T_co: ...


def check_types(schema: Schema[T], value: Any, source: str) -> T:
    """Returns a value that was read, as its schema says; DataError if one of its parts has another type."""
    from pydantic_core import ValidationError

    try:
        return schema.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "all"
        raise DataError(f"{source} cannot be read ({where}: {first['msg']})") from error


def retry_after(headers: Mapping[str, str], most_s: float) -> float:
    """Returns the seconds that an answer asks to wait, at most ``most_s``; 0 if it does not say, or names a date."""
    text = headers.get("retry-after", "")
    return min(float(text), most_s) if text.isdecimal() else 0.0


async def read_body(response: "aiohttp.ClientResponse", source: str, max_bytes: int) -> bytes:
    """Returns the body of an answer of a session with ``auto_decompress=False``; errors as ``join_body``."""
    parts, size = list[bytes](), 0
    async for part in response.content.iter_any():
        parts.append(part)
        if (size := size + len(part)) > max_bytes:
            break
    return join_body(response.status, response.headers, parts, source, max_bytes)


def join_body(status: int, headers: Mapping[str, str], parts: Iterable[bytes], source: str, max_bytes: int) -> bytes:
    """Returns the body of an answer, unpacked; DataError for one of more than ``max_bytes``, and for a redirection.

    No redirection is followed: its target is a server that nobody has named, and would get the API key.
    """
    if 300 <= status < 400:
        target = headers.get("location")
        raise DataError(f"{source} redirects to {target!r} (HTTP {status}), expected an answer: name the server itself")
    data = bytearray()
    for part in parts:
        data += part
        if len(data) > max_bytes:
            raise DataError(f"{source} sends more than {max_bytes} bytes")
    packing = headers.get("content-encoding", "identity").lower()
    if packing == "identity":
        return bytes(data)
    unpacker = zlib.decompressobj(wbits=47)  # gzip or zlib, whose headers say which
    try:
        content = unpacker.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise DataError(f"{source} is packed as {packing!r}, expected gzip, or no packing ({error})") from error
    if len(content) > max_bytes or not unpacker.eof:
        raise DataError(f"{source} unpacks to more than {max_bytes} bytes, or is cut short")
    return content
