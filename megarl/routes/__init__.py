"""Routing traces: which experts each token used.

``trace`` is the record, ``codec`` writes and reads it, ``disagreement`` compares two, ``provenance`` says which weights
and which engine produced a row. For the codec, ``rows`` sorts and packs, ``cells`` numbers the sets of experts of the
usual shapes, and ``combinations`` those of any.
"""

from megarl.routes.codec import decode, encode
from megarl.routes.disagreement import Disagreement, common_rows, compare, shared_experts
from megarl.routes.trace import RoutingTrace

__all__ = ["Disagreement", "RoutingTrace", "common_rows", "compare", "decode", "encode", "shared_experts"]
