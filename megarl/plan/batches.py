"""How the responses of a step are divided, and how long pipeline stages stand idle."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Config, Layout
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Batches:
    """The arithmetic of one step."""

    responses: int
    """B G of a step."""
    mini_batch: int
    """Responses of an optimizer step."""
    sequences_per_rank: int
    """Of a mini-batch, on one data-parallel rank."""
    longest: int
    """Tokens of the longest prompt with the longest response."""
    fewest: int
    """Micro-batches of a mini-batch if responses are short."""
    most: int
    """The same if all sequences are as long as they may be."""
    optimizer_steps: int
    """Of the whole run."""
    bubble_fewest: float
    """Share of a step's time that a stage is idle with the fewest micro-batches."""
    bubble_most: float
    """The same with the most."""


def batches_of(config: Config, layout: Layout) -> Batches:
    """Divide a step; ConfigError where the interleaved schedule has more micro-batches than sequences."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    multiple = config.parallel.micro_batch_multiple
    together = max(1, config.train.micro_batch_tokens * layout.cp // _padded(longest, layout.cp))
    most = _ceil(-(-layout.sequences_per_rank // together), multiple)
    if most > layout.sequences_per_rank:
        raise ConfigError(
            f"parallel.vpp: the interleaved schedule takes {multiple} micro-batches at a time and may need {most}, but "
            f"a mini-batch gives a rank {layout.sequences_per_rank} sequences; lower train.mini_batches, or raise "
            "rollout.prompts_per_step"
        )
    return Batches(
        responses=config.responses_per_step,
        mini_batch=config.responses_per_step // config.train.mini_batches,
        sequences_per_rank=layout.sequences_per_rank,
        longest=longest,
        fewest=multiple,
        most=most,
        optimizer_steps=config.optimizer_steps,
        bubble_fewest=bubble(layout.pp, layout.vpp, multiple),
        bubble_most=bubble(layout.pp, layout.vpp, most),
    )


def bubble(pp: int, vpp: int | None, micro_batches: int) -> float:
    """Share of a step's time that a stage waits: (pp - 1) / (pp - 1 + m vpp), forward and backward alike."""
    return (pp - 1) / (pp - 1 + micro_batches * (vpp or 1))


def _padded(length: int, cp: int) -> int:
    """Context parallelism pads a sequence to two chunks for each of its ranks."""
    return _ceil(length, 2 * cp) if cp > 1 else length


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
