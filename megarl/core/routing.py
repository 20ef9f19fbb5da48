"""Routing traces: which experts each token used in each MoE layer; checked once, compared as sets.

The order of the K experts of a row never matters: the router weighs them by its own scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.core.metrics import Stat
from megarl.errors import TraceError


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
        present = None if self.present is None else self._checked_present(experts.shape[0])
        if present is not None and not present.all():
            experts = np.where(present[:, None, None], experts, 0)
        self._check_range(experts)
        narrow = experts.astype(np.uint8 if self.num_experts <= 256 else np.uint16)
        self._check_duplicates(narrow, present)
        object.__setattr__(self, "experts", narrow)
        object.__setattr__(self, "present", present)

    @property
    def num_missing(self) -> int:
        """Tokens without a recorded row."""
        return 0 if self.present is None else int(np.count_nonzero(~self.present))

    def _checked_present(self, num_tokens: int) -> np.ndarray:
        present = np.asarray(self.present)
        if present.dtype != np.bool_ or present.shape != (num_tokens,):
            raise TraceError(
                f"{self.label}: present is {present.dtype} {list(present.shape)}, expected bool [{num_tokens}]"
            )
        return present

    def _check_range(self, experts: np.ndarray) -> None:
        if not experts.size or (experts.min() >= 0 and experts.max() < self.num_experts):
            return
        row, layer, slot = np.argwhere((experts < 0) | (experts >= self.num_experts))[0]
        raise TraceError(
            f"{self.label}: row {row}, layer {layer} names expert {experts[row, layer, slot]}, expected "
            f"0..{self.num_experts - 1}: the trace is of another model, or not aligned with its tokens"
        )

    def _check_duplicates(self, experts: np.ndarray, present: np.ndarray | None) -> None:
        ordered = np.sort(experts, axis=2)
        doubled = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
        if present is not None:
            doubled &= present[:, None]
        if not doubled.any():
            return
        row, layer = np.argwhere(doubled)[0]
        raise TraceError(
            f"{self.label}: row {row}, layer {layer} names an expert twice: {experts[row, layer].tolist()}; "
            f"{np.count_nonzero(doubled)} such rows. Zero or constant padding looks like this: mark rows that the "
            f"engine did not record as not present, and leave dense layers out"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Disagreement:
    """How often two traces use different experts, as counts: adding two gives that of both sets of tokens.

    The rates raise TraceError if no token was compared.
    """

    num_tokens: int
    """Tokens present in both traces."""
    top_k: int
    """K."""
    flips: np.ndarray
    """int64 [L], tokens whose expert set differs, by layer."""
    shared_experts: int
    """Sum of |A and B| over tokens and layers."""
    tokens_differing: int
    """Tokens that differ in at least one layer."""

    @property
    def flip(self) -> float:
        """Share of (token, layer) pairs with different expert sets."""
        return float(self.flips.sum()) / (self._compared() * len(self.flips))

    @property
    def overlap(self) -> float:
        """Mean of |A and B| / K over (token, layer) pairs."""
        return self.shared_experts / (self._compared() * len(self.flips) * self.top_k)

    @property
    def token_any(self) -> float:
        """Share of tokens with at least one differing layer."""
        return self.tokens_differing / self._compared()

    @property
    def layers_per_token(self) -> float:
        """Mean number of differing layers of a token."""
        return float(self.flips.sum()) / self._compared()

    @property
    def per_layer_flip(self) -> np.ndarray:
        """float64 [L], share of tokens with different expert sets in each layer."""
        return self.flips / self._compared()

    def __add__(self, other: Disagreement) -> Disagreement:
        if (self.top_k, len(self.flips)) != (other.top_k, len(other.flips)):
            raise TraceError(
                f"cannot add a disagreement of {len(other.flips)} layers, top-{other.top_k}, to one of "
                f"{len(self.flips)} layers, top-{self.top_k}: they are of different models"
            )
        return Disagreement(
            self.num_tokens + other.num_tokens,
            self.top_k,
            self.flips + other.flips,
            self.shared_experts + other.shared_experts,
            self.tokens_differing + other.tokens_differing,
        )

    @classmethod
    def of(cls, shared: np.ndarray, top_k: int) -> Disagreement:
        """Count from ``shared`` [T, L], the number of experts |A and B| that two traces share per token and layer."""
        differs = shared < top_k
        return cls(
            num_tokens=len(shared),
            top_k=top_k,
            flips=differs.sum(axis=0, dtype=np.int64),
            shared_experts=int(shared.sum()),
            tokens_differing=int(np.count_nonzero(differs.any(axis=1))),
        )

    def stats(self, prefix: str = "router") -> dict[str, Stat]:
        """Return the same as mergeable metrics: ``router/flip`` ... and ``router/flip/layer_00`` ... by layer."""
        tokens, flips = float(self.num_tokens), float(self.flips.sum())
        pairs = tokens * len(self.flips)
        stats = {
            f"{prefix}/flip": _share(flips, pairs),
            f"{prefix}/overlap": _share(float(self.shared_experts), pairs * self.top_k),
            f"{prefix}/token_any": _share(float(self.tokens_differing), tokens),
            f"{prefix}/layers_per_token": _share(flips, tokens),
        }
        by_layer = {f"{prefix}/flip/layer_{i:02d}": _share(float(count), tokens) for i, count in enumerate(self.flips)}
        return stats | by_layer

    def _compared(self) -> int:
        if not self.num_tokens:
            raise TraceError("no token is present in both traces, so their disagreement is undefined")
        return self.num_tokens


def compare(a: RoutingTrace, b: RoutingTrace) -> Disagreement:
    """Compare two traces of the same tokens as sets, on the rows that both hold. Raises TraceError if shapes differ."""
    if a.experts.shape != b.experts.shape or a.num_experts != b.num_experts:
        raise TraceError(
            f"{a.label} has {list(a.experts.shape)} of {a.num_experts} experts, {b.label} has "
            f"{list(b.experts.shape)} of {b.num_experts}: only traces of the same tokens and model compare"
        )
    both = np.ones(len(a.experts), dtype=bool)
    for trace in (a, b):
        if trace.present is not None:
            both &= trace.present
    return Disagreement.of(shared_experts(a.experts[both], b.experts[both]), a.experts.shape[2])


def shared_experts(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """|A and B| per token and layer: two [T, L, K] without duplicates in a row -> int64 [T, L]."""
    # Neither row has duplicates, so an expert stands twice in the joined row exactly if both rows hold it.
    joined = np.sort(np.concatenate([left, right], axis=2), axis=2)
    return (joined[:, :, 1:] == joined[:, :, :-1]).sum(axis=2)


def _share(count: float, out_of: float) -> Stat:
    sums: Tensor = torch.tensor([count, out_of], dtype=torch.float64)
    return Stat("mean", sums, sums.new_empty(0))
