"""How the responses of a step are divided, and how long pipeline stages stand idle."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Config, Layout
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
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
    """Micro-batches of a mini-batch if all sequences have the maximum length."""
    optimizer_steps: int
    """Of the whole run."""
    bubble_fewest: float
    """Share of a step's time that a stage is idle with the fewest micro-batches."""
    bubble_most: float
    """The same with the most."""


def divide_step(config: Config, layout: Layout) -> Schedule:
    """Divide a step; ConfigError where the interleaved schedule has more micro-batches than sequences."""
    longest, cp = longest_sequence(config), layout.cp
    multiple = config.parallel.micro_batch_multiple
    padded = _round_up(longest, 2 * cp) if cp > 1 else longest  # two chunks of each sequence for each of cp ranks
    together = max(1, config.train.micro_batch_tokens * cp // padded)
    most = _round_up(-(-layout.sequences_per_rank // together), multiple)
    if most > layout.sequences_per_rank:
        raise ConfigError(
            f"parallel.vpp: the interleaved schedule takes {multiple} micro-batches at a time and may need {most}, but "
            f"a mini-batch gives a rank {layout.sequences_per_rank} sequences; lower train.mini_batches, or raise "
            "rollout.prompts_per_step"
        )
    return Schedule(
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


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def bubble(pp: int, vpp: int | None, micro_batches: int) -> float:
    """Share of a step's time that a stage waits: (pp - 1) / (pp - 1 + m vpp), forward and backward alike."""
    return (pp - 1) / (pp - 1 + micro_batches * (vpp or 1))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
