"""What all ranks know of the samples of a step: one row of numbers each, and the metrics that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megarl.core.metrics import Stat
from megarl.megatron import distributed
from megarl.rollout.player import Sample
from megarl.train.sampling.assignment import Key

_COLUMNS = (
    "prompt",
    "sample",
    "reward",
    "judged",
    "tokens",
    "appended",
    "generated",
    "turns",
    "cut",
    "episode_failed",
    "late_reward",
)


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """The samples of all ranks, in the order of (prompt, sample)."""

    rows: np.ndarray
    """float64 [S, C]."""

    @classmethod
    def gather(cls, samples: Mapping[Key, Sample]) -> SampleTable:
        """Exchange the rows of all ranks; a collective call. ``samples`` are this rank's."""
        mine = np.array([_row(key, sample) for key, sample in samples.items()]).reshape(-1, len(_COLUMNS))
        rows = distributed.gather_rows(mine)
        return cls(rows[np.lexsort((rows[:, 1], rows[:, 0]))])

    def column(self, name: str) -> np.ndarray:
        """float64 [S]."""
        return self.rows[:, _COLUMNS.index(name)]

    def rewards(self) -> dict[Key, float | None]:
        """Return rewards by (prompt, sample), None for those that failed."""
        prompts, samples = self.column("prompt").astype(int).tolist(), self.column("sample").astype(int).tolist()
        columns = (prompts, samples, self.column("reward").tolist(), self.is_judged.tolist())
        return {(p, s): reward if judged else None for p, s, reward, judged in zip(*columns, strict=True)}

    @property
    def is_judged(self) -> np.ndarray:
        """bool [S]: whether there is a reward."""
        return self.column("judged") > 0

    def metrics(self, environment: bool, threshold: float) -> dict[str, Stat]:
        """Return means over all samples. They are equal on every rank, so merging ranks does not change them.

        environment: include the metrics of episodes. threshold: larger rewards count in the pass rate.
        """
        judged = self.is_judged
        rewards = self.column("reward")[judged]
        found = {
            "reward/mean": _mean(rewards),
            "reward/pass_rate": _mean(rewards > threshold),
            "reward/error_fraction": _mean(~judged & (self.column("episode_failed") == 0)),
            "reward/late_fraction": _mean(self.column("late_reward")),
            "response/length_mean": _mean(self.column("generated")),
            "response/length_max": Stat.max(torch.from_numpy(self.column("generated").copy())),
            "response/truncated_fraction": _mean(self.column("cut")),
        }
        if environment:
            found |= {
                "episode/turns_mean": _mean(self.column("turns")),
                "episode/environment_tokens_mean": _mean(self.column("appended")),
                "episode/failed_fraction": _mean(self.column("episode_failed")),
            }
        return found


def _mean(values: np.ndarray) -> Stat:
    return Stat.mean(torch.from_numpy(np.asarray(values, dtype=np.float64)))


def _row(key: Key, sample: Sample) -> list[float]:
    rollout = sample.rollout
    return [
        *key,
        0.0 if sample.reward is None else sample.reward,
        sample.reward is not None,
        0 if rollout is None else rollout.num_tokens,
        0 if rollout is None else (~rollout.loss_mask[rollout.prompt_length :]).sum(),
        0 if rollout is None else rollout.loss_mask.sum(),
        sample.turns,
        rollout is not None and rollout.finish_reason == "length",
        sample.episode_error is not None,
        sample.late_reward,
    ]
