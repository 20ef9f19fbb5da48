"""Read files and JSON of strangers: the answer of a server, a file in a foreign folder.

    parse_json(data, source, max_bytes) -> value          DataError (a ValueError), in a single line

``source``, a path or the URL of a server, begins the message. ``max_bytes`` limits the length before parsing. Nesting
beyond ``MAX_DEPTH`` is refused, so that recursive readers end. ``NaN`` and ``Infinity`` are read as numbers: check the
range of numbers.

``check_types`` compares a value with the schema of an endpoint. ``read_body`` and ``join_body`` read the answer of a
server up to a limit; send ``UNPACKED`` with the request.

``open_regular`` opens regular files of a limited size, and nothing that could block: a FIFO waits for a writer, a
device may never end, and merely opening a device may have an effect. Therefore a file is checked before the opening,
opened without waiting, and checked again.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from megarl.errors import DataError, reason_of, refuse_if, reworded

if TYPE_CHECKING:
    import aiohttp
    from pydantic import TypeAdapter

T = TypeVar("T")

UNPACKED = {"Accept-Encoding": "identity"}
"""Header that asks for an uncompressed answer."""
MAX_DEPTH = 201
"""Nesting of lists and objects, the parser's limit. Ordinary files and answers stay below 12."""


def parse_json(data: bytes | str, source: str, max_bytes: int) -> Any:
    """Return the value of a JSON text. DataError if the text is too long, too deep, or no JSON."""
    from pydantic_core import from_json  # not above: a loop of the user's own that replays routes reads no JSON

    refuse_if(len(data) > max_bytes, DataError, "long_json", source=source, num=len(data), max_bytes=max_bytes)
    try:
        return from_json(data)
    except ValueError as error:
        is_deep = "recursion" in str(error)
        fault = f"more than {MAX_DEPTH} levels of lists and objects" if is_deep else f"no JSON, {error}"
        raise DataError(f"{source} holds {fault}") from error


def check_types(schema: "TypeAdapter[T]", value: Any, source: str) -> T:
    """Return a value in the form of its schema. DataError if a member has another type."""
    from pydantic_core import ValidationError

    try:
        return schema.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "all"
        raise DataError(f"{source} cannot be read ({place}: {first['msg']})") from error


def retry_after(headers: Mapping[str, str], most_s: float) -> float:
    """Return the seconds that an answer asks to wait, at most ``most_s``; 0 without a number of seconds."""
    text = headers.get("retry-after", "")
    return min(float(text), most_s) if text.isdecimal() else 0.0


async def read_body(response: "aiohttp.ClientResponse", source: str, max_bytes: int) -> bytes:
    """Return the body of an answer in a session with ``auto_decompress=False``; errors as in ``join_body``."""
    chunks, size = list[bytes](), 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        if (size := size + len(chunk)) > max_bytes:
            break
    return join_body(response.status, response.headers, chunks, source, max_bytes)


def join_body(status: int, headers: Mapping[str, str], chunks: Iterable[bytes], source: str, max_bytes: int) -> bytes:
    """Return the body of an answer. DataError beyond ``max_bytes``, if it is packed, and for a redirection.

    No redirection is followed: the target is a server that the user has not named, and would get the API key.
    """
    if 300 <= status < 400:
        target = headers.get("location")
        raise DataError(f"{source} redirects to {target!r} (HTTP {status}), expected an answer: name the server itself")
    data = bytearray()
    for chunk in chunks:
        data += chunk
        refuse_if(len(data) > max_bytes, DataError, "long_answer", source=source, max_bytes=max_bytes)
    if (packing := headers.get("content-encoding", "identity").lower()) != "identity":
        raise DataError(f"{source} is packed as {packing!r}, expected no packing: the request asked for that")
    return bytes(data)


MOST_JSON_BYTES = 64 << 20
"""Limit of a file that is parsed as a whole; the largest known tokenizer.json has 34 MB."""


def is_file_name(value: object) -> bool:
    """Whether a value is the plain name of a file in a folder, without a path."""
    if not isinstance(value, str) or value in ("", "..") or re.search("[\0\ud800-\udfff]", value):
        return False
    return Path(value).name == value and len(os.fsencode(value)) <= 255


def require_regular(path: Path) -> None:
    """Raise DataError unless ``path``, links followed, is a regular file or does not exist."""
    if os.path.lexists(path) and not os.path.isfile(path):
        kind = "folder" if os.path.isdir(path) else "FIFO, socket, device or broken link"
        raise DataError(f"{path} is a {kind}, expected a regular file")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. DataError for anything but a regular file, OSError from the system."""
    require_regular(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # exchanged after the first check
        os.close(descriptor)
        raise DataError(f"{path} is no regular file any more")
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. DataError for a larger file, and for an unreadable file."""
    with reworded(OSError, DataError, f"{path} cannot be read (", ")", reason_of), open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise DataError(f"{path} has {size} bytes, expected at most {max_bytes}")
        return file.read(max_bytes)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. DataError, naming the file, for anything else."""
    record = parse_json(read_regular(path, MOST_JSON_BYTES), str(path), MOST_JSON_BYTES)
    refuse_if(not isinstance(record, dict), DataError, "no_json_object", path=path)
    return record
