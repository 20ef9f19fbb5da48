"""Routing replay on Megatron-Core: the routers of a model use the experts that they are told to.

A plugin user needs ``RoutingReplay`` with its ``rows``; ``megarl.megatron.plugin`` has all of a loop in one import.
``rollout_routes`` belongs to megarl's own trainer.
"""

from megarl.megatron.replay.layout import stack_routes
from megarl.megatron.replay.records import MicroRoutes, Recording
from megarl.megatron.replay.routing_replay import AuxLoss, RoutingReplay

__all__ = ["AuxLoss", "MicroRoutes", "Recording", "RoutingReplay", "stack_routes"]
