"""Routing replay on Megatron-Core: the routers of a model use the experts that they are told to.

A plugin user needs ``RoutingReplay`` with its ``rows``; ``megarl.plugin`` has all of a loop in one import.
``rollout_routes`` belongs to megarl's own trainer.
"""

from megarl.replay.layout import stack_routes
from megarl.replay.records import MicroRoutes, Recording
from megarl.replay.routing_replay import AuxLoss, RoutingReplay

__all__ = ["AuxLoss", "MicroRoutes", "Recording", "RoutingReplay", "stack_routes"]
