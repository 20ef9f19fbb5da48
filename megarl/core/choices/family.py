"""Whether a weight function lies in the family that interpolates between no correction and importance sampling.

    f non-decreasing,  min(rho, 1) <= f(rho) <= max(rho, 1)

Members are rho, 1, clip(rho), min(rho, c) with c >= 1, and rho^q with 0 <= q <= 1. An objective outside the family is
valid, but its weights are further from 1 than the ratio itself, or fall where the ratio rises. Source: reconstructed
from the prose of "Token-Level KL-Regularized Policy Gradient and GRPO", whose formulas are lost. Imports no torch.
"""

import math
from collections.abc import Callable

from megarl.core.choices.parts import Objective


def in_family(f: Callable[[float], float]) -> bool:
    """Return whether f is non-decreasing and between min(rho, 1) and max(rho, 1), up to rounding of 1e-12.

    Checked at 2001 values of rho from 1e-4 to 1e4, evenly spaced in log rho, 1 among them.
    """
    previous = -math.inf
    for step in range(-1000, 1001):
        rho = 10 ** (step / 250)
        value, slack = float(f(rho)), 1e-12 * max(rho, 1.0)
        # Written so that NaN fails.
        if not (min(rho, 1.0) - slack <= value <= max(rho, 1.0) + slack and value >= previous - slack):
            return False
        previous = value
    return True


def weight_function(objective: Objective) -> Callable[[float], float]:
    """Return the objective's weight as a function of its ratio rho, without mask and gap factor.

    With a cap on old/mu alone (``tis_on``) it is that of theta/old. "adaptive_power" stands for its middle, q = 1/2:
    its family membership is the same for every q.
    """
    if objective.weight == "none":
        return lambda rho: 1.0
    cap = math.inf if objective.cap is None or objective.decoupled else objective.cap
    low, high = 1 - objective.eps_low, 1 + objective.eps_high
    functions: dict[str, Callable[[float], float]] = {
        "identity": lambda rho: rho,
        "power": lambda rho: rho**objective.power,
        "adaptive_power": math.sqrt,
        "upper_clip": lambda rho: min(rho, high),
        "clip": lambda rho: min(max(rho, low), high),
    }
    chosen = objective.weight_fn if callable(objective.weight_fn) else functions[objective.weight_fn]
    return lambda rho: min(chosen(rho), cap)


def family_warning(objective: Objective) -> str | None:
    """Return one sentence on how the objective's weight leaves the family, or None if it does not."""
    if callable(objective.weight_fn):
        return None  # it takes tensors, and torch is not imported here
    f = weight_function(objective)
    if in_family(f) and not (objective.decoupled and objective.cap is not None and objective.cap < 1):
        return None
    at = ", ".join(f"{rho:g} -> {f(rho):.4g}" for rho in (0.1, 1.0, 10.0))
    return (
        f"objective: the weight ({objective.weight_fn!r}, power {objective.power:g}, cap {objective.cap}) is not "
        f"between 1 and the ratio everywhere (ratio -> weight: {at}); a cap of at least 1 and a power of at most 1 are"
    )
