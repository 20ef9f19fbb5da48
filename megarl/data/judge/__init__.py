"""Calls reward functions for sampling loops: ``judge`` waits for them, ``worker`` is the process in which one runs."""

from megarl.data.judge.judge import Judge as Judge
from megarl.data.judge.judge import is_being_cancelled as is_being_cancelled
