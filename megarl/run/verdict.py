"""What status.json says of a run's health: a record per warning check (``megarl.watch.health``)."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "alarm"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "alarm")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check says about a run."""

    check: str
    """The name, also the key of the limits in [health]."""
    level: Level
    found: str
    """What was seen last, with numbers and limits."""
    since: int | None
    """The first step of what was seen; None if nothing is."""
    cause: str
    """What usually causes it."""
    advice: str
    """What to try."""

    def lines(self) -> list[str]:
        """Return it for a terminal."""
        since = "" if self.since is None else f" since step {self.since}"
        return [
            f"{self.level}{since}, {self.check}: {self.found}",
            f"  cause:  {self.cause}",
            f"  advice: {self.advice}",
        ]
