"""From the rewards of a group of responses to one advantage per response, or per token.

A group is all responses to one prompt. Statistics include the response itself, and must be taken before a step is split
into mini-batches. With a baseline of its own prompt, a group without contrast (uniform rewards, or a single response)
gives exactly 0: no policy gradient remains, and rounding must not add noise.

- ``groups``: from the rewards of a group alone.
- ``weighted``: statistics over tokens (a response weighs with its length); several rewards per response.
- ``tokens``: advantages that differ between the tokens of a response.
"""

from megarl.core.advantages.groups import (
    Values,
    group_mean,
    grpo,
    normalize_by_pool,
    positive_part,
    raft,
    raw,
    raw_mixed,
    rloo,
    signed,
    uniform_groups,
)
from megarl.core.advantages.tokens import token_level_kl, token_level_returns
from megarl.core.advantages.weighted import gdpo, grpo_sum, opo, reinforce_pp, reinforce_pp_baseline, whiten

__all__ = [
    "Values",
    "gdpo",
    "group_mean",
    "grpo",
    "grpo_sum",
    "normalize_by_pool",
    "opo",
    "positive_part",
    "raft",
    "raw",
    "raw_mixed",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "signed",
    "token_level_kl",
    "token_level_returns",
    "uniform_groups",
    "whiten",
]
