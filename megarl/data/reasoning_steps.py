"""From the characters at which reasoning steps end to the tokens at which the steps end."""

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.data.tokenizer import INCOMPLETE

_INVALID_RUN = 64
"""Tokens to look back through in a run of invalid bytes."""


def step_tokens(
    tokenizer: PreTrainedTokenizerBase, response_tokens: np.ndarray, ends: Sequence[int], special_tokens: bool = False
) -> np.ndarray:
    """Return the index of each step's last token, int64 [S]: the first k for which tokens 0..k decode to the step.

    A step that ends with the text ends with the last token, which may be the end token. A token may end several steps.

    response_tokens: integer [T]. ends: [S], characters of ``tokenizer.decode(response_tokens,
    skip_special_tokens=not special_tokens)`` up to the end of each step, checked by ``read_verdict``.

    Decodes about log2(T) prefixes per step. Sampling keeps no character offsets, and decoding token by token breaks
    characters whose bytes are spread over several tokens.
    """
    tokens = np.asarray(response_tokens).tolist()

    @functools.cache
    def text_up_to(index: int) -> str:
        return str(tokenizer.decode(tokens[: index + 1], skip_special_tokens=not special_tokens))

    text = text_up_to(len(tokens) - 1)
    last = len(tokens) - 1
    indices = [last if end == len(text) else _first_that_covers(text[:end], text_up_to, len(tokens)) for end in ends]
    return np.array(indices, dtype=np.int64)


def _first_that_covers(step: str, text_up_to: Callable[[int], str], num_tokens: int) -> int:
    index = bisect_left(range(num_tokens), True, key=lambda k: text_up_to(k).startswith(step))
    # A decoder with a byte fallback writes a run of bytes as incomplete until the last character is complete. A longer
    # prefix may therefore not cover the step although a shorter prefix does: look back through the run. A run of
    # invalid bytes may also begin with valid characters, which show until the invalid byte comes.
    look_back = _INVALID_RUN if INCOMPLETE in step else 0
    for earlier in range(index - 1, -1, -1):
        text = text_up_to(earlier)
        if text.startswith(step):
            index = earlier
        elif not text.endswith(INCOMPLETE) and index - earlier > look_back:
            break
    return index
