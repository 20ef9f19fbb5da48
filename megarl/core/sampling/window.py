"""Which samples are drawn, and which prompts train, if responses may outlast a step: a window over the run's order.

A step trains the first B complete prompts among the untrained ones, in the run's order (windowed first in, first out,
arXiv 2605.26494). At most W incomplete older prompts are passed over. A prompt that is due, because its oldest token
would become too old, is never passed over.

With staleness k, a step begins prompts among its first (k + 1) B untrained ones, in order. The B prompts of each step,
and the prompts that they pass over, W <= B, are among the first (k + 1) B of k steps before. So at most B prompts are
due, and they are among the first B: no prompt becomes older than k steps.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence

from megarl.core.sampling.collector import Ask, Key


class WindowSamples:
    """Asks for the samples of a step, the oldest prompts first, and in free places for samples of later steps."""

    def __init__(
        self, prompts: Sequence[int], group_size: int, size: int, *,
        most_passed: int = 0, due: Collection[int] = (), arrived: Collection[Key] = (), ends: bool = True,
    ) -> None:  # fmt: skip
        """prompts: untrained, in order; size: B, whose samples are the places; most_passed: W; arrived: samples that
        are complete; ends: False lets responses go on when B prompts can train; no further response is begun."""
        self._prompts, self._group_size, self._size = prompts, group_size, size
        self._most_passed, self._due, self._ends = most_passed, due, ends
        self._arrived = Counter(prompt for prompt, _ in arrived)
        keys = ((prompt, sample) for prompt in prompts for sample in range(group_size))
        self._waiting = deque(key for key in keys if key not in arrived)

    def start(self) -> list[Ask]:
        """Return the first samples to draw, one for each place."""
        return self._take(self._size * self._group_size)

    def add(self, prompt: int, sample: int, reward: float | None) -> list[Ask]:
        """Take in a complete sample, and return the sample for its place."""
        self._arrived[prompt] += 1
        return self._take(1)

    @property
    def done(self) -> bool:
        """Whether the step has all its prompts."""
        return self._ends and self.choose() is not None

    def choose(self) -> tuple[list[int], int] | None:
        """Return the prompts that train, ascending, and how many prompts they pass over; None if not yet decided."""
        batch, num_passed = list[int](), 0
        for prompt in self._prompts:
            if len(batch) == self._size:
                break
            if self._arrived[prompt] == self._group_size:
                batch.append(prompt)
            elif num_passed == self._most_passed or prompt in self._due:
                return None
            else:
                num_passed += 1
        return (batch, num_passed) if len(batch) == self._size else None

    def _take(self, number: int) -> list[Ask]:
        keys = [] if self.choose() else [self._waiting.popleft() for _ in range(min(number, len(self._waiting)))]
        return [Ask(prompt, range(sample, sample + 1)) for prompt, sample in keys]
