"""Tripwires: how far the training engine is from what the sampling engine returned, by sequence, and what is too far.

Three figures of a sequence, all 0 where the engines agree:

- *k3*: the mean of ``rho - 1 - log rho`` over its generated tokens, rho = pi_old / mu; a token counts at most 1, and
  the largest one not at all, because honest ratios have a long tail.
- *native flip*: the share of (token, layer) pairs in which the training routers, left to themselves, choose other
  experts than the rollout names; the larger one of all its tokens, and of the generated ones;
- *evidence*: that a run of its rows is of other tokens (``foreign_rows``), which a mean over a long response hides.

Few tokens prove little: each mean also counts FEW tokens that agree. The counts of a sequence are a row of ``gaps``:
group, sample, largest k3, k3, tokens, flips, rows, flips and rows of generated tokens, evidence, first and last row of
the run, foreign rows.
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
from megarl.watch import foreign_rows

LIMITS = {"max_k3": (0.05, 5.0, 0.3), "max_native_flip": (0.25, 2.5, 0.5)}
"""For each mean, in their order: least limit, factor on what is usual, and largest limit."""
COLUMNS = 13
FEW = 4.0
MOST_DROPPED = 0.25  # a step that loses a larger share of its sequences is bad
EVERYWHERE = 0.9  # a larger share of the sequences is all of them, but for chance
LEARNING_STEPS = 8
TAIL = 3.5  # median absolute deviations from the median to about the 0.99 quantile of a normal distribution
DROPS = (0.005, 0.03)  # shares of dropped sequences of an honest engine, and of one with a fault that persists


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
    """Return float64 [N, 8], the last columns of ``gaps``.

    shared: [T', L], the experts that training routers and rollout share, of the T' tokens with a recorded route.
    """
    present = batch.routed_mask
    assert present is not None
    ids = segment_ids(batch.cu_seqlens).numpy()[present.numpy()]
    generated = batch.loss_mask.numpy()[present.numpy()]
    flips = (np.asfortranarray(shared) < topk).mean(1)  # by layer, as in Disagreement
    weights = (flips, None, flips * generated, generated)
    counts = np.stack([np.bincount(ids, weight, batch.num_sequences) for weight in weights], 1)
    return np.concatenate([counts, foreign_rows.find_foreign(shared, topk, batch)], 1)


def usual_means(gaps: np.ndarray) -> list[float]:
    """Return about the 0.99 quantile [2] of k3 and native flip over honest sequences, of which at least half must be.

    The median and TAIL median absolute deviations, so that no wrong sequence moves them, however wrong it is.
    """
    means = _means(gaps[gaps[:, 4] > 0])
    if not len(means):
        return [0.0] * len(LIMITS)
    median = np.median(means, 0)
    return (median + TAIL * np.median(np.abs(means - median), 0)).tolist()


def learnt_limits(usual: Sequence[Sequence[float]]) -> list[float]:
    """Return the limit of each mean, given the usual ones [2] of one or more steps; later steps only tighten it."""
    centre = np.minimum(usual[0], np.median(usual, 0))
    bounds = zip(LIMITS.values(), centre.tolist(), strict=True)
    return [min(max(factor * value, low), high) for (low, factor, high), value in bounds]


def drop_evidence(dropped: int, judged: int) -> float:
    """Return the log-likelihood ratio of a step's drops: of a fault that persists over chance, in nats."""
    usual, wrong = DROPS
    return dropped * math.log(wrong / usual) + (judged - dropped) * math.log((1.0 - wrong) / (1.0 - usual))


@dataclass(frozen=True, eq=False)
class Verdict:
    """Which sequences of a step are dropped, and why."""

    gaps: np.ndarray
    """float64 [S, COLUMNS], of all sequences of the step."""
    limits: np.ndarray
    """float64 [3], of k3, native flip and evidence; infinite where a check is off."""
    figures: np.ndarray
    """float64 [S, 3]."""
    judged: np.ndarray
    """bool [S], those with a generated token."""
    over: np.ndarray
    """bool [S, 3]. If the others together are beyond a limit, as many short ones may be, all of them are."""

    @classmethod
    def of(cls, gaps: np.ndarray, limits: np.ndarray) -> Self:
        figures, judged = np.concatenate([_means(gaps), gaps[:, 9:10]], 1), gaps[:, 4] > 0
        over = (figures > limits) & judged[:, None]
        rest = judged & ~over.any(1)
        over[:, :2] |= rest[:, None] & (_pool(gaps[rest]) > limits[:2])
        return cls(gaps, limits, figures, judged, over)

    @cached_property
    def dropped(self) -> np.ndarray:
        """bool [S]."""
        return np.asarray(self.over.any(1))

    @property
    def share(self) -> float:
        """Dropped ones among those that are judged; above MOST_DROPPED the step itself is bad."""
        return float(self.dropped.sum() / max(1, self.judged.sum()))

    def reasons(self) -> dict[tuple[int, int], str]:
        """Why each dropped (group, sample) is."""
        found = {}
        for index in np.flatnonzero(self.dropped):
            (k3, flip, _), gap = self.figures[index], self.gaps[index]
            where = f", {_describe_run(gap)}" if self.over[index, 2] else ""
            found[int(gap[0]), int(gap[1])] = f"k3 {k3:.3g}, native flip {flip:.0%}{where}"
        return found

    def metrics(self) -> dict[str, Stat]:
        """Return numbers that are equal on all ranks."""
        k3, flip, _ = self.figures[self.judged].max(0, initial=0.0)
        runs = self.over[:, 2].sum()
        flip, runs = (flip, runs) if self.gaps[:, 6].any() else (np.nan, np.nan)  # nan: no routes were compared
        found = {"dropped": self.dropped.sum(), "dropped_fraction": self.share, "foreign_runs": runs}
        found |= {"k3_max": k3, "native_flip_max": flip}
        found |= {"k3_limit": self.limits[0], "native_flip_limit": self.limits[1]}
        known = {f"tripwires/{name}": float(value) for name, value in found.items() if math.isfinite(value)}
        return Stat.maxima_of(known)

    def describe(self, replayed: bool) -> str:
        """One line: the figures of the step beside their limits, how many sequences are dropped, and the likely cause.

        replayed: training used the routes, so that wrong ones raise k3 too.
        """
        (k3, flip), (max_k3, max_flip, _) = _pool(self.gaps[self.judged]), self.limits
        routes = "no routes, " if np.isfinite(max_flip) else ""
        if self.gaps[:, 6].any():
            routes = f"native flip {flip:.1%} (limit {max_flip:.0%}), "
        found = f"k3 {k3:.1e} (limit {max_k3:.2g}), {routes}{self.dropped.sum()} of {self.judged.sum()} responses "
        return found + (f"dropped; likely cause: {self._likely_cause(replayed)}" if self.dropped.any() else "dropped")

    def _likely_cause(self, replayed: bool) -> str:
        wrong = self.gaps[self.dropped]
        k3, flip = _pool(wrong)
        runs = self.gaps[self.over[:, 2]]
        is_high, flips = k3 > LIMITS["max_k3"][0], flip > LIMITS["max_native_flip"][0] or len(runs) > 0
        everywhere = self.share >= EVERYWHERE
        routes = "routes of other tokens, such as one token late or of another response"
        if len(runs):
            routes += f" ({_describe_run(runs[runs[:, 9].argmax()])} of one response)"
        if flips and not is_high:
            return f"{routes}: the log-probabilities agree"
        if wrong[:, 6].any() and not flips:
            where = "precision, temperature or weights of the engine" if everywhere else "log-probabilities of others"
            return f"{where}: the experts agree, the log-probabilities do not"
        other = "weights that are not the trainer's, foreign or stale: every response disagrees"
        if not everywhere:
            other = (
                "answers of other requests (another prompt's, or an earlier step's), or one server with other weights: "
                "only some responses disagree"
            )
        causes = (other, routes) if k3 > LIMITS["max_k3"][2] else (routes, other)
        return "; or ".join(causes) if replayed and flips else other


def _describe_run(gap: np.ndarray) -> str:
    first, last, foreign = gap[10:].astype(int)
    return f"rows {first} to {last} are of other tokens ({foreign} of {int(gap[6])} rows are foreign)"


def _means(gaps: np.ndarray) -> np.ndarray:
    """float64 [S, 2]: k3 and native flip."""
    sums, counts = gaps[:, 3:8:2], gaps[:, 4:9:2]
    k3, flip, generated = ((sums - gaps[:, [2]] * [1, 0, 0]) / (counts + FEW)).T
    return np.stack([k3, np.maximum(flip, generated)], 1)


def _pool(gaps: np.ndarray) -> np.ndarray:
    """float64 [2]: the means of these sequences as if they were one, with all of its tokens."""
    summed = gaps.sum(0, keepdims=True)
    summed[:, 2] = 0.0
    return _means(summed)[0]
