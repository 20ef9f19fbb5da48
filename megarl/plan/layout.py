"""Which rank holds what: the divisions of a layout, and the layers of each pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

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
    """What one pipeline rank holds."""

    rank: int
    chunks: tuple[tuple[int, ...], ...]
    """0-based global layers of each model chunk; one chunk, or vpp of them."""
    is_first: bool
    """Holds the embedding."""
    is_last: bool
    """Holds the final norm and the output layer."""

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
    per_chunk = [count // vpp for count in counts]
    found = []
    for rank in range(len(counts)):
        starts = [chunk * sum(per_chunk) + sum(per_chunk[:rank]) for chunk in range(vpp)]
        chunks = tuple(tuple(range(start, start + per_chunk[rank])) for start in starts)
        found.append(Stage(rank, chunks, rank == 0, rank == len(counts) - 1))
    return found


def _layers_per_stage(config: Config, num_layers: int) -> list[int]:
    pp, given = config.parallel.pp, config.megatron
    for key in _UNKNOWN:
        if given.get(key):
            raise ConfigError(
                f"megarl plan does not know megatron.{key}; divide layers with num_layers_in_first_pipeline_stage and "
                "num_layers_in_last_pipeline_stage"
            )
    ends = {0: given.get("num_layers_in_first_pipeline_stage")} if pp > 1 else {}
    if pp > 1:
        ends[pp - 1] = given.get("num_layers_in_last_pipeline_stage")
    fixed = {rank: count for rank, count in ends.items() if count is not None}
    rest, ranks = num_layers - sum(fixed.values()), pp - len(fixed)
    if rest < ranks or (rest % ranks if ranks else rest):
        raise ConfigError(
            f"parallel.pp: found {pp} stages for {num_layers} layers, of which {rest} are left for {ranks} of them, "
            "expected a multiple; change parallel.pp, or set megatron.num_layers_in_first_pipeline_stage or "
            "num_layers_in_last_pipeline_stage"
        )
    return [fixed.get(rank, rest // ranks if ranks else 0) for rank in range(pp)]


def dense_ranks(layout: Layout) -> int:
    """Ranks that share the optimizer states of a dense parameter: dp * cp."""
    return layout.dp * layout.cp
