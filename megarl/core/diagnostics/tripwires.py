"""Tripwires: how far the training engine is from what the sampling engine returned, by sequence, and what is too far.

Two figures of a sequence, both 0 where the engines agree:

- *k3*: the mean of ``rho - 1 - log rho`` over its generated tokens, rho = pi_old / mu; a token counts at most 1, and
  the largest one not at all, because honest ratios have a long tail.
- *native flip*: the share of (token, layer) pairs in which the training routers, left to themselves, choose other
  experts than the rollout names; the larger one of all its tokens, and of the generated ones.

Few tokens prove little: each mean also counts FEW tokens that agree. The counts of a sequence are a row of ``gaps``:
group, sample, largest k3, k3, tokens, flips, rows, flips and rows of generated tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from megarl.core.metrics import Stat
from megarl.core.ratios import log_ratio, segment_ids, segment_sum, usable_mask
from megarl.core.types import TrainBatch

LIMITS = {"max_k3": (0.05, 5.0, 0.3), "max_native_flip": (0.25, 2.5, 0.5)}
"""For each figure, in their order: least limit, factor on what is usual, and largest limit, which holds at first."""
FEW = 4.0
MOST_DROPPED = 0.25  # a step that loses a larger share of its sequences is bad
EVERYWHERE = 0.9  # a larger share of the sequences is all of them, but for chance
LEARNING_STEPS = 8


def count_k3(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return float64 [N, 3]: the largest k3 of each sequence, its sum over the tokens, and their number.

    old_logprobs, rollout_logprobs: [T]; loss_mask: bool [T]. Tokens at -inf in rollout_logprobs do not count.
    """
    keep = usable_mask(loss_mask, rollout_logprobs)
    log_rho = log_ratio(old_logprobs, rollout_logprobs, keep).detach().double()
    k3 = (torch.expm1(log_rho) - log_rho).clamp(max=1.0)
    total, tokens = segment_sum(torch.stack([k3, keep.double()]), cu_seqlens)
    largest = torch.zeros_like(total).scatter_reduce(0, segment_ids(cu_seqlens, k3.numel()), k3, "amax")
    return torch.stack([largest, total, tokens], 1)


def count_flips(shared: np.ndarray, topk: int, batch: TrainBatch) -> np.ndarray:
    """Return float64 [N, 4], the last columns of ``gaps``.

    shared: [T', L], the experts that training routers and rollout share, of the T' tokens with a recorded route.
    """
    present = batch.routed_mask
    assert present is not None
    ids = segment_ids(batch.cu_seqlens).numpy()[present.numpy()]
    generated = batch.loss_mask.numpy()[present.numpy()]
    flips = (np.asfortranarray(shared) < topk).mean(1)  # by layer, as in Disagreement
    weights = (flips, None, flips * generated, generated)
    return np.stack([np.bincount(ids, weight, batch.num_sequences) for weight in weights], 1)


def learnt_limits(usual: Sequence[float] | None) -> list[float]:
    """Return the limit of each figure, given the largest usual ones [2]; None while they are not known."""
    bounds = zip(LIMITS.values(), (math.inf, math.inf) if usual is None else usual, strict=True)
    return [min(max(factor * value, low), high) for (low, factor, high), value in bounds]


@dataclass(frozen=True, eq=False)
class Verdict:
    """Which sequences of a step are dropped, and why."""

    gaps: np.ndarray
    """float64 [S, 9], of all sequences of the step."""
    limits: np.ndarray
    """float64 [2], of k3 and native flip; infinite where a check is off."""
    figures: np.ndarray
    """float64 [S, 2]."""
    judged: np.ndarray
    """bool [S], those with a generated token."""
    over: np.ndarray
    """bool [S, 2]. If the others together are beyond a limit, as many short ones may be, all of them are."""

    @classmethod
    def of(cls, gaps: np.ndarray, limits: np.ndarray) -> Self:
        figures, judged = _figures(gaps), gaps[:, 4] > 0
        over = (figures > limits) & judged[:, None]
        rest = judged & ~over.any(1)
        return cls(gaps, limits, figures, judged, over | (rest[:, None] & (_pool(gaps[rest]) > limits)))

    @cached_property
    def dropped(self) -> np.ndarray:
        """bool [S]."""
        return np.asarray(self.over.any(1))

    @property
    def share(self) -> float:
        """Dropped ones among those that are judged; above MOST_DROPPED the step itself is bad."""
        return float(self.dropped.sum() / max(1, self.judged.sum()))

    def usual(self) -> np.ndarray:
        """float64 [2], the 0.99 quantile of each figure over the sequences that are kept.

        The largest of several never counts: one wrong sequence just below the limits must not raise them for good.
        """
        return np.quantile(self.figures[self.judged & ~self.dropped], 0.99, axis=0, method="lower")

    def reasons(self) -> dict[tuple[int, int], str]:
        """Why each dropped (group, sample) is."""
        rows = zip(self.gaps[self.dropped], self.figures[self.dropped], strict=True)
        return {(int(gap[0]), int(gap[1])): f"k3 {k3:.3g}, native flip {flip:.0%}" for gap, (k3, flip) in rows}

    def metrics(self) -> dict[str, Stat]:
        """Return numbers that are equal on all ranks."""
        names = ("dropped", "dropped_fraction", "k3_max", "native_flip_max", "k3_limit", "native_flip_limit")
        k3, flip = self.figures[self.judged].max(0, initial=0.0)
        flip = flip if self.gaps[:, 6].any() else np.nan  # no routes were compared
        values = map(float, (self.dropped.sum(), self.share, k3, flip, *self.limits))
        found = zip(names, values, strict=True)
        return Stat.maxima_of({f"tripwires/{name}": value for name, value in found if math.isfinite(value)})

    def describe(self, replayed: bool) -> str:
        """One line: the figures of the step beside their limits, how many sequences are dropped, and the likely cause.

        replayed: training used the routes, so that wrong ones raise k3 too.
        """
        (k3, flip), (max_k3, max_flip) = _pool(self.gaps[self.judged]), self.limits
        routes = "no routes, " if np.isfinite(max_flip) else ""
        if self.gaps[:, 6].any():
            routes = f"native flip {flip:.1%} (limit {max_flip:.0%}), "
        found = f"k3 {k3:.1e} (limit {max_k3:.2g}), {routes}{self.dropped.sum()} of {self.judged.sum()} responses "
        return found + (f"dropped; likely cause: {self._likely_cause(replayed)}" if self.dropped.any() else "dropped")

    def _likely_cause(self, replayed: bool) -> str:
        wrong = self.gaps[self.dropped]
        k3, flip = _pool(wrong)
        is_high, flips = k3 > LIMITS["max_k3"][0], flip > LIMITS["max_native_flip"][0]
        everywhere = self.share >= EVERYWHERE
        routes = "routes of other tokens, such as one token late or of another response"
        if flips and not is_high:
            return f"{routes}: the log-probabilities agree"
        if wrong[:, 6].any() and not flips:
            where = "precision, temperature or weights of the engine" if everywhere else "log-probabilities of others"
            return f"{where}: the experts agree, the log-probabilities do not"
        other = "weights that are not the trainer's, foreign or stale: every response disagrees"
        if not everywhere:
            other = "answers of other requests, or one server with other weights: only some responses disagree"
        causes = (other, routes) if k3 > LIMITS["max_k3"][2] else (routes, other)
        return "; or ".join(causes) if replayed and flips else other


def _figures(gaps: np.ndarray) -> np.ndarray:
    """float64 [S, 2]: k3 and native flip."""
    sums, counts = gaps[:, 3::2], gaps[:, 4::2]
    k3, flip, generated = ((sums - gaps[:, [2]] * [1, 0, 0]) / (counts + FEW)).T
    return np.stack([k3, np.maximum(flip, generated)], 1)


def _pool(gaps: np.ndarray) -> np.ndarray:
    """float64 [2]: the figures of these sequences as if they were one, with all of its tokens."""
    return _figures(gaps.sum(0, keepdims=True) * [1, 1, 0, 1, 1, 1, 1, 1, 1])[0]
