"""The record of the experts of each token in each MoE layer, checked once.

The order of the K experts of a row never matters, because the router computes gate weights from the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.errors import TraceError, refusal


def narrow_dtype(num_experts: int, signed: bool = False) -> type[np.integer]:
    """Return the dtype of expert numbers: uint8 up to 256 experts, else uint16, or int16 (``signed``) for torch."""
    return np.uint8 if num_experts <= 256 else np.int16 if signed else np.uint16


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The experts of T tokens in L MoE layers, validated.

    Raises TraceError, naming trace, row and layer, unless the experts are integers [T, L, K] in 0..num_experts-1
    without duplicates in a row, where a row is the K experts of one token in one layer.
    """

    experts: np.ndarray
    """uint8 (num_experts <= 256) or uint16 [T, L, K]; any integer dtype is narrowed. Rows not present are zero."""
    num_experts: int
    """E, routed experts of each layer, at most 65536."""
    present: np.ndarray | None = None
    """bool [T], False where the engine recorded nothing for the token; None if no row is missing."""
    label: str = "routing trace"
    """Names the sequence in error messages, for instance "group 3 sample 1"."""

    def __post_init__(self) -> None:
        label, experts = self.label, np.asarray(self.experts)
        if experts.ndim != 3 or experts.dtype.kind not in "iu":
            raise TraceError(f"{label}: experts are {experts.dtype} {list(experts.shape)}, expected integers [T, L, K]")
        if not 1 <= self.num_experts <= 65536 or experts.shape[2] > self.num_experts:
            raise TraceError(refusal("topk_of_trace", label=label, topk=experts.shape[2], num_experts=self.num_experts))
        mask = None if self.present is None else np.asarray(self.present)
        if mask is not None and (mask.dtype != np.bool_ or mask.shape != experts.shape[:1]):
            raise TraceError(f"{label}: present is {mask.dtype} {list(mask.shape)}, expected bool [{len(experts)}]")
        if error_text := describe_wrong_row(experts, self.num_experts, mask):
            raise TraceError(refusal("trace_of_other_model", label=label, error_text=error_text))
        narrow = experts.astype(narrow_dtype(self.num_experts), order="C")
        if mask is not None:
            narrow[~mask] = 0
        object.__setattr__(self, "experts", narrow)
        object.__setattr__(self, "present", mask)

    @classmethod
    def of_rows(cls, rows: np.ndarray, num_experts: int, label: str) -> "RoutingTrace":
        """Return the trace of an engine's rows, signed integers [T, L, K]: a row of -1 in all layers is missing."""
        missing = (rows == -1).all((1, 2))
        return cls(rows, num_experts, ~missing if missing.any() else None, label)

    @classmethod
    def of_sets(cls, experts: np.ndarray, num_experts: int, present: np.ndarray | None, label: str) -> "RoutingTrace":
        """Return a trace of rows that are known to be sets of experts, in the narrow dtype; nothing is checked.
        experts: [T, L, K]; present: bool [T].
        """
        trace = object.__new__(cls)
        for name, value in (("experts", experts), ("num_experts", num_experts), ("present", present), ("label", label)):
            object.__setattr__(trace, name, value)
        return trace

    @property
    def row_mask(self) -> np.ndarray:
        """bool [T], True where the token has its row."""
        return np.ones(len(self.experts), bool) if self.present is None else self.present

    @property
    def num_missing(self) -> int:
        """Tokens without a recorded row."""
        return 0 if self.present is None else int(np.count_nonzero(~self.present))


def describe_wrong_row(
    experts: np.ndarray, num_experts: int, present: np.ndarray | None = None, layers: Sequence[int] | None = None
) -> str | None:
    """Return what is wrong with the first row that is not K different experts of 0..E-1; None if no row is wrong.

    experts: integers [T, L, K]; present: bool [T], rows to look at (default all); layers: the L numbers of the layers
    for the text. This is the one check of range and duplicates, for traces and for routes of a micro-batch.
    """
    rows = experts if present is None or present.all() else experts[present]
    num_layers, top_k = rows.shape[1:]
    if rows.size and (rows.min() < 0 or rows.max() >= num_experts):
        is_wrong = ((rows < 0) | (rows >= num_experts)).any(2)
        row, column = (int(index) for index in np.argwhere(is_wrong)[0])
        num_wrong = int(np.count_nonzero(is_wrong))
    else:
        sets = rows.astype(narrow_dtype(num_experts), copy=False).reshape(len(rows) * num_layers, top_k)
        columns = np.ascontiguousarray(sets.T)
        is_doubled = np.zeros(columns.shape[1], bool)
        for slot in range(1, top_k):  # compares whole columns: sorting rows takes ten times as long
            for earlier in columns[:slot]:
                is_doubled |= columns[slot] == earlier
        doubled = np.flatnonzero(is_doubled)
        if not len(doubled):
            return None
        row, column = divmod(int(doubled[0]), num_layers)
        num_wrong = len(doubled)
    token = row if present is None else int(np.flatnonzero(present)[row])
    facts = {"token": token, "layer": column if layers is None else layers[column], "topk": top_k}
    facts |= {"experts": rows[row, column].tolist(), "last": num_experts - 1, "num_wrong": num_wrong}
    return refusal("experts_of_row", **facts)
