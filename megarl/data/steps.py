"""From the characters at which the steps of a response end to its tokens."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from megarl.errors import DataError

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""


class Decoder(Protocol):
    """The one method of a tokenizer that is needed."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def step_tokens(tokenizer: Decoder, response_tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Return the index of each step's last token: the first k so that tokens 0..k read as all characters of the step.

    A step that ends with the text ends with the last token, an end token included. A token may be the last one of
    several steps. response_tokens: integer [T]; ends: [S], characters of ``tokenizer.decode(response_tokens,
    skip_special_tokens=True)`` up to each end, exclusive, ascending, within 1..its length; result: int64 [S]. Raises
    DataError for other ends.

    Found by decoding prefixes, about log2(T) per step: offsets of characters are not kept in sampling, and decoding
    token by token breaks characters whose bytes are in several tokens.
    """
    tokens = np.asarray(response_tokens).tolist()

    @functools.cache
    def text_up_to(index: int) -> str:
        return tokenizer.decode(tokens[: index + 1], skip_special_tokens=True)

    text = text_up_to(len(tokens) - 1)
    _check_ends(ends, len(text))
    found = [
        len(tokens) - 1 if end == len(text) else _first_that_covers(text[:end], text_up_to, len(tokens)) for end in ends
    ]
    return np.array(found, dtype=np.int64)


def _first_that_covers(step: str, text_up_to: Callable[[int], str], num_tokens: int) -> int:
    index = bisect_left(range(num_tokens), True, key=lambda k: text_up_to(k).startswith(step))
    # A decoder with a fall-back to bytes writes a whole run of bytes as incomplete until its last character is there,
    # so a prefix that covers the step may be followed by one that does not: look back through the run.
    before = index - 1
    while before >= 0 and ((covers := text_up_to(before).startswith(step)) or text_up_to(before).endswith(INCOMPLETE)):
        index = before if covers else index
        before -= 1
    return index


def _check_ends(ends: Sequence[int], length: int) -> None:
    previous = 0
    for step, end in enumerate(ends):
        if not previous < end <= length:
            raise DataError(
                f"step {step} ends at character {end}, expected {previous + 1}..{length}: ends ascend and lie within "
                "the response as it was judged"
            )
        previous = end
