"""Compares used experts with expected ones, and says what is wrong and why."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megarl.errors import ReplayError
from megarl.verify.causes import LEAST_EXPLAINED, LEAST_VOTES, Cause, find_cause
from megarl.verify.expert_sets import ExpertSets, list_experts

MOST_CAUSES = 8
"""Micro-batches whose cause is looked for."""


@dataclass(slots=True)
class RoutingReport:
    """What a comparison found; a (row, layer) pair is right if its set of experts is the expected one."""

    layers: tuple[int, ...]
    num_zero_gates: int
    """Pairs of token and expert whose gate weight is exactly 0: the expert is computed and counts nothing."""
    compared: np.ndarray
    """int64 [micro-batches, L], pairs of forward passes with an expected row."""
    right: np.ndarray
    """int64 [micro-batches, L], pairs of these with the expected experts."""
    recomputed: np.ndarray
    """int64 [micro-batches, L], pairs of recomputations, compared with their forward pass."""
    recomputed_right: np.ndarray
    """int64 [micro-batches, L], pairs of these with the experts of the forward pass."""
    first_wrong: str = ""
    """The first wrong row, "" if none."""
    missing: list[str] = field(default_factory=list)
    """Passes that are missing or too many, and passes with another number of rows."""
    causes: list[Cause] = field(default_factory=list)
    """Of forward passes, then of recomputations, one for each micro-batch with wrong rows; at most MOST_CAUSES."""
    exempt_layers: tuple[int, ...] = ()
    """Of ``layers``, the last ones, whose routers take experts from a table of token ids."""

    @property
    def right_share(self) -> float:
        """Right pairs of forward passes over compared ones; nan if none was compared."""
        return float(self.right.sum() / self.compared.sum()) if self.compared.sum() else float("nan")

    @property
    def is_right(self) -> bool:
        """Whether every compared row is right, no pass is missing, and no gate weight is 0."""
        return not (self.causes or self.missing or self.num_zero_gates)

    def require(self) -> None:
        """ReplayError with the report as text unless ``is_right``; on this rank alone: over ranks, sum ``metrics``."""
        if not self.is_right:
            raise ReplayError(str(self))

    def facts(self) -> dict[str, Any]:
        """Return the report for a program."""
        causes = [asdict(cause) for cause in self.causes]
        facts = {"is_right": self.is_right, "missing": self.missing, "first_wrong": self.first_wrong, "causes": causes}
        return {**facts, **{name.removeprefix("watch/"): int(value) for name, value in self.metrics().items()}}

    def metrics(self) -> dict[str, float]:
        """Return counts that may be added over ranks and steps; the share of right rows is right / compared."""
        pairs = ("compared", "right", "recomputed", "recomputed_right")
        counts = {f"watch/{name}": float(getattr(self, name).sum()) for name in pairs}
        return counts | {"watch/passes_wrong": float(len(self.missing)), "watch/zero_gates": float(self.num_zero_gates)}

    def __str__(self) -> str:
        if not self.compared.size and not self.missing:
            return "routing: nothing was watched"
        size = f"{len(self.compared)} micro-batches and {len(self.layers)} layers"
        lines = [f"routing: {self.right.sum():,} of {self.compared.sum():,} rows are right, in {size}"]
        if self.exempt_layers:
            lines.append(f"not replayed: layers {list(self.exempt_layers)} take experts from a table of token ids")
        if self.recomputed.any():
            same, total = self.recomputed_right.sum(), self.recomputed.sum()
            num_passes = f"{np.count_nonzero(self.recomputed.any(1))} of {len(self.recomputed)} passes"
            lines.append(f"recomputed: {same:,} of {total:,} rows equal their forward pass, in {num_passes}")
        if self.num_zero_gates:
            lines.append(f"gate weights: {self.num_zero_gates:,} are exactly 0: these experts count nothing")
        lines += self.missing
        lines += [f"first wrong row: {self.first_wrong}"] if self.first_wrong else []
        lines += [f"cause: {cause.text} [{cause.kind}, {cause.explained:.0%}]" for cause in self.causes]
        return "\n".join(lines)


def compare_routes(
    passes: Sequence[ExpertSets], expected: Sequence[ExpertSets], layers: Sequence[int],
    recomputed: Sequence[ExpertSets] = (), draft: Sequence[ExpertSets] = (), num_zero_gates: int = 0,
) -> RoutingReport:  # fmt: skip
    """Compare used with expected experts by micro-batch, and recomputations with the passes that they repeat.

    layers: numbers of the L layers for the text. draft: experts in prediction layers, which must not be those that a
    decoder layer was expected to use.
    """
    counts = np.zeros((4, len(passes), len(layers)), np.int64)
    report = RoutingReport(tuple(layers), num_zero_gates, counts[0], counts[1], counts[2], counts[3])
    if len(passes) != len(expected):
        report.missing.append(f"{len(passes)} forward passes ran, expected {len(expected)}, one for each micro-batch")
    for micro, (used, target) in enumerate(zip(passes, expected, strict=False)):
        if used.num_rows != target.num_rows:
            report.missing.append(f"micro-batch {micro}: {used.num_rows} rows ran, the routes have {target.num_rows}")
            continue
        absent = [layers[column] for column in np.flatnonzero(~used.known.any(0)).tolist()]
        if absent and used.num_rows:
            report.missing.append(f"micro-batch {micro}: layers {absent} had no forward pass of {used.num_rows} rows")
        _compare(report, counts[:2], f"micro-batch {micro}", micro, used, expected)
    for micro, (again, first) in enumerate(zip(recomputed, passes, strict=False)):
        if again.num_rows != first.num_rows:
            other = f"recomputation of micro-batch {micro}: {again.num_rows} rows, expected {first.num_rows}"
            report.missing += [other] * (again.num_rows > 0)
            continue
        _compare(report, counts[2:], f"recomputation of micro-batch {micro}", micro, again, passes)
    if any(sets.num_rows for sets in expected) and not report.compared.sum():
        report.missing.append("no row was compared: no expected row is present, or none belongs to a pass")
    report.causes += _borrowed(draft, expected, layers)
    return report


def _compare(
    report: RoutingReport, counts: np.ndarray, place: str, micro: int, used: ExpertSets, expected: Sequence[ExpertSets]
) -> None:
    """Set counts [2, :, L] of a micro-batch: pairs that both know, and the equal ones; add the cause of others."""
    target = expected[micro]
    index = np.searchsorted(target.rows, used.rows)
    compared, differs = used.known & target.known[index], (used.bits != target.bits[index]).any(2)
    wrong = compared & differs
    counts[:, micro] = compared.sum(0), (compared & ~differs).sum(0)
    if not wrong.any():
        return
    if not report.first_wrong:
        row, column = np.argwhere(wrong)[0].tolist()
        experts, meant = (list_experts(bits[column]) for bits in (used.bits[row], target.bits[index[row]]))
        pair = f"layer {report.layers[column]}, row {used.rows[row]}"
        report.first_wrong = f"{place}, {pair}: experts {experts}, expected {meant}"
    if len(report.causes) < MOST_CAUSES:
        cause = find_cause(micro, used, wrong, expected)
        report.causes.append(replace(cause, text=f"{place} ({np.count_nonzero(wrong):,} rows): {cause.text}"))


def _borrowed(draft: Sequence[ExpertSets], expected: Sequence[ExpertSets], layers: Sequence[int]) -> Iterator[Cause]:
    """Yield a cause for each prediction layer that uses the expected routes of a decoder layer."""
    for micro, (used, target) in enumerate(zip(draft, expected, strict=False)):
        if used.num_rows != target.num_rows:
            continue
        present = target.known[used.rows]
        same = (used.bits[:, :, None] == target.bits[used.rows][:, None]).all(3) & present[:, None]
        shares = same.sum(0) / np.maximum(1, present.sum(0))
        for layer, column in np.argwhere((shares >= LEAST_EXPLAINED) & (present.sum(0) >= LEAST_VOTES)).tolist():
            text = f"micro-batch {micro}: prediction layer {layer} uses the routes of layer {layers[column]}"
            yield Cause("draft", micro, float(shares[layer, column]), text)
