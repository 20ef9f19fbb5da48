"""A task with a calculator, for the tiny model of ``megarl.data.tiny``: ``123*456=``.

A model of this size cannot multiply, but it can copy. ``(123*456)`` is a call, the calculator appends ``:56088,``, and
the answer is ``56088``. Some demonstrations guess instead, so a model that was trained on them does both. The reward
selects the call.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megarl.data.rewards import instantaneous
from megarl.data.tiny import TaskFiles, choose_share, write_task
from megarl.errors import DataError

CALL_OPEN, CALL_CLOSE = "(", ")"
"""The marks around a call. The closing mark is one token, and ends the turn."""
OBSERVATION = ":{output},"
"""What the environment appends."""


def write_tool_task(
    path: str | Path,
    *,
    seed: int = 0,
    num_train: int = 4096,
    num_heldout: int = 256,
    num_demonstrations: int = 38400,
    guess_share: float = 0.55,
) -> TaskFiles:
    """Write train.jsonl, heldout.jsonl and demonstrations.jsonl of the task into the folder ``path``.

    All prompts are distinct products of two three-digit numbers. Exactly ``round(guess_share * num_demonstrations)``
    demonstrations, at random places, guess five or six random digits. Each file is replaced atomically. Raises
    DataError if a number is out of range.
    """
    counts = (num_train, num_heldout, num_demonstrations)
    if min(counts) < 0 or sum(counts) > 900 * 900 or not 0.0 <= guess_share <= 1.0:
        raise DataError(
            f"tool task: expected counts of 0 or more, {900 * 900} in all, and 0 <= guess_share <= 1, found counts "
            f"{counts}, guess_share {guess_share}"
        )
    rng = np.random.default_rng(seed)
    chosen = rng.choice(900 * 900, size=sum(counts), replace=False)
    pairs = [(100 + int(n) // 900, 100 + int(n) % 900) for n in chosen]
    guesses = choose_share(rng, guess_share, num_demonstrations).tolist()
    wrong = rng.integers(10_000, 1_000_000, size=num_demonstrations).tolist()
    num_problems = num_train + num_heldout
    problems = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs[:num_problems]]
    demonstrations = [
        {"prompt": f"{a}*{b}=", "response": str(guess) if guessed else _demonstrate(a, b)}
        for (a, b), guess, guessed in zip(pairs[num_problems:], wrong, guesses, strict=True)
    ]
    return write_task(path, problems[:num_train], problems[num_train:], demonstrations)


def _demonstrate(a: int, b: int) -> str:
    observation = OBSERVATION.replace("{output}", str(a * b))
    return f"{CALL_OPEN}{a}*{b}{CALL_CLOSE}{observation}{a * b}"


@instantaneous
def last_number(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if the text after the last observation, or the whole response without one, is the answer, else 0."""
    return float(response.rpartition(OBSERVATION[-1])[2].strip() == answer)
