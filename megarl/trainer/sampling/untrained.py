"""Responses that outlast a step (``rollout.max_staleness``): the untrained samples of a rank, complete or paused.

A prompt is named by its place in the run's order. The rank whose turn it is in a step, place modulo B, draws all
samples of the prompt. Each rank applies the window (``megarl.core.sampling.window``) to its own prompts; the batch of a
step is the union over ranks, and a prompt takes the turn of its rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import count, islice
from typing import Any, Self

import numpy as np
import torch

from megarl.config import Config
from megarl.core.metrics import Stat
from megarl.core.sampling.collector import Key
from megarl.core.sampling.window import WindowSamples
from megarl.core.types import Rollout
from megarl.engines.player import Draw, Failure, Sample
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
        """Return the asker for a step; ends: False after the step's batch has left, for samples of the next steps."""
        rollout, size = self.config.rollout, len(self.turns)
        places = (place for place in count(self.first) if place % rollout.prompts_per_step in self.turns)
        limit = (rollout.max_staleness + ends) * size
        prompts = [*islice((place for place in places if place not in self.trained), limit)]
        responses = {key: sample.rollout for key, sample in self.samples.items()} | self.paused
        oldest = step + (not ends) - rollout.max_staleness
        due = {key[0] for key, response in responses.items() if response and _oldest_version(response) <= oldest}
        most_passed = max(1, int(rollout.window * size)) if rollout.window else 0
        options: Any = {"most_passed": most_passed, "due": due, "arrived": self.samples, "ends": ends}
        return WindowSamples(prompts, rollout.group_size, size, **options)

    def take(self, draw: Draw) -> tuple[dict[Key, Sample], np.ndarray, dict[str, Stat], Self]:
        """Return the samples of a step by (turn, sample), the place of each turn [B], metrics, and what remains.

        draw: has ended. A collective call.
        """
        assert isinstance(draw.asker, WindowSamples)
        samples, paused, decided = {**self.samples, **draw.samples}, draw.unfinished, draw.asker.choose()
        assert decided is not None, "sampling has ended before the batch was complete"
        batch = dict(zip(decided[0], self.turns, strict=True))
        batches, *counts = zip(*distributed.gather_objects((batch, len(paused), decided[1])), strict=True)
        turn_of = {place: turn for of_rank in batches for place, turn in of_rank.items()}
        is_first = distributed.dp_rank() == 0  # sums, equal on all ranks: count once
        metrics = {
            name: Stat.total(float(sum(of_ranks)) * is_first)
            for name, of_ranks in zip(("rollout/paused", "rollout/passed_over"), counts, strict=True)
        }
        of_step = {
            (turn, number): replace(sample, rollout=sample.rollout and replace(sample.rollout, group=turn))
            for (place, number), sample in samples.items()
            if (turn := batch.get(place)) is not None
        }
        samples = {key: sample for key, sample in samples.items() if key[0] not in batch}
        trained = self.trained | turn_of.keys()
        first = next(place for place in count(self.first) if place not in trained)
        trained = {place for place in trained if place > first}
        remainder = replace(self, samples=samples, paused=paused, first=first, trained=trained)
        return of_step, np.array(sorted(turn_of, key=turn_of.__getitem__)), metrics, remainder

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
        fits = trained["limit"] == self.config.rollout.max_staleness
        for *key, value in (fits and state.get("untrained")) or ():
            if "tokens" in value:
                self.paused[tuple(key)] = _to_rollout(value)
            else:
                failure = value["failure"] and Failure(**value["failure"])
                records = {"rollout": value["rollout"] and _to_rollout(value["rollout"]), "failure": failure}
                self.samples[tuple(key)] = Sample(**value | records)


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
