"""What a model copy trains on in a step, and the exchange of rollouts between its ranks.

Ranks exchange rollouts without their routes. Each rank needs other rows of the routes, so routes stay on the rank that
drew them until the step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch.distributed as dist

from megarl.core.metrics import Stat
from megarl.core.packing import drop_routes
from megarl.core.sampling.collector import Selection
from megarl.core.types import Rollout
from megarl.errors import RolloutError
from megarl.megatron import distributed
from megarl.rollout.player import Sample
from megarl.train.sampling.assignment import Key
from megarl.train.token_advantages import Judged


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """What one data-parallel rank trains on in a global step."""

    mini_batches: list[list[Rollout]]
    """Rollouts by mini-batch, in the order of the sequences; equally many on all ranks."""
    advantages: list[np.ndarray] | list[list[np.ndarray]]
    """By mini-batch, float64: one per rollout, or for process rewards one per token of each rollout. All 0 where the
    objective computes them from log-probabilities."""
    judged: Judged
    """The rewards that such an objective needs."""
    metrics: dict[str, Stat]
    """Rewards are over the whole step and equal on all ranks; the rest is of this rank's rollouts."""
    first_error: str | None
    """The first error of a reward or an environment on this rank."""
    trained: list[Key]
    """All samples that train, on any rank: (place of the prompt in the run's order, sample). No two steps share one."""

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that sampled any token of this rank's rollouts."""
        return min(int(rollout.weight_versions.min()) for part in self.mini_batches for rollout in part)

    def drop_routes(self) -> None:
        """Free the routes, once every rank has its rows of them."""
        for part in self.mini_batches:
            part[:] = [drop_routes(rollout) for rollout in part]


@dataclass(frozen=True, slots=True)
class CopyShare:
    """The rollouts of a model copy, by mini-batch; equally many in all copies."""

    rollouts: list[list[Rollout]]
    rows: list[list[int]]
    """For each rollout its row in the selection. Dummies and samples that are not selected have the number of rows."""

    def mask_unless(self, trains: np.ndarray) -> list[list[Rollout]]:
        """Return the rollouts, with an empty loss mask for those that do not train. ``trains``: bool [rows].

        They keep their place in the batch, but count in no denominator.
        """
        counts = np.append(trains, False)
        parts = [list(zip(*part, strict=True)) for part in zip(self.rollouts, self.rows, strict=True)]
        return [[rollout if counts[row] else _without_loss(rollout) for rollout, row in part] for part in parts]

    def without_dummies(self, own: list[list[Key]]) -> list[Rollout]:
        """Return each rollout of ``own`` once."""
        wanted = {key for part in own for key in part}
        by_key = {(rollout.group, rollout.sample): rollout for part in self.rollouts for rollout in part}
        return [rollout for key, rollout in by_key.items() if key in wanted]


def exchange_rollouts(own: list[list[Key]], selection: Selection, samples: Mapping[Key, Sample]) -> CopyShare:
    """Exchange rollouts between the ranks of a model copy, and fill up so that all copies have equally many.

    A collective call. own: equal on the ranks of a model copy; samples: this rank's.
    """
    mine = {key: sample.rollout for key, sample in samples.items() if sample.rollout is not None}
    wanted = {key for part in own for key in part}
    # Each rank also offers its shortest rollout: the copy may need a dummy and have nothing else.
    shortest = min(mine, key=lambda key: (mine[key].num_tokens, key), default=None)
    offered = [drop_routes(rollout) for key, rollout in mine.items() if key in wanted or key == shortest]
    found = {(rollout.group, rollout.sample): rollout for rollout in distributed.gather_rollouts(offered)}
    found |= {key: mine[key] for key in found if key in mine}  # this rank's, with their routes
    failure = None if found else RolloutError("this rank's model copy drew no complete response to hold its place")
    distributed.fail_together(failure, "sampling")
    dummy = min(found, key=lambda key: (found[key].num_tokens, key))
    row_of = {key: row for row, key in enumerate(selection.keys)}
    share = CopyShare([], [])
    for part in own:
        size = distributed.largest(max(len(part), 1), dist.group.WORLD)
        keys = [key if key in found else dummy for key in part] + [dummy] * (size - len(part))
        rows = [row_of.get(key, len(row_of)) if key in found else len(row_of) for key in part]
        share.rollouts.append([found[key] for key in keys])
        share.rows.append(rows + [len(row_of)] * (size - len(part)))
    return share


def _without_loss(rollout: Rollout) -> Rollout:
    return replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask))
