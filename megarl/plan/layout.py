"""How a run divides: layers over pipeline stages, and the responses of a step over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from megarl.config import Config, Layout
from megarl.errors import ConfigError
from megarl.models.shapes import ModelShape

_UNKNOWN = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of Megatron that divide layers in ways that are not computed here."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline rank holds: the first stage also the embedding, the last final norm and output layer."""

    rank: int
    chunks: tuple[tuple[int, ...], ...]  # 0-based global layers of each model chunk; one chunk, or vpp of them
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)


def stages_of(config: Config, shape: ModelShape) -> list[Stage]:
    """The pipeline stages; ConfigError if the layers do not come out even.

    Stage p has n_p layers, n_p / vpp in each chunk; chunk v of stage p follows chunk v of stage p - 1.
    """
    counts = _layers_per_stage(config, shape.num_layers)
    vpp = config.parallel.vpp or 1
    for count in counts:
        if count % vpp:
            raise ConfigError(
                f"parallel.vpp: found {vpp} with {count} layers on a pipeline rank, expected a divisor; change "
                "parallel.vpp or parallel.pp"
            )
    bounds = [0, *accumulate(count // vpp for _ in range(vpp) for count in counts)]
    layers = [tuple(range(*pair)) for pair in pairwise(bounds)]
    pp = len(counts)
    return [Stage(rank, tuple(layers[rank::pp]), rank == 0, rank == pp - 1) for rank in range(pp)]


def _layers_per_stage(config: Config, num_layers: int) -> list[int]:
    pp, given = config.parallel.pp, config.megatron
    for key in _UNKNOWN:
        if given.get(key):
            raise ConfigError(
                f"megarl plan does not know megatron.{key}; divide layers with num_layers_in_first_pipeline_stage and "
                "num_layers_in_last_pipeline_stage"
            )
    ends = ((0, "num_layers_in_first_pipeline_stage"), (pp - 1, "num_layers_in_last_pipeline_stage"))
    fixed = {rank: given[key] for rank, key in ends if pp > 1 and given.get(key) is not None}
    rest, ranks = num_layers - sum(fixed.values()), pp - len(fixed)
    if rest < ranks or (rest % ranks if ranks else rest):
        raise ConfigError(
            f"parallel.pp: found {pp} stages for {num_layers} layers, of which {rest} are left for {ranks} of them, "
            "expected a multiple; change parallel.pp, or set megatron.num_layers_in_first_pipeline_stage or "
            "num_layers_in_last_pipeline_stage"
        )
    return [fixed.get(rank, rest // ranks if ranks else 0) for rank in range(pp)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The arithmetic of one step."""

    responses: int  # B G of a step
    mini_batch: int  # responses of an optimizer step
    sequences_per_rank: int  # of a mini-batch, on one data-parallel rank
    longest: int  # tokens of the longest prompt with the longest response
    fewest: int  # micro-batches of a mini-batch if responses are short
    most: int  # micro-batches of a mini-batch if all sequences have the maximum length
    optimizer_steps: int  # of the whole run
    bubble_fewest: float  # share of a step's time that a stage is idle with the fewest micro-batches
    bubble_most: float


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
