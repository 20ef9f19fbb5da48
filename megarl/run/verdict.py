"""What status.json says of a run's health: a record per warning check (``megarl.watch.health``)."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "alarm"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "alarm")


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """What a check says about a run."""

    check: str
    """The name of the check, also the key of the limits in [health]."""
    level: Level
    found: str
    """The latest observation, with numbers and limits."""
    since: int | None
    """The first step of the observation; None without an observation."""
    cause: str
    """The usual cause."""
    advice: str
    """What to try."""

    def lines(self) -> list[str]:
        """Return the verdict for a terminal."""
        since = "" if self.since is None else f" since step {self.since}"
        head = f"{self.level}{since}, {self.check}: {self.found}"
        return [head, f"  cause:  {self.cause}", f"  advice: {self.advice}"]
