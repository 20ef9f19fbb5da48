"""Find the tokens at which the reasoning steps of a response end, from the characters at which they end."""

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are not a whole character yet."""
_INVALID_RUN = 64
"""Tokens to look back through in a run of invalid bytes."""


def step_tokens(
    tokenizer: PreTrainedTokenizerBase, response_tokens: np.ndarray, ends: Sequence[int], special_tokens: bool = False
) -> np.ndarray:
    """Return the index of each step's last token: the first k for which tokens 0..k decode to the whole step.

    A step that ends with the text ends with the last token, which may be the end token. One token may be the last of
    several steps.

    response_tokens: integer [T]. ends: [S], characters of ``tokenizer.decode(response_tokens,
    skip_special_tokens=not special_tokens)`` up to the end of each step, as ``read_verdict`` checks them. Returns
    int64 [S].

    Decodes prefixes, about log2(T) of them per step. Sampling keeps no character offsets, and decoding token by token
    breaks characters whose bytes are spread over several tokens.
    """
    tokens = np.asarray(response_tokens).tolist()

    @functools.cache
    def text_up_to(index: int) -> str:
        return str(tokenizer.decode(tokens[: index + 1], skip_special_tokens=not special_tokens))

    text = text_up_to(len(tokens) - 1)
    found = [
        len(tokens) - 1 if end == len(text) else _first_that_covers(text[:end], text_up_to, len(tokens)) for end in ends
    ]
    return np.array(found, dtype=np.int64)


def _first_that_covers(step: str, text_up_to: Callable[[int], str], num_tokens: int) -> int:
    index = bisect_left(range(num_tokens), True, key=lambda k: text_up_to(k).startswith(step))
    # A decoder with a byte fallback writes a run of bytes as incomplete until its last character is complete. So a
    # longer prefix may not cover the step although a shorter one does: look back through the run.
    before = index - 1
    # A run of invalid bytes may also begin with valid characters, which show until the invalid byte comes.
    look_back = _INVALID_RUN if INCOMPLETE in step else 0
    while before >= 0:
        text = text_up_to(before)
        if text.startswith(step):
            index = before
        elif not text.endswith(INCOMPLETE) and index - before > look_back:
            break
        before -= 1
    return index
