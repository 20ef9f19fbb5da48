"""Call reward functions for sampling loops: ``judge`` waits for the calls, ``worker`` is the process of a call."""

from megarl.data.judge.judge import Judge as Judge
from megarl.data.judge.judge import is_being_cancelled as is_being_cancelled
