"""Proof of replay in any Megatron loop: which experts each token really went to. Stands on the kit alone.

Start with ``watch``, which looks at the token dispatchers of a model. ``report`` compares what it saw with a trace,
``causes`` names the likely mistake, ``trace_files`` compares two files, and ``engine`` asks a running server.
"""

from typing import TYPE_CHECKING, Any

from megarl.verify.causes import Cause
from megarl.verify.report import RoutingReport, compare_routes

if TYPE_CHECKING:
    from megarl.verify.watch import RoutingWatch

__all__ = ["Cause", "RoutingReport", "RoutingWatch", "compare_routes"]


def __getattr__(name: str) -> Any:
    """``RoutingWatch``, which needs Megatron-Core: files and servers are compared without it."""
    if name != "RoutingWatch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megarl.verify.watch import RoutingWatch

    return RoutingWatch
