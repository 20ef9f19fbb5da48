"""The family of weight functions between no correction and importance sampling.

    f non-decreasing,  min(rho, 1) <= f(rho) <= max(rho, 1)

Members are rho, 1, clip(rho), min(rho, c) with c >= 1, and rho^q with 0 <= q <= 1. An objective outside the family is
valid, but has weights further from 1 than the ratio, or weights that fall while the ratio rises. Source: reconstructed
from the prose of "Token-Level KL-Regularized Policy Gradient and GRPO" (the formulas are lost). Imports no torch.
"""

import math
from collections.abc import Callable

from megarl.core.choices.parts import MAX_LOG_RATIO, Factor, Objective


def in_family(f: Callable[[float], float]) -> bool:
    """Return whether f is non-decreasing and between min(rho, 1) and max(rho, 1), up to rounding of 1e-12.

    Checked at 2001 values of rho from 1e-4 to 1e4, evenly spaced in log rho, 1 among them.
    """
    previous = -math.inf
    for step in range(-1000, 1001):
        rho = 10 ** (step / 250)
        value, slack = float(f(rho)), 1e-12 * max(rho, 1.0)
        # NaN fails the comparison.
        if not (min(rho, 1.0) - slack <= value <= max(rho, 1.0) + slack and value >= previous - slack):
            return False
        previous = value
    return True


def weight_function(factor: Factor) -> Callable[[float], float]:
    """Return a factor as a function of the ratio rho, without mask and batch normalisation.

    For "adaptive_power" q is 1/2: membership does not depend on q. For "vespo" A >= 0.
    """
    low, high = factor.low or 0.0, factor.high or math.inf
    k, decay = factor.vespo_positive
    functions: dict[str, Callable[[float], float]] = {
        "identity": lambda rho: rho,
        "power": lambda rho: math.exp(min(factor.power * math.log(rho), 2 * MAX_LOG_RATIO)),
        "adaptive_power": math.sqrt,
        "vespo": lambda rho: rho**k * math.exp(decay * (1 - rho)),
    }
    function = factor.fn if callable(factor.fn) else functions[factor.fn]
    return lambda rho: min(max(function(rho), low), high)


def family_warning(objective: Objective) -> str | None:
    """Return a sentence about the first factor outside the family, or None.

    Functions of the user (on tensors) and VESPO (outside on purpose) are not checked.
    """
    for factor in objective.factors:
        if callable(factor.fn) or factor.fn == "vespo" or in_family(f := weight_function(factor)):
            continue
        values = ", ".join(f"{rho:g} -> {f(rho):.4g}" for rho in (0.1, 1.0, 10.0))
        return (
            f"objective: the factor {factor.policies!r} ({factor.fn!r}, power {factor.power:g}, low {factor.low}, high "
            f"{factor.high}) is not between 1 and the ratio everywhere (ratio -> factor: {values}); a low of at most "
            "1, a high of at least 1 and a power of at most 1 are"
        )
    return None
