"""Routing traces: the experts of each token. Needs numpy; imports change nothing.

Start with ``trace``, the record. ``answers`` reads answers of inference engines, ``codec`` encodes a trace as bytes,
``trace_file`` stores many traces, ``disagreement`` compares two traces,
and ``turns`` joins the turns of a conversation and names the weights behind a row.
"""

from megarl.routes.codec import decode, encode
from megarl.routes.disagreement import Disagreement, common_rows, compare, shared_experts
from megarl.routes.trace import RoutingTrace

__all__ = ["Disagreement", "RoutingTrace", "common_rows", "compare", "decode", "encode", "shared_experts"]
