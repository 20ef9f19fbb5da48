"""Advantages of the selected responses, from rewards alone. Every rank computes them for the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from megarl.config import Config
from megarl.core.choices.credit import Credit
from megarl.core.choices.parts import TOKEN_ADVANTAGES
from megarl.core.objectives import Objective, select_responses, sequence_advantages, step_advantages
from megarl.core.sampling.collector import Selection
from megarl.core.sampling.credit_assignment import assign
from megarl.errors import ConfigError
from megarl.rollout.player import Sample
from megarl.train.sampling.assignment import Key
from megarl.train.sampling.step_rollouts import CopyShare


def response_advantages(config: Config, objective: Objective, selection: Selection) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantage of each selected response, float64 [N], and whether it trains, bool [N].

    Advantages are 0 where the objective has one per token. ConfigError if a reward is negative where credit divides by
    pass rates.
    """
    rewards, groups, threshold = selection.rewards, selection.prompts, config.reward.threshold
    trains = select_responses(objective, rewards, groups, threshold).numpy()
    if config.sampling.uses_credit:
        credit = config.credit_record
        _require_rates(credit, selection)
        values, weights = assign(credit, selection, trains)
        return values * weights, trains
    if objective.advantage in TOKEN_ADVANTAGES:
        return np.zeros(len(rewards)), trains
    # The objective has its own advantages; only the weights of the prompts come from credit assignment.
    _, weights = assign(replace(config.credit_record, combination="plain", scale="none"), selection, trains)
    return sequence_advantages(objective, rewards, groups, threshold).double().numpy() * weights, trains


def process_advantages(
    objective: Objective, share: CopyShare, selection: Selection, samples: Mapping[Key, Sample]
) -> list[list[np.ndarray]] | None:
    """Return the advantages of process rewards, one per token of each rollout of the share; a collective call.

    None for other objectives. ``samples``: this rank's.
    """
    if objective.advantage != "process":
        return None
    mine = {
        # A response that was judged as a whole is one step.
        key: sample.steps or ((sample.rollout.num_tokens - 1, sample.reward),)
        for key, sample in samples.items()
        if sample.reward is not None and sample.rollout is not None
    }
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    steps = {key: each for of_rank in gathered for key, each in of_rank.items()}
    placed = [list(zip(*part, strict=True)) for part in zip(share.rollouts, share.rows, strict=True)]
    keys = selection.keys
    length_of = {row: rollout.num_tokens for part in placed for rollout, row in part}
    lengths = [length_of.get(row, 0) for row in range(len(keys))]  # 0: another model copy has it
    values = step_advantages(objective, [steps[key] for key in keys], selection.prompts, lengths)
    return [
        [values[row] if row < len(keys) else np.zeros(rollout.num_tokens) for rollout, row in part] for part in placed
    ]


def _require_rates(credit: Credit, selection: Selection) -> None:
    """Raise ConfigError at the first negative reward, not at the first prompt whose mean is negative."""
    if credit.combination == "unbiased" or credit.scale not in ("rate", "root_rate"):
        return
    least = min((float(pool.values().min(initial=np.inf)) for pool in selection.pools), default=0.0)
    if least < 0:
        raise ConfigError(
            f'credit.scale: found "{credit.scale}", which divides by the mean of rewards from 0 to 1, but a reward is '
            f'{least:g}; set credit.scale = "none" or "std", or change the reward'
        )
