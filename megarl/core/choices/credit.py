"""Credit of the samples that adaptive sampling selects, and the names of objectives f(p). Imports no torch.

A rule that looks at rewards trains on samples that are not a fair draw from the policy. The record says which samples
give the baseline, and whether the bias of the selection is removed.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from megarl.core.choices.parts import PoolScale
from megarl.errors import ConfigError

Statistics = Literal["pool", "trained"]
Combination = Literal["plain", "unbiased"]
Weigh = Literal["sample", "prompt"]

_CHOICES = {"statistics": Statistics, "scale": PoolScale, "combination": Combination, "weigh": Weigh}


@dataclass(frozen=True, slots=True)
class Credit:
    """How selected samples are credited; the defaults are the released Reinforce-Ada's. ConfigError for other names."""

    statistics: Statistics = "pool"
    """Which samples give mean and standard deviation: all that were drawn of the prompt, or those that train. The
    latter makes a prompt with 2 of 32 correct look like one with 2 of 4. The released code rebuilds the pool from
    counts, which needs rewards of 0 and 1, and gives a pool of one the mean 0; here its advantage is 0."""
    scale: PoolScale = "none"
    """The divisor: 1, the standard deviation, the pass rate or its root. The sources disagree: the code divides by
    nothing, the paper's third version by the pass rate in one place and by nothing in another; a post recommends 1 / p,
    which the same paper found to deteriorate. A pool of equal rewards gives 0, also for a solved prompt."""
    ddof: int = 1
    """Of the standard deviation: 1 unbiased, 0 population."""
    floor: float = 1e-6
    """Least standard deviation to divide by."""
    rate_eps: float = 0.0
    """Added to the pass rate before it divides; Ada-Est: scale "root_rate" with 1e-3."""
    combination: Combination = "plain"
    """"unbiased": of n samples that train, each of n+ positives gets v n / n+ and each of n- negatives -v n / n-,
    with v an unbiased estimate of p (1 - p) from the pool (``unbiased_rates``). Statistics and scale are not used. The
    expectation is then grad p, with p the rate of rewards above the rule's threshold, for any selection by class.
    "plain" with a balanced batch has c(p) grad p, ``c = (q^2 + p^2) / (2 p q)`` (docs/sampling.md)."""
    objective: str | None = None
    """Maximise f(p) by the weight f'(p), with the pool's pass rate (``objective_slope``); None for no weight. Do not
    combine it with counts allotted for f, scale "std" and weigh "sample": a sum over ``n ~ f' std`` samples with
    ``1 / std`` has the factor ``f'`` already."""
    weigh: Weigh = "sample"
    """What has equal weight: each sample, or each prompt."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"credit: {name} is {getattr(self, name)!r}, expected one of {get_args(choices)}")
        if self.combination == "unbiased" and (self.scale != "none" or self.statistics != "pool"):
            raise ConfigError(
                'credit: combination "unbiased" uses neither scale nor other statistics; leave these at their defaults'
            )
        if self.objective is not None:
            parse_objective(self.objective)


def parse_allocation(name: str) -> tuple[str, float]:
    """Return the kind of an allocation and its exponent: ("inverse", A) for "inverse:A", n ~ 1 / (p + eps)^A.

    "ada_est" is "inverse:0.5". Any other name is an objective's, whose gradient then has the least variance.
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
        raise ConfigError(
            f'objective {objective!r} is unknown; expected "log", "raft", "linear", "arcsin" or "power:A" with a '
            'number A > 0, as in "power:0.5"'
        )
    return kind, exponent
