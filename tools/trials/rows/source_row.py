"""One row of docs/evidence.md that repeats a source's claim without training a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

BLUE, RED, GREEN, PURPLE, ORANGE, GRAY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#777777"
"""Of Okabe and Ito: they differ for all kinds of colour vision."""
Data = dict[str, Any]
"""JSON values: what was measured, the only input of picture and sentence."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A claim, its miniature, and what the miniature shows."""

    number: int
    """Also the word of the command: ``python tools/evidence.py row NUMBER``."""
    title: str
    claim: str
    """What the source reports, with the source."""
    measure: Callable[[], Data]
    """Measure anew, with fixed seeds: the same data each time. Seconds to two minutes on one core."""
    draw: Callable[[Figure, Data], None]
    """Draw on an empty figure of 7 x 3.2 inches."""
    conclude: Callable[[Data], str]
    """One or two sentences that follow from the data alone, intervals included; also where the claim did not show."""
    is_exact: bool = False
    """An identity, tested without tolerance for chance; otherwise a direction, which a miniature can only suggest."""
