"""The request of ``megarl eval``, checked before torch is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import Config, ParallelConfig, SamplingConfig
from megarl.data.benchmarks import Benchmark, choose
from megarl.errors import ConfigError, refusal

WITHOUT_TRAINING = {"train.micro_batch_tokens": 2**20 * 3 * 5 * 7}
"""Overrides below the user's: responses may be longer than in training. Any likely parallel.tp divides it."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """One evaluation: weights, benchmarks, number of samples."""

    config: Config
    benchmarks: tuple[Benchmark, ...]
    """In the order of the command line; no name twice."""
    samples: int
    ks: tuple[int, ...]
    """The k of pass@k, ascending, none above samples."""
    checkpoint: Path | None = None
    """Step folder, or a folder of a run or of checkpoints, for the newest checkpoint; None: model.path."""
    out: Path | None = None
    """Where results go; None: below run.dir."""

    def layout(self, world_size: int, start: str = "megarl launch eval CONFIG") -> Config:
        """Return the configuration for this number of ranks. Raises ConfigError if a checkpoint's layout does not fit,
        with the command ``start`` that starts enough ranks.

        Without a checkpoint, or on one rank, there is no layout. Batch sizes need not divide: no step trains.
        """
        config = self.config
        parallel = ParallelConfig() if self.checkpoint is None or world_size == 1 else config.parallel
        rollout = {"prompts_per_step": world_size, "group_size": 1}
        changed = {"parallel": parallel, "sampling": SamplingConfig(), "sft": None}
        resolved = with_keys(config, rollout=rollout, train={"mini_batches": 1}).model_copy(update=changed)
        resolved.check_world_size(world_size, start)
        return resolved


def with_keys(config: Config, **tables: dict[str, Any]) -> Config:
    """The configuration with new values in tables, without checks."""
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in tables.items()}
    return config.model_copy(update=changed)


def eval_request(
    config: Config,
    *,
    data: Sequence[str] = (),
    samples: int | None = None,
    ks: Sequence[int] = (),
    template: str | None = None,
    checkpoint: Path | None = None,
    out: Path | None = None,
) -> EvalRequest:
    """Check a command line and its configuration. ConfigError for a contradiction.

    samples: default ``eval.samples``; ks: default the powers of 4 up to samples, and samples.
    """
    number = config.eval.samples if samples is None else samples
    flag = "eval.samples" if samples is None else "--samples"
    if number < 1:
        raise ConfigError(f"{flag}: found {number}, expected at least 1")
    if config.eval.temperature == 0 and number > 1:
        raise ConfigError(refusal("greedy_samples", flag=flag, number=number))
    powers = sorted({*ks} or {*(4**power for power in range(16) if 4**power <= number), number})
    if powers[0] < 1 or powers[-1] > number:
        wrong = powers[0] if powers[0] < 1 else powers[-1]
        raise ConfigError(f"--k: found {wrong}, expected 1 to {flag} = {number}: pass@k needs k samples of a prompt")
    return EvalRequest(config, choose(data, config, template), number, tuple(powers), checkpoint, out)
