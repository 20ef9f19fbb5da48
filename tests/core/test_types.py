"""What a rollout says of itself."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.core.types import Rollout


@pytest.mark.parametrize(
    ("mask", "length"), [("", 0), ("1", 0), ("0", 1), ("01", 1), ("000", 3), ("0010010", 2), ("0" * 400 + "1", 400)]
)
def test_the_prompt_ends_before_the_first_generated_token(mask: str, length: int) -> None:
    tokens = np.arange(len(mask), dtype=np.int32)
    twice = np.repeat(np.array([letter == "1" for letter in mask], bool), 2)
    for loss_mask in (twice[::2], twice[::2].copy(), twice[::2].astype(np.int64), twice[::2].astype(np.uint8) * 255):
        rollout = Rollout(0, 0, tokens, loss_mask, tokens, None, None, tokens, "stop")
        assert rollout.prompt_length == length
        assert rollout.response_tokens.tolist() == list(range(length, len(mask)))
