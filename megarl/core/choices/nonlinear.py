"""The names of objectives f(p) of a pass rate. Imports no torch, so that a configuration can check them."""

from __future__ import annotations

from megarl.errors import ConfigError


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
