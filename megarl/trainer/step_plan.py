"""What a step does, decided before the first pass."""

from dataclasses import dataclass
from typing import Self

from megarl.config import Config


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The passes, measurements and records of a step; equal on all ranks."""

    old_passes: int
    """The last mini-batches of the step, which have an old-log-prob pass before the first update."""
    token_advantages: bool
    """Compute advantages from old and reference log-probabilities."""
    objective_details: bool = True
    """Measure the objective's effect on tokens, beyond the needs of the update."""
    writes_traces: bool = False
    """Keep the routers' own choice in the first pass, and write the routes of the step."""
    evaluates: bool = False
    """Evaluate after the step."""
    saves: bool = False
    """Save a checkpoint after the step."""

    @classmethod
    def of(cls, config: Config, done: int) -> Self:
        """Return the plan of the step after which ``done`` steps are finished."""
        log, train, is_last = config.log, config.train, done == config.run.steps
        return cls(
            old_passes=config.old_passes,
            token_advantages=train.resolved_objective.advantage == "token_level_kl",
            objective_details=is_last or _is_due(done, log.objective_every),
            writes_traces=log.writes_traces(done),
            evaluates=bool(config.eval.every) and (is_last or _is_due(done, config.eval.every)),
            saves=(is_last and config.checkpoint.at_end) or _is_due(done, config.checkpoint.every),
        )


def _is_due(done: int, every: int) -> bool:
    return bool(every) and done % every == 0
