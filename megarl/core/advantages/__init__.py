"""From the rewards of a group of responses to one advantage per response, or per token.

A group is all responses to one prompt. Statistics include the response itself, and must be taken before a step is split
into mini-batches. With a baseline of its own prompt, a group without contrast (uniform rewards, or a single response)
gives exactly 0: no policy gradient remains, and rounding must not add noise.

- ``groups``: from the rewards of a group alone.
- ``weighted``: statistics over tokens (a response weighs with its length); several rewards per response.
- ``tokens``: advantages that differ between the tokens of a response.
"""

from megarl.core.advantages.groups import group_mean, grpo, raft, rloo
from megarl.core.advantages.tokens import token_level_kl

__all__ = ["group_mean", "grpo", "raft", "rloo", "token_level_kl"]
