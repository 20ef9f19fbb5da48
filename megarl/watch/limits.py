"""The limits of this room by name, read from limits.toml.

>>> TRIPWIRES.max_k3.largest
0.3
"""

import math
from dataclasses import dataclass

from megarl.files.texts import read_table

_TABLES = read_table(__file__)


@dataclass(frozen=True, slots=True)
class Learnt:
    """A limit learnt from the first steps of a run."""

    lowest: float
    factor: float
    largest: float

    def of(self, usual: float) -> float:
        """Return ``factor`` times the usual value, between ``lowest`` and ``largest``."""
        return min(max(self.factor * usual, self.lowest), self.largest)


@dataclass(frozen=True, slots=True)
class TripwireLimits:
    """The table [tripwires]."""

    max_k3: Learnt
    max_native_flip: Learnt
    most_dropped: float
    usual_drops: float
    faulty_drops: float
    foreign_false_alarm: float

    @property
    def evidence(self) -> float:
        """The log-likelihood ratio, in nats, above which rows are foreign, or drops persist."""
        return -math.log(self.foreign_false_alarm)


@dataclass(frozen=True, slots=True)
class GapLimits:
    """The table [gap]. A gap above any of the first four limits is bad."""

    k3: float
    extreme: float
    control_k3: float
    control_flip: float
    cause: float


_LEARNT = {name: Learnt(**table) for name, table in _TABLES["tripwires"].items() if isinstance(table, dict)}
TRIPWIRES = TripwireLimits(**_TABLES["tripwires"] | _LEARNT)
GAP = GapLimits(**_TABLES["gap"])
