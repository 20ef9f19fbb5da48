"""How what adaptive sampling selected is credited: the record. Imports no torch, so that a configuration can make it.

A rule that looks at rewards trains on samples that are no fair draw from the policy. What that does to the gradient is
decided here: whose statistics the baseline is from, and whether the bias of the choice is taken out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megarl.core.choices.nonlinear import parse_objective
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
    """Whose mean and standard deviation: of all that was drawn of the prompt, whole rounds included, or of what trains.
    The latter makes a prompt with 2 of 32 correct look like one with 2 of 4. Rewards need not be 0 and 1, for which the
    released code does not work: it rebuilds the pool from counts. Nor has a pool of one the mean 0 that it has there;
    its advantage is 0."""
    scale: PoolScale = "none"
    """The divisor: 1, the standard deviation, the pass rate or its root. The sources disagree: the code divides by
    nothing, the paper's third version by the pass rate in one place and by nothing in another; a post praises 1 / p,
    which the same paper found to deteriorate, and its figure and text differ. A pool of equal rewards gives 0, for a
    solved prompt too: 0 / (1 + eps), not 0 / 0."""
    ddof: int = 1
    """Of the standard deviation: 1 unbiased, 0 population."""
    floor: float = 1e-6
    """Least standard deviation to divide by."""
    rate_eps: float = 0.0
    """Added to the pass rate before it divides; Ada-Est: scale "root_rate" with 1e-3."""
    combination: Combination = "plain"
    """"unbiased": the advantage is + v n / n+ for each of the n+ positives of n samples that train, - v n / n- for each
    negative, with v an unbiased estimate of p (1 - p) from the pool (``unbiased_rates``). The prompt's mean then has
    the expectation grad p, p being the rate of rewards above the rule's threshold, whatever was selected by the classes
    of the samples; statistics and scale are not used.
    "plain" with a balanced batch has c(p) grad p instead, with ``c = (q^2 + p^2) / (2 p q)`` (docs/sampling.md)."""
    objective: str | None = None
    """Maximise f(p) by the weight f'(p), with the pool's pass rate (``objective_slope``); None for no weight. Not where
    counts were allotted for f, advantages are divided by the standard deviation and samples count alike: a sum over
    ``n ~ f' std`` samples with ``1 / std`` is ``f'`` already."""
    weigh: Weigh = "sample"
    """What counts alike: each sample, so that prompts count by how many of theirs train, or each prompt."""

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
