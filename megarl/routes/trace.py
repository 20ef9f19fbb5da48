"""The record of which experts each token used in each MoE layer, checked once.

The order of the K experts of a row never matters: the router weighs them by its own scores.
"""

from dataclasses import dataclass

import numpy as np

from megarl.errors import TraceError
from megarl.routes.rows import find_doubled


def narrow_dtype(num_experts: int, signed: bool = False) -> type[np.integer]:
    """Of expert numbers: uint8 up to 256 experts, else uint16. ``signed``: int16 in its place, which torch indexes."""
    if num_experts <= 256:
        return np.uint8
    return np.int16 if signed else np.uint16


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
    """bool [T], False where the engine recorded nothing for the token; None if every token has its row."""
    label: str = "routing trace"
    """Names the sequence in error messages, for instance "group 3 sample 1"."""

    def __post_init__(self) -> None:
        experts = np.asarray(self.experts)
        if experts.ndim != 3 or experts.dtype.kind not in "iu":
            raise TraceError(
                f"{self.label}: experts are {experts.dtype} {list(experts.shape)}, expected integers [T, L, K]"
            )
        if not 1 <= self.num_experts <= 65536 or experts.shape[2] > self.num_experts:
            raise TraceError(
                f"{self.label}: top-{experts.shape[2]} of {self.num_experts} experts; "
                f"num_experts must be 1..65536 and at least the top-k"
            )
        present = None if self.present is None else np.asarray(self.present)
        if present is not None and (present.dtype != np.bool_ or present.shape != experts.shape[:1]):
            raise TraceError(
                f"{self.label}: present is {present.dtype} {list(present.shape)}, expected bool [{len(experts)}]"
            )
        if present is not None and not present.all():
            experts = experts.copy()
            experts[~present] = 0
        self._check_range(experts)
        narrow = experts.astype(narrow_dtype(self.num_experts), order="C")
        self._check_duplicates(narrow, present)
        object.__setattr__(self, "experts", narrow)
        object.__setattr__(self, "present", present)

    @classmethod
    def of_sets(cls, experts: np.ndarray, num_experts: int, present: np.ndarray | None, label: str) -> "RoutingTrace":
        """A trace whose rows are known to be sets of experts, in the narrow dtype; nothing is checked."""
        trace = object.__new__(cls)
        for name, value in (("experts", experts), ("num_experts", num_experts), ("present", present), ("label", label)):
            object.__setattr__(trace, name, value)
        return trace

    @property
    def num_missing(self) -> int:
        """Tokens without a recorded row."""
        return 0 if self.present is None else int(np.count_nonzero(~self.present))

    def _check_range(self, experts: np.ndarray) -> None:
        if not experts.size or (experts.min() >= 0 and experts.max() < self.num_experts):
            return
        row, layer, slot = np.argwhere((experts < 0) | (experts >= self.num_experts))[0]
        raise TraceError(
            f"{self.label}: row {row}, layer {layer} names expert {experts[row, layer, slot]}, expected "
            f"0..{self.num_experts - 1}: the trace is of another model, or not aligned with its tokens"
        )

    def _check_duplicates(self, experts: np.ndarray, present: np.ndarray | None) -> None:
        _, num_layers, top_k = experts.shape
        recorded = experts if present is None else experts.compress(present, 0)
        doubled = find_doubled(recorded.reshape(len(recorded) * num_layers, top_k))
        if not len(doubled):
            return
        row, layer = divmod(int(doubled[0]), num_layers)
        row = row if present is None else np.flatnonzero(present)[row]
        raise TraceError(
            f"{self.label}: row {row}, layer {layer} names an expert twice: {experts[row, layer].tolist()}; "
            f"{len(doubled)} such rows. Zero or constant padding looks like this: mark rows that the "
            f"engine did not record as not present, and leave dense layers out"
        )
