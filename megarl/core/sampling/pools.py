"""What was asked for and what has arrived, for one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class Pool:
    """All samples of one prompt in one step; ``megarl.core.sampling.collector`` fills it."""

    prompt: int
    """Index of the prompt in the order in which prompts were begun."""
    asked: list[int] = field(default_factory=list)
    """Samples asked for in each round."""
    rewards: dict[int, float | None] = field(default_factory=dict)
    """Reward by index of the sample, counted over all rounds; None for one that failed."""
    ended: bool = False
    """Whether its rule wants no more."""

    @property
    def num_asked(self) -> int:
        """Samples asked for in all rounds."""
        return sum(self.asked)

    @property
    def waits(self) -> bool:
        """Whether samples are still to arrive."""
        return len(self.rewards) < self.num_asked

    def samples(self) -> np.ndarray:
        """int64 [P], indices of the samples that arrived with a reward, ascending."""
        return np.array(sorted(i for i, reward in self.rewards.items() if reward is not None), dtype=np.int64)

    def values(self) -> np.ndarray:
        """float64 [P], their rewards."""
        return np.array([self.rewards[i] for i in self.samples().tolist()], dtype=np.float64)

    def drawn(self) -> list[int]:
        """Samples of each round that arrived with a reward."""
        edges = np.cumsum([0, *self.asked])
        return np.histogram(self.samples(), bins=edges)[0].tolist() if len(edges) > 1 and edges[-1] else []

    def classes(self, threshold: float) -> tuple[int, int]:
        """Number of rewards above the threshold, and of the others."""
        arrived = [reward for reward in self.rewards.values() if reward is not None]
        positives = sum(reward > threshold for reward in arrived)
        return positives, len(arrived) - positives

    def has_contrast(self) -> bool:
        """Whether not all rewards are equal."""
        values = self.values()
        return bool(values.size) and values.min() < values.max()
