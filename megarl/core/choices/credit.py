"""Credit of the samples selected by adaptive sampling, and the names of objectives f(p). Imports no torch.

If a sampling rule reads rewards, the selected samples are no fair draw from the policy. With "plain" advantages of a
balanced batch the expected gradient is c(p) grad p, ``c = (q^2 + p^2) / (2 p q)`` (docs/sampling.md).
"""

from dataclasses import dataclass
from typing import Literal

from megarl.core.choices.parts import PoolScale
from megarl.errors import ConfigError, refusal

Statistics = Literal["pool", "trained"]
Weigh = Literal["sample", "prompt"]


@dataclass(frozen=True, slots=True)
class Credit:
    """How selected samples are credited; defaults of the released Reinforce-Ada. ConfigError for an unknown objective.

    The table [credit] checks the other names.
    """

    statistics: Statistics = "pool"
    """Samples for mean and standard deviation: all drawn samples of the prompt, or the trained samples. "trained" makes
    a prompt with 2 of 32 correct look like a prompt with 2 of 4. The released code rebuilds the pool from counts (for
    rewards of 0 and 1) and gives a pool of one the mean 0; here the advantage of a pool of one is 0."""
    scale: PoolScale = "none"
    """The divisor: 1, the standard deviation, the pass rate or the root of the pass rate. The sources disagree: no
    divisor in the code; the pass rate or no divisor in the paper's third version; 1 / p in a post, although the paper
    found 1 / p to deteriorate. A pool of equal rewards gives 0, also for a solved prompt."""
    ddof: int = 1
    """Of the standard deviation: 1 unbiased, 0 population."""
    floor: float = 1e-6
    """Least standard deviation to divide by."""
    rate_eps: float = 0.0
    """Added to the pass rate before the division; Ada-Est: scale "root_rate" with 1e-3."""
    objective: str | None = None
    """Maximise f(p) by the weight f'(p), with the pool's pass rate (``objective_slope``); None for no weight. Do not
    combine with counts allotted for f, scale "std" and weigh "sample": a sum over ``n ~ f' std`` samples with
    ``1 / std`` already has the factor ``f'``."""
    weigh: Weigh = "sample"
    """Units of equal weight: samples, or prompts."""

    def __post_init__(self) -> None:
        if self.objective is not None:
            parse_objective(self.objective)


def parse_allocation(name: str) -> tuple[str, float]:
    """Return the kind of an allocation and its exponent: ("inverse", A) for "inverse:A", n ~ 1 / (p + eps)^A.

    "ada_est" is "inverse:0.5". Any further name is an objective: counts of least gradient variance. ConfigError for
    an unknown name.
    """
    if name == "ada_est":
        return "inverse", 0.5
    kind, _, text = name.partition(":")
    return ("inverse", parse_objective(f"power:{text}")[1]) if kind == "inverse" else parse_objective(name)


def parse_objective(objective: str) -> tuple[str, float]:
    """Return the kind, "linear" | "log" | "raft" | "arcsin" | "power", and the exponent A of "power:A" (else 1).

    Raises ConfigError for any other name.
    """
    if objective in ("linear", "log", "raft", "arcsin"):
        return objective, 1.0
    kind, _, text = objective.partition(":")
    try:
        exponent = float(text)
    except ValueError:
        exponent = 0.0
    if kind != "power" or not 0 < exponent < float("inf"):
        raise ConfigError(refusal("objective_of_allocation", objective=objective))
    return kind, exponent
