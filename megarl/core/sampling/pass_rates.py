"""Estimates of pass rates that last from step to step (Ada-Est, arXiv 2510.04996, third version)."""

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.errors import CheckpointError, refusal

Integers = Sequence[int] | np.ndarray


class PassRateCounts:
    """Fading counts per prompt: ``N <- decay N + n``, ``K <- decay K + k``, ``p = (K + alpha) / (N + alpha + beta)``.

    A prompt that was never drawn has the rate ``alpha / (alpha + beta)``. With ``pooled`` the mean of the prior follows
    the data, with the strength ``alpha + beta``: the decaying mean over all prompts drawn, each of a step counting
    once. Pools of a rule that looks at rewards may be counted too: their shares are biased, but sums are not, E[k] = p
    E[n] whatever the rule (Wald). decay, alpha and beta are not printed in the paper; the defaults are ours.
    """

    def __init__(
        self, num_prompts: int, decay: float = 0.9, alpha: float = 1.0, beta: float = 1.0, *, pooled: bool = False
    ) -> None:
        self.decay, self.alpha, self.beta, self.pooled = decay, alpha, beta, pooled
        self._pool = np.zeros(2)  # decaying: prompts drawn, and the sum of their shares of positives
        self._samples = np.zeros(num_prompts)
        self._positives = np.zeros(num_prompts)

    def update(self, prompts: Integers, samples: Integers, positives: Integers) -> None:
        """Take in a step: ``samples`` drawn by prompt, ``positives`` of the samples positive; [B] each.

        prompts: indices of the data set. A repeated prompt counts as a single draw; a prompt with 0 samples only fades.
        """
        index, inverse = np.unique(np.asarray(prompts, dtype=np.int64), return_inverse=True)
        drawn, good = np.asarray(samples, dtype=np.float64), np.asarray(positives, dtype=np.float64)
        for counts, new in ((self._samples, drawn), (self._positives, good)):
            counts[index] = self.decay * counts[index] + np.bincount(inverse, weights=new, minlength=index.size)
        was_drawn = drawn > 0
        self._pool = self.decay * self._pool + [was_drawn.sum(), (good[was_drawn] / drawn[was_drawn]).sum()]

    def rates(self, prompts: Integers | None = None) -> np.ndarray:
        """Return the estimates, float64 [B], of these prompts, or of all."""
        index = slice(None) if prompts is None else np.asarray(prompts, dtype=np.int64)
        strength, pool = self.alpha + self.beta, self._pool * self.pooled
        mean = (self.alpha + pool[1]) / (strength + pool[0])
        return (self._positives[index] + strength * mean) / (self._samples[index] + strength)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the counts, float64 [number of prompts] each, and of the pool of all, [2]."""
        return {"samples": self._samples.copy(), "positives": self._positives.copy(), "pool": self._pool.copy()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take counts that ``state_dict`` gave; CheckpointError for another number of prompts. counts: [B] each."""
        loaded = []
        for name in ("samples", "positives"):
            counts = np.array(state.get(name, np.nan), dtype=np.float64)
            if counts.shape != self._samples.shape:
                facts = {"name": name, "shape": list(counts.shape) if name in state else "missing"}
                raise CheckpointError(refusal("counts_of_prompts", size=self._samples.size, **facts))
            loaded.append(counts)
        self._samples, self._positives = loaded
        self._pool = np.array(state.get("pool", (0.0, 0.0)))  # absent in an earlier megarl: learn again
