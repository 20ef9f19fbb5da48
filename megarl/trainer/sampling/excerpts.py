"""The model's texts for responses.jsonl.gz: a few of a rank's samples, or all samples, decoded."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.core.types import Rollout
from megarl.data.prompts import Prompt
from megarl.engines.player import Sample
from megarl.trainer.sampling.assignment import Key

Excerpt = dict[str, Any]


def choose(keys: Sequence[Key], count: int | Literal["all"], step: int) -> list[Key]:
    """Return ``count`` of the keys, evenly spread over the prompts and different in each step, or all keys."""
    keys = sorted(keys)
    if count == "all" or count >= len(keys):
        return keys
    return [keys[(index * len(keys) // count + step) % len(keys)] for index in range(count)]


def describe(sample: Sample, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, names: Sequence[str]) -> Excerpt:
    """Return the text and the facts of a sample, without the results of training.

    names: of several rewards. A sample whose episode failed in the first turn has an empty response.
    """
    rollout = sample.rollout
    excerpt: Excerpt = {"prompt": prompt.text, "response": "", "parts": [], "length": 0, "finish": "abort"}
    if rollout is not None:
        texts = {"prompt": rollout.tokens[: rollout.prompt_length], "response": rollout.response_tokens}
        excerpt |= {name: tokenizer.decode(tokens.tolist()) for name, tokens in texts.items()}
        excerpt |= {"parts": _split(rollout, tokenizer), "length": int(rollout.loss_mask.sum())}
        excerpt |= {"finish": rollout.finish_reason}
    return excerpt | {
        "expected": prompt.answer,
        "reward": None if sample.reward is None else float(sample.reward),
        "rewards": {name: float(value) for name, value in zip(names, sample.components, strict=False)},
        "error": sample.failure and sample.failure.error,
        "tool_calls": sum(author == "environment" for author, _ in excerpt["parts"]),
    }


def _split(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """The response by author, if the environment wrote a part; calls of tools belong to the model's parts."""
    mask = rollout.loss_mask[rollout.prompt_length :]
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)] if len(mask) else []
    tokens = rollout.response_tokens
    return [
        ["model" if mask[begin] else "environment", str(tokenizer.decode(tokens[begin:end].tolist()))]
        for begin, end in pairwise(bounds if len(bounds) > 2 else ())
    ]


def complete(
    excerpts: Mapping[Key, Excerpt], step: int, rank: int, places: np.ndarray, trained: np.ndarray,
    gaps: Sequence[np.ndarray], dropped: Mapping[Key, str],
) -> list[Excerpt]:  # fmt: skip
    """Add the results of training: was the sample trained, the gap between the engines, the reason of a drop.

    places: int64 [B], of the prompts in the run's order; trained: int64 [n, 2] (place, sample); gaps: float64 [n, 5 or
    more] each, as in ``megarl.watch.tripwires``; dropped: by (group, sample) of the step.
    """
    rows = np.concatenate([np.zeros((0, 5)), *(of_rank[:, :5] for of_rank in gaps)])
    rows = rows[(rows[:, 4] > 0) & np.isin(rows[:, 0], [prompt for prompt, _ in excerpts])]
    of_key = dict(zip(map(tuple, rows[:, :2].tolist()), (rows[:, 3] / rows[:, 4]).tolist(), strict=True))
    trains = set(map(tuple, trained.tolist()))
    return [
        {
            **excerpt,
            "step": step,
            "group": int(places[prompt]),
            "sample": sample,
            "rank": rank,
            "gap": of_key.get((prompt, sample)),
            "trained": (places[prompt], sample) in trains and (prompt, sample) not in dropped,
            "dropped": dropped.get((prompt, sample)),
        }
        for (prompt, sample), excerpt in excerpts.items()
    ]
