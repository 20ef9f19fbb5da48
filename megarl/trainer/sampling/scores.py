"""The scores of an evaluation: avg@k, pass@k and confidence intervals, from the rewards.

A response is correct if its reward is above ``reward.threshold``. A response without a reward, because the reward
function or the environment failed, counts as wrong: a share of the judged responses would be no pass rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.choices.stopping import POSITIVE
from megarl.core.sampling.pass_at_k import Interval, fixed_prompts_interval, mean_interval, pass_at_k, wilson_interval

LEVEL = 0.95
"""Confidence of all intervals."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a benchmark: S samples of each of P prompts."""

    rewards: np.ndarray
    """float64 [P, S]; NaN without a reward."""
    lengths: np.ndarray
    """int64 [P, S], tokens of the response."""
    truncated: np.ndarray
    """bool [P, S], cut off at the length limit."""
    threshold: float = POSITIVE
    """A larger reward is a correct response."""

    @property
    def num_judged(self) -> np.ndarray:
        """int64 [P], samples with a reward."""
        return np.isfinite(self.rewards).sum(axis=1)

    @property
    def num_correct(self) -> np.ndarray:
        """int64 [P], correct samples."""
        return (self.rewards > self.threshold).sum(axis=1)  # NaN is not


def score(samples: Samples, ks: Sequence[int]) -> dict[str, Any]:
    """Return all scores of a benchmark as plain numbers; None where a score is undefined."""
    (num_prompts, number), c = samples.rewards.shape, samples.num_correct
    n, judged = np.full(num_prompts, number), int(samples.num_judged.sum())
    fixed = fixed_prompts_interval(n, c, LEVEL) if number > 1 else None
    return {
        "prompts": num_prompts,
        "samples": number,
        "responses": num_prompts * number,
        "judged": judged,
        "avg": {**_average(c / n, is_binary=number == 1), "other_samples": _clip(fixed)},
        "pass": {str(k): _average(pass_at_k(n, c, k), is_binary=k == number) for k in ks},
        "reward_mean": float(np.nanmean(samples.rewards)) if judged else None,
        "length_mean": float(samples.lengths.mean()),
        "truncated": float(samples.truncated.mean()),
    }


def score_prompts(samples: Samples) -> list[dict[str, Any]]:
    """Return samples and pass rate by prompt, with Wilson's interval."""
    number = samples.rewards.shape[1]
    return [
        {
            "judged": judged,
            "correct": correct,
            "pass_rate": correct / number,
            "other_samples": _clip(wilson_interval(correct, number, LEVEL)),
        }
        for judged, correct in zip(samples.num_judged.tolist(), samples.num_correct.tolist(), strict=True)
    ]


def _average(values: np.ndarray, *, is_binary: bool) -> dict[str, Any]:
    # A value is a single draw of 0 or 1: the normal interval would have no width where all prompts agree.
    if is_binary:
        interval = wilson_interval(int(values.sum()), values.size, LEVEL)
    else:
        interval = mean_interval(values, LEVEL) if values.size > 1 else None
    return {"value": float(values.mean()), "other_prompts": _clip(interval), "prompts": int(values.size)}


def _clip(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [max(interval.low, 0.0), min(interval.high, 1.0)]
