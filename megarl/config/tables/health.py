"""Limits of a healthy run: [health], with a key for each check in ``megarl/watch/limits.toml``."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, create_model

from megarl.config.tables.base import Row, Table

_LIMITS = Path(__file__).parents[2] / "watch" / "limits.toml"
CHECKS: dict[str, dict[str, Any]] = tomllib.loads(_LIMITS.read_text("utf-8"))["health"]
FALLING = tuple(name for name, check in CHECKS.items() if check.get("falls"))
"""Checks of values that must not become small; all other values must not become large."""


class _Steps(Table):
    patience_steps: PositiveInt = 3
    """Steps in a row beyond a limit before a verdict begins, and within the limit before the verdict ends."""
    start_steps: PositiveInt = 5
    """Steps whose median is the run's start value. Checks named *_ratio, and spikes, wait for the start value."""

    def rows(self) -> Iterable[Row]:
        for name in CHECKS:
            limits = getattr(self, name)
            if limits == "off":
                continue
            falls, facts = name in FALLING, {"check": name, "found": limits}
            order = "at most" if falls else "at least"
            yield self.row("limits", len(limits) not in (1, 2) or min(limits) < 0, **facts)
            yield self.row("order_of_limits", limits != sorted(limits, reverse=falls), **facts, order=order)


def _key(check: dict[str, Any]) -> Any:
    """Type and field of a key: limits of a streak are numbers of steps."""
    number = PositiveInt if check.get("against") == "streak" else float
    return Literal["off"] | list[number], Field(default=check["limits"], description=check["meaning"])


class HealthConfig(create_model("_Limits", __base__=_Steps, **{name: _key(check) for name, check in CHECKS.items()})):
    """[health]: limits of a healthy run, see docs/health.md.

    A check has two limits, [warning, alarm], or [warning] alone, or is "off". A value at a limit is beyond the limit.
    """
