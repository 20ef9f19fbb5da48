"""Responses that outlast a step (``rollout.max_staleness``): the untrained samples of a rank, complete or paused.

A prompt is named by its place in the run's order. The rank whose turn it is in a step, place modulo B, draws all
samples of the prompt. Each rank applies the window (``megarl.core.sampling.window``) to its own prompts; the batch of a
step is the union over ranks, and a prompt takes the turn of its rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from megarl.config import Config
from megarl.core.metrics import Stat
from megarl.core.sampling.collector import Key
from megarl.core.sampling.window import WindowSamples
from megarl.core.types import Rollout
from megarl.engines.player import Failure, Sample
from megarl.megatron import distributed


@dataclass(eq=False)
class Untrained:
    """The rank's complete and paused samples by (place, sample), and the places that have trained on any rank."""

    config: Config
    turns: list[int]
    """The rank's prompts of a step, 0..B-1."""
    samples: dict[Key, Sample] = field(default_factory=dict)
    """Complete, with or without a reward."""
    paused: dict[Key, Rollout] = field(default_factory=dict)
    first: int = 0
    """All places below have trained, on all ranks."""
    trained: set[int] = field(default_factory=set)
    """Trained places from ``first`` on."""

    def asker(self, step: int, *, ends: bool = True) -> WindowSamples:
        """Return the asker for a step. ends: False after the step's batch has left, for samples of later steps."""
        rollout, size = self.config.rollout, len(self.turns)
        places = (place for place in count(self.first) if place % rollout.prompts_per_step in self.turns)
        most = (rollout.max_staleness + ends) * size
        prompts = [*islice((place for place in places if place not in self.trained), most)]
        responses = {key: sample.rollout for key, sample in self.samples.items()} | self.paused
        oldest = step - rollout.max_staleness
        due = {key[0] for key, response in responses.items() if response and _oldest_version(response) <= oldest}
        most_passed = max(1, int(rollout.window * size)) if rollout.window else 0
        options: Any = {"most_passed": most_passed, "due": due, "arrived": self.samples, "ends": ends}
        return WindowSamples(prompts, rollout.group_size, size, **options)

    def keep(self, samples: Mapping[Key, Sample], paused: Mapping[Key, Rollout]) -> None:
        """Add newly complete samples, and replace the paused responses."""
        self.samples, self.paused = {**self.samples, **samples}, dict(paused)

    def remove(self, places: np.ndarray) -> None:
        """Drop the samples of prompts that have trained; places: int64 [B], of all ranks."""
        self.trained |= set(places.tolist())
        while self.first in self.trained:
            self.trained.remove(self.first)
            self.first += 1
        self.samples = {key: sample for key, sample in self.samples.items() if key[0] not in places}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: "trained", equal on all ranks, and "untrained", the rank's; plain."""
        untrained = [[*key, _to_plain(value)] for key, value in {**self.samples, **self.paused}.items()]
        trained = {"first": self.first, "trained": sorted(self.trained), "limit": self.config.rollout.max_staleness}
        return {"trained": trained, "untrained": untrained}

    def load_state_dict(self, state: Mapping[str, Any], first: int) -> None:
        """Continue from ``state_dict``. Samples of another layout or staleness are drawn again: they are absent.

        first: the next place, for a checkpoint without such samples.
        """
        trained = state.get("trained") or {"first": first, "trained": [], "limit": None}
        self.first, self.trained = trained["first"], set(trained["trained"])
        for place, sample, value in state.get("untrained") or ():
            if trained["limit"] != self.config.rollout.max_staleness:
                break
            if "tokens" in value:
                self.paused[place, sample] = _to_rollout(value)
                continue
            failure = value["failure"] and Failure(**value["failure"])
            parts = {"rollout": value["rollout"] and _to_rollout(value["rollout"]), "failure": failure}
            self.samples[place, sample] = Sample(**value | parts)


def as_batch(samples: Mapping[Key, Sample], batch: Mapping[int, int]) -> dict[Key, Sample]:
    """Return the samples of a batch, places by turn, under (turn, sample)."""
    turn_of = {place: turn for turn, place in batch.items()}
    return {
        (turn, number): replace(sample, rollout=sample.rollout and replace(sample.rollout, group=turn))
        for (place, number), sample in samples.items()
        if (turn := turn_of.get(place)) is not None
    }


def gather_batch(batch: Mapping[int, int], num_paused: int, num_passed: int) -> tuple[np.ndarray, dict[str, Stat]]:
    """Return the place of each turn on any rank, int64 [B], and the metrics of all ranks; a collective call."""
    of_ranks = distributed.gather_objects((batch, num_paused, num_passed))
    place_of = {turn: place for of_rank, _, _ in of_ranks for turn, place in of_rank.items()}
    is_first = distributed.dp_rank() == 0  # sums, equal on all ranks: count once
    totals = {
        "rollout/paused": sum(paused for _, paused, _ in of_ranks),
        "rollout/passed_over": sum(passed for _, _, passed in of_ranks),
    }
    metrics = {name: Stat.total(float(total) * is_first) for name, total in totals.items()}
    return np.array([place_of[turn] for turn in sorted(place_of)]), metrics


def _oldest_version(rollout: Rollout) -> int:
    """The version of the oldest generated token."""
    return int(rollout.weight_versions[rollout.loss_mask].min(initial=np.iinfo(np.int32).max))


def _to_plain(value: Any) -> Any:
    """Records as dicts and arrays as tensors, which a checkpoint may hold."""
    if is_dataclass(value):
        return {item.name: _to_plain(getattr(value, item.name)) for item in fields(value)}
    return torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value


def _to_rollout(value: Mapping[str, Any]) -> Rollout:
    columns: Any = {name: item.numpy() if isinstance(item, torch.Tensor) else item for name, item in value.items()}
    return Rollout(**columns)
