"""Reads JSON that somebody else wrote: the answer of a server, a file in a stranger's folder.

    parse_json(data, source, max_bytes) -> the value          DataError (a ValueError), in one line, for anything else

``data`` is bytes or text, ``source`` begins the message (a path, or the URL of a server), ``max_bytes`` limits the
length before anything is parsed. Deeper nesting than ``MAX_DEPTH`` is refused too, so that whatever walks through the
value ends. A value of ``NaN`` or ``Infinity`` is read as such: check numbers for the range that they must have.
"""

from typing import Any

from pydantic_core import from_json

from megarl.errors import DataError

MAX_DEPTH = 201
"""Lists and objects within each other; the limit of the parser. Honest files and answers have below 12."""


def parse_json(data: bytes | str, source: str, max_bytes: int) -> Any:
    """Returns the value that JSON text describes; DataError if it is too long, too deep, or no JSON."""
    if len(data) > max_bytes:
        raise DataError(f"{source} holds {len(data)} bytes of JSON, expected at most {max_bytes}")
    try:
        return from_json(data)
    except ValueError as error:
        found = (
            f"more than {MAX_DEPTH} levels of lists and objects" if "recursion" in str(error) else f"no JSON, {error}"
        )
        raise DataError(f"{source} holds {found}") from error
