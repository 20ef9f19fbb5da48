"""Environments for rollouts of several turns, and the tools that a model may call in them.

protocol       what a tool, an environment and an episode are
environment    the environment of tools: finds the calls in a turn and runs them
calculator     a tool for arithmetic
python_tool    a tool for Python; ``sandbox`` starts the process, ``seccomp`` filters its system calls, and
               ``bootstrap`` is the first code that runs inside
"""
