"""What a rule of sampling did on imagined rewards: cost, contrast, and how noisy its gradient is.

A prompt has a parameter of its own, the logit of its pass rate p. A sample is its outcome r, 1 with probability p,
whose score ``d log pi / d logit`` is ``r - p``, and its wording, which the reward does not see, with a score of its own
of mean 0 and variance 1. Wording is why a gradient is noisy where every sample is credited alike, as it is in long
responses. A prompt's gradient, ``(B / N) sum A (score)`` over what trains of it (B prompts, N samples), has the
variance

    Var[(B / N) sum A (r - p)]  +  E[(B / N)^2 sum A^2]

of outcome and wording. Each step is drawn twice: half the squared difference of the two is the first term, their
product the square of the expected gradient, both without bias. The second is averaged over rewards, not drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megarl.core.sampling import Allotted, Selection


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What an arm did, over all prompts it began, in both draws."""

    rates: np.ndarray
    """float64 [P]."""
    drawn: np.ndarray
    """float64 [2, P], samples by draw; NaN for a prompt that one draw did not begin."""
    trained: np.ndarray
    """float64 [2, P]; 0 for prompts that were replaced."""
    gradients: np.ndarray
    """float64 [2, P], ``(B / N) sum A (r - p)``."""
    wording: np.ndarray
    """float64 [2, P], ``(B / N)^2 sum A^2``."""
    kinds: np.ndarray
    """int64 [4], prompts of the batches by what was drawn: both classes, only wrong, only right, nothing."""
    missing: int
    """Prompts that batches had room for and did not get, in both draws."""
    overhead: float
    """Samples per prompt beside ``drawn``."""
    allotted: bool
    """Whether the total of each step was decided beforehand."""

    @property
    def cost(self) -> float:
        """Samples per prompt of the batch."""
        return float(np.nansum(self.drawn)) / max(int(self.kinds.sum()), 1) + self.overhead

    @property
    def cost_error(self) -> float:
        """Standard error of the cost, prompts being drawn anew; where some are replaced, of a ratio."""
        if self.allotted:
            return 0.0
        placed = (
            np.where(np.isnan(self.drawn), np.nan, self.trained > 0) if self._replaces else np.ones_like(self.drawn)
        )
        excess = np.nan_to_num(self.drawn - (self.cost - self.overhead) * placed).mean(axis=0)
        return float(excess.std(ddof=1)) * np.sqrt(excess.size) / max(int(self.kinds.sum()) / 2, 1)

    @property
    def effective(self) -> float:
        """Share of the batch's prompts with contrast."""
        return float(self.kinds[0]) / max(int(self.kinds.sum()), 1)

    @property
    def variance(self) -> float:
        """Of the gradient, mean over the batch's prompts of outcome and wording."""
        return self.outcome_variance + float(np.nansum(self.wording)) / max(int(self.kinds.sum()), 1)

    @property
    def outcome_variance(self) -> float:
        """The part of the outcomes."""
        return float(np.sum(np.diff(self._both, axis=0) ** 2)) / 2 * self._per_place

    @property
    def signal(self) -> float:
        """Mean square of the expected gradient."""
        return float(np.sum(np.prod(self._both, axis=0))) * self._per_place

    @property
    def train_cost(self) -> float:
        """Samples per prompt of the batch that train."""
        return float(self.trained.sum()) / max(int(self.kinds.sum()), 1)

    @property
    def noise(self) -> float:
        """Variance over squared gradient."""
        return self.variance / self.signal if self.signal > 0 else float("inf")

    @property
    def _replaces(self) -> bool:
        return int(self.kinds.sum()) < int((~np.isnan(self.drawn)).sum())

    @property
    def _both(self) -> np.ndarray:
        """Gradients of the prompts that both draws began: the others say nothing of the difference."""
        return self.gradients[:, ~np.isnan(self.drawn).any(axis=0)]

    @property
    def _per_place(self) -> float:
        """From a sum over ``_both`` to a mean over places of the batch."""
        begun = int((~np.isnan(self.drawn)).sum())
        return begun / max(int(self.kinds.sum()), 1) / max(self._both.shape[1], 1)


@dataclass(slots=True)
class Record:
    """Collects what an arm does, draw by draw and step by step."""

    overhead: float
    rates: list[np.ndarray] = field(default_factory=list)
    columns: list[np.ndarray] = field(default_factory=list)  # [4, 2, P]: drawn, trained, gradient, wording
    kinds: np.ndarray = field(default_factory=lambda: np.zeros(4, dtype=np.int64))
    missing: int = 0
    allotted: bool = False
    _draws: list[np.ndarray] = field(default_factory=list)

    def take(self, draw: int, rates: np.ndarray, selection: Selection, coefficients: np.ndarray, places: int) -> None:
        """One draw of one step."""
        size, prompts = rates.size, selection.prompts
        begun, asked, arrived, positives = selection.drawn
        drawn = np.full(size, np.nan)
        drawn[begun] = asked
        per_sample = len(selection.pools) / max(len(prompts), 1)
        scores = selection.rewards - rates[prompts]
        sums = [
            np.bincount(prompts, minlength=size).astype(np.float64),
            np.bincount(prompts, weights=per_sample * coefficients * scores, minlength=size),
            np.bincount(prompts, weights=(per_sample * coefficients) ** 2, minlength=size),
        ]
        self._draws.append(np.stack([drawn, *sums]))
        placed = np.isin(begun, [pool.prompt for pool in selection.pools])
        right, wrong = (positives > 0)[placed], (positives < arrived)[placed]
        for row, chosen in enumerate((right & wrong, wrong & ~right, right & ~wrong, ~right & ~wrong)):
            self.kinds[row] += int(chosen.sum())
        self.missing += places - len(selection.pools)
        self.allotted = isinstance(selection.rule, Allotted)

    def close_step(self, rates: np.ndarray) -> None:
        """Both draws of a step are in; prompts that neither began are left out."""
        both = np.stack(self._draws, axis=1)
        some = ~np.isnan(both[0]).all(axis=0)
        self.rates.append(rates[some])
        self.columns.append(both[:, :, some])
        self._draws.clear()

    def outcome(self) -> Outcome:
        """All of it, once the last step is closed."""
        drawn, trained, gradients, wording = np.concatenate(self.columns, axis=2)
        return Outcome(
            rates=np.concatenate(self.rates),
            drawn=drawn,
            trained=trained,
            gradients=gradients,
            wording=wording,
            kinds=self.kinds,
            missing=self.missing,
            overhead=self.overhead,
            allotted=self.allotted,
        )
