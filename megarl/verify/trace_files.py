"""``megarl verify A B``: are the routes of one trace file those of another, and if not, what happened to them?"""

from collections.abc import Sequence
from pathlib import Path

from megarl.routes.trace import RoutingTrace
from megarl.routes.trace_file import common_names, read_traces, require_same_tokens
from megarl.verify.expert_sets import ExpertSets
from megarl.verify.report import RoutingReport, compare_routes


def compare_trace_files(expected: Path, used: Path) -> RoutingReport:
    """Compare the sequences of one name; a sequence is a micro-batch of the report.

    TraceError for files of other models or tokens, and without a common name.
    """
    a, b = read_traces(expected), read_traces(used)
    names = common_names(a, b)
    pairs = [(a[name], b[name]) for name in names]
    for pair in pairs:
        require_same_tokens(*pair)
    report = compare_traces([first.trace for first, _ in pairs], [second.trace for _, second in pairs], a.info.layers)
    masks = [(first.trace.row_mask, second.trace.row_mask) for first, second in pairs]
    lost = sum(int((mask & ~used_mask).sum()) for mask, used_mask in masks if len(mask) == len(used_mask))
    if lost:
        report.missing.append(f"{used}: {lost:,} rows that {expected} has are missing")
    for file in (a, b):
        if len(file) > len(names):
            report.missing.append(f"{file.path}: {len(file) - len(names)} sequences are in this file only")
    return report


def compare_traces(expected: list[RoutingTrace], used: list[RoutingTrace], layers: Sequence[int]) -> RoutingReport:
    """Compare traces by place; rows that one of a pair does not have are not compared."""

    def sets_of(traces: list[RoutingTrace]) -> list[ExpertSets]:
        return [ExpertSets.of_experts(trace.experts, trace.num_experts, trace.row_mask) for trace in traces]

    return compare_routes(sets_of(used), sets_of(expected), layers)
