"""A task with a calculator, for the tiny model of ``megarl.data.tiny``: ``123*456=``.

A model of this size cannot multiply, but it can copy. ``(123*456)`` is a call, the calculator appends ``:56088,``, and
the answer is ``56088``. Some demonstrations guess instead, so a model that was trained on them does both. The reward
selects the call.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megarl.data.records import write_jsonl
from megarl.data.rewards import instantaneous
from megarl.data.tiny import TaskFiles
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
    guesses = np.zeros(num_demonstrations, dtype=bool)
    guesses[: round(guess_share * num_demonstrations)] = True
    rng.shuffle(guesses)
    wrong = rng.integers(10_000, 1_000_000, size=num_demonstrations)
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    files = TaskFiles(directory / "train.jsonl", directory / "heldout.jsonl", directory / "demonstrations.jsonl")
    split = (num_train, num_train + num_heldout)
    for file, part in ((files.train, pairs[: split[0]]), (files.heldout, pairs[split[0] : split[1]])):
        write_jsonl(file, ({"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in part))
    write_jsonl(
        files.demonstrations,
        (
            {"prompt": f"{a}*{b}=", "response": str(guess) if guessed else _demonstrate(a, b)}
            for (a, b), guess, guessed in zip(pairs[split[1] :], wrong.tolist(), guesses.tolist(), strict=True)
        ),
    )
    return files


def _demonstrate(a: int, b: int) -> str:
    observation = OBSERVATION.replace("{output}", str(a * b))
    return f"{CALL_OPEN}{a}*{b}{CALL_CLOSE}{observation}{a * b}"


@instantaneous
def last_number(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if the text after the last observation, or the whole response without one, is the answer, else 0."""
    return float(response.rpartition(OBSERVATION[-1])[2].strip() == answer)
