"""Routing replay on Megatron-Core: routers use given experts. Needs torch and megatron-core; imports change nothing.

Start with ``routing_replay``. ``layout`` cuts rows for a rank, ``checks`` refuses wrong models and routes, ``hooks`` is
asked by routers, ``pass_log`` finds the pass of a call, ``sessions`` answers, ``agreement`` proves the result.
"""

from megarl.replay.layout import stack_routes
from megarl.replay.records import MicroRoutes, Recording, RouterScores
from megarl.replay.routing_replay import RoutingReplay

__all__ = ["MicroRoutes", "Recording", "RouterScores", "RoutingReplay", "stack_routes"]
