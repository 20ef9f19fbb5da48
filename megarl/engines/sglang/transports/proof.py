"""Proof that a server computes with the weights of the update, and still does.

Anybody with access to a server can change the weights and leave the name of the version. A server may also confirm an
update without making the update.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.engines.sglang.transports.sender import WeightSender

Checksums = list[dict[str, str]]
"""Checksums of each tensor-parallel rank: name -> checksum."""
PROMPT_TOKENS = 32
LEAST_CHANGE, NOISES = 1e-3, 4.0
"""A change is a mean difference of log-probabilities above this number of nats, plus a multiple of their noise."""


def make_prompt(config: Mapping[str, Any]) -> list[int]:
    """Return the fixed prompt of a model: tokens from its whole vocabulary."""
    vocabulary = int(config.get("vocab_size") or 1000)
    positions = int(config.get("max_position_embeddings") or PROMPT_TOKENS + 2)
    return [(7 + 7919 * place) % vocabulary for place in range(min(PROMPT_TOKENS, positions - 2))]


def differing(checksums: Checksums, expected: Checksums) -> list[str]:
    """Return the names of tensors whose checksums differ on a rank."""
    ranks = zip(checksums, expected, strict=False)
    return sorted({name for tensors, other in ranks for name, _ in tensors.items() ^ other.items()})


class Proof:
    """A server's scores and checksums after an update, which stay equal while the server has the weights."""

    def __init__(
        self, sender: WeightSender, prompt: Sequence[int], checksums: Checksums | None, sums: Sequence[int] = ()
    ) -> None:
        """checksums: None if not compared. Asks twice for the prompt's log-probabilities."""
        self._prompt, self._checksums, self._sums = prompt, checksums, sums
        self._logprobs = np.stack([sender.score(prompt) for _ in range(2)])

    def is_unmade(self, previous: "Proof") -> bool:
        """Whether most tensors differ from the previous update, but the server's scores are equal to the last bit."""
        changed = sum(number != other for number, other in zip(self._sums, previous._sums, strict=False))
        same = np.array_equal(self._logprobs, previous._logprobs) and self._checksums == previous._checksums
        return 2 * changed > len(self._sums) and same

    def find_change(self, sender: WeightSender) -> str | None:
        """Return the change since the update, None without a change. The spread of equal questions is a server's
        noise."""
        if self._checksums is not None and (names := differing(sender.checksums(), self._checksums)):
            return f"{len(names)} checksums of its weights are others, the first of {names[0]}"
        now = [sender.score(self._prompt)]
        if np.abs(now[0] - self._logprobs).mean() <= LEAST_CHANGE:
            return None
        now += [sender.score(self._prompt) for _ in range(6)]  # two or three answers may be alike by chance
        noise = max(float(np.ptp(scores, axis=0).mean()) for scores in (now, self._logprobs))
        gap = float(np.abs(np.mean(now, axis=0) - self._logprobs.mean(0)).mean())
        if gap <= LEAST_CHANGE + NOISES * noise:
            return None
        return f"its log-probabilities of a fixed prompt are others by {gap:.2g} on average, its noise is {noise:.1g}"
