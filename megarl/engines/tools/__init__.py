"""Environments for rollouts of several turns, and the tools that a model may call.

    protocol       tools, environments and episodes
    environment    the environment of tools: finds the calls in a turn and runs the calls
    calculator     a tool for arithmetic
    python_tool    a tool for Python
    sandbox        starts the process of a Python call, and filters its system calls; bootstrap is the first code inside

Outside of this room, code imports ``protocol`` alone; ``megarl.trainer.sampling.evaluation`` makes tools from a
configuration, and ``megarl.engines.agents`` reads calls.
"""
