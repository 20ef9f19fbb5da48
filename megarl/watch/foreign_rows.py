"""Finds rows of routes of foreign tokens, anywhere in a response, by a sequential test.

Honest rows share nearly all experts with the training routers' own choice: of the slots of a token (layers times K),
rounding changes a few. Rows of a foreign token share an unknown number by chance: all numbers count as equally likely.
Each row thus has a log-likelihood ratio, and Page's CUSUM (1954) finds the run of rows with the largest sum, in a
response of any length. Responses are tested independently.
"""

import math
from functools import cache
from typing import Any

import numpy as np

from megarl.core.ratios import segment_ids
from megarl.core.types import TrainBatch
from megarl.watch.limits import TRIPWIRES

SHARES = (0.5, 1 / 16, 1 / 128)
"""Shares of foreign rows in a run that are tried: the first finds runs, further shares find scattered rows."""
HONEST_FLIPS = (0.15, 0.5)
"""Experts not shared per (token, layer) that are normal: this many, or half an expert per token more than the median of
the response, up to the second."""
SPREAD = 30.0  # of honest rows: a + b of the beta distribution of disagreement
ODD = 0.005  # share of honest rows whose disagreement may be anything: no row counts more than 1 / ODD
FOREIGN = 20.0  # likelihood ratio from which a row counts as foreign
_GRID = 1 << 10  # scores are multiples of 1 / _GRID, for exact sums


@cache
def row_scores(num_layers: int, topk: int, flip: float = HONEST_FLIPS[0]) -> np.ndarray:
    """float64 [SHARES, L K + 1]: log of (1 - share + share * foreign / honest likelihood), by the experts not shared.

    Honest: beta-binomial over all slots of a token, because its layers disagree together, and ODD of any number.
    """
    slots = num_layers * topk
    usual = (1.0 - ODD) * _beta_binomial(slots, flip / topk) + ODD / (slots + 1)
    ratio = 1.0 / ((slots + 1) * usual)
    ratio[: ratio.argmin()] = ratio.min()  # rows with unusual agreement are not foreign
    return np.floor(_GRID * np.log1p(np.outer(SHARES, ratio - 1.0))) / _GRID


def _beta_binomial(count: int, mean: float) -> np.ndarray:
    """float64 [count + 1]: probabilities of a binomial whose rate is beta distributed with a + b = SPREAD."""
    a, b, hits, lgamma = mean * SPREAD, (1.0 - mean) * SPREAD, np.arange(count + 1), np.vectorize(math.lgamma)

    def log_beta(x: Any, y: Any) -> Any:
        return lgamma(x) + lgamma(y) - lgamma(x + y)

    of_choice = log_beta(hits + 1, count - hits + 1)
    return np.exp(log_beta(a + hits, b + count - hits) - log_beta(a, b) - of_choice - math.log(count + 1))


def find_foreign(num_shared: np.ndarray, topk: int, batch: TrainBatch) -> np.ndarray:
    """Return float64 [N, 4]: evidence of the most foreign run, its first and last row, and the foreign rows of all.

    The evidence is the largest CUSUM less ``log(SHARES * T)`` for the T rows of the sequence, in nats, at least 0; over
    ``TRIPWIRES.evidence`` the rows are foreign. Rows count from 0 at the first token of the sequence.
    num_shared: [T', L], the number of experts that routers and rollout share, of the T' tokens with a recorded route.
    """
    present, cu_seqlens = batch.routed_mask, batch.cu_seqlens
    assert present is not None
    runs = np.zeros((batch.num_sequences, 4))
    if not num_shared.size:
        return runs
    ids = segment_ids(cu_seqlens).numpy()[present.numpy()]
    rows = np.flatnonzero(present.numpy()) - cu_seqlens.numpy()[ids]
    num_layers = num_shared.shape[1]
    differing = num_layers * topk - num_shared.sum(1, dtype=np.int32)
    counts = np.bincount(ids, minlength=batch.num_sequences)
    sequences = np.flatnonzero(counts)
    lengths = counts[sequences]
    starts = np.cumsum(lengths) - lengths
    runs[sequences] = _judge(row_scores(num_layers, topk)[:, differing], starts, lengths)
    for index in np.flatnonzero(runs[sequences, 0] > TRIPWIRES.evidence):
        of_one = differing[starts[index] :][: lengths[index]]
        flip = min(math.ceil(20 * (np.median(of_one) + 0.5) / num_layers) / 20, HONEST_FLIPS[1])
        if flip > HONEST_FLIPS[0]:
            scores = row_scores(num_layers, topk, flip)[:, of_one]
            runs[sequences[index]] = _judge(scores, np.zeros(1, int), lengths[[index]])
            runs[sequences[index], 1:3] += starts[index]
    runs[sequences, 1:3] = rows[runs[sequences, 1:3].astype(int)]
    return runs


def _judge(scores: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """float64 [N, 4] as ``find_foreign``, from the scores [SHARES, T']; rows are places in T'."""
    ids, places = np.repeat(np.arange(len(starts)), lengths), np.arange(scores.shape[1])
    walk = np.cumsum(scores, 1) - ids * np.ceil(2.0 * np.abs(scores).sum() + 1.0)  # below all earlier sequences
    starts_at = walk - scores
    lowest = np.minimum.accumulate(starts_at, 1)
    sums = walk - lowest
    begins = np.maximum.accumulate(np.where(starts_at == lowest, places, 0), 1)
    peaks = np.maximum.reduceat(sums, starts, 1)
    ends = np.minimum.reduceat(np.where(sums == peaks[:, ids], places, len(places)), starts, 1)
    best = peaks.argmax(0), np.arange(len(starts))
    last = ends[best]
    counts = np.add.reduceat(scores[0] > math.log1p(SHARES[0] * (FOREIGN - 1.0)), starts, dtype=np.int64)
    evidence = np.maximum(peaks[best] - np.log(len(scores) * lengths), 0.0)
    return np.stack([evidence, begins[best[0], last], last, counts], 1)
