"""Kept sets: the vocabulary ids that each generated token was drawn from, where sampling leaves out the others.

Training computes log-probabilities over the same sets, as DeepSeek-V3.2 does (2512.02556, section 3.1, "Keep Sampling
Mask"). A token without a set was drawn from the whole vocabulary, or not drawn at all.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.core.types import Rollout
from megarl.errors import RolloutError


def check_kept(rollout: Rollout) -> None:
    """RolloutError unless the rollout has no sets, or one with the token itself for each token of the loss."""
    counts, ids = rollout.kept_counts, rollout.kept_ids
    if counts is None and ids is None:
        return
    label = rollout.label
    shapes = [None if values is None else list(values.shape) for values in (counts, ids)]
    if counts is None or ids is None or shapes != [[rollout.num_tokens], [int(counts.sum())]] or counts.min() < 0:
        raise RolloutError(
            f"{label}: kept_counts and kept_ids are {shapes[0]} and {shapes[1]}, expected [{rollout.num_tokens}] "
            "counts, and as many ids as they sum up to"
        )
    owner = np.repeat(np.arange(rollout.num_tokens), counts)
    num_hits = np.bincount(owner[ids == rollout.tokens[owner]], minlength=rollout.num_tokens)
    wrong = num_hits != np.where(rollout.loss_mask, 1, counts > 0)
    if wrong.any():
        token = int(wrong.argmax())
        raise RolloutError(
            f"{label}: the {counts[token]} ids that token {token} was drawn from hold it {num_hits[token]} times, "
            "expected once: the engine has recorded the sets of other tokens"
        )
    rows = owner * (1 << 32) + ids
    if (np.diff(rows) <= 0).any() and len(np.unique(rows)) < len(rows):  # ascending ids are distinct without a search
        raise RolloutError(
            f"{label}: an id is twice in the set of a token; the softmax over the set would count it twice"
        )


def pack_kept(rollouts: Sequence[Rollout]) -> tuple[Tensor | None, Tensor | None]:
    """Return kept_ids int32 [M] and kept_offsets int64 [T+1] of rollouts back to back; (None, None) if none has sets.

    RolloutError if only some of the rollouts with loss have them.
    """
    if all(rollout.kept_counts is None for rollout in rollouts):
        return None, None
    counts, ids = [np.zeros(1, np.int64)], []
    for rollout in rollouts:
        if rollout.kept_counts is None or rollout.kept_ids is None:
            if rollout.loss_mask.any():
                raise RolloutError(f"{rollout.label} has no kept sets, but others of the batch do")
            counts.append(np.zeros(rollout.num_tokens, np.int64))
        else:
            counts.append(rollout.kept_counts.astype(np.int64))
            ids.append(rollout.kept_ids.astype(np.int32, copy=False))
    return torch.from_numpy(np.concatenate(ids)), torch.from_numpy(np.concatenate(counts).cumsum())
