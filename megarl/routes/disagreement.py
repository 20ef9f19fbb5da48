"""Compare routing traces as sets: how often two of them use different experts for the same tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.errors import TraceError, refusal
from megarl.routes.trace import RoutingTrace

if TYPE_CHECKING:
    from megarl.core.metrics import Stat


@dataclass(frozen=True, slots=True, eq=False)
class Disagreement:
    """How often two traces use different experts, as counts.

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
        return float(self.flips.sum()) / (self._require_tokens() * len(self.flips))

    @property
    def overlap(self) -> float:
        """Mean of |A and B| / K over (token, layer) pairs."""
        return self.shared_experts / (self._require_tokens() * len(self.flips) * self.top_k)

    @property
    def token_any(self) -> float:
        """Share of tokens with at least one differing layer."""
        return self.tokens_differing / self._require_tokens()

    @property
    def layers_per_token(self) -> float:
        """Mean number of differing layers of a token."""
        return float(self.flips.sum()) / self._require_tokens()

    @property
    def per_layer_flip(self) -> np.ndarray:
        """float64 [L], share of tokens with different expert sets in each layer."""
        return self.flips / self._require_tokens()

    @classmethod
    def of(cls, num_shared: np.ndarray, top_k: int) -> "Disagreement":
        """Count from ``shared`` [T, L], the number of experts |A and B| that two traces share per token and layer."""
        differs = np.asfortranarray(num_shared) < top_k  # stored by layer, over whose tokens numpy counts much faster
        flips, tokens_differing = differs.sum(axis=0, dtype=np.int64), int(np.count_nonzero(differs.any(axis=1)))
        return cls(len(num_shared), top_k, flips, int(num_shared.sum()), tokens_differing)

    def stats(self, prefix: str = "router") -> "dict[str, Stat]":
        """Return the same as mergeable metrics: ``router/flip`` ... and ``router/flip/layer_00`` ... by layer."""
        from megarl.core.metrics import Stat  # imports torch, which comparing trace files does not need

        tokens, flips = float(self.num_tokens), float(self.flips.sum())
        pairs = tokens * len(self.flips)
        shares = {
            "flip": (flips, pairs),
            "overlap": (self.shared_experts, pairs * self.top_k),
            "token_any": (self.tokens_differing, tokens),
            "layers_per_token": (flips, tokens),
        }
        by_layer = {f"flip/layer_{i:02d}": (count, tokens) for i, count in enumerate(self.flips.tolist())}
        return Stat.means_of({f"{prefix}/{name}": share for name, share in (shares | by_layer).items()})

    def _require_tokens(self) -> int:
        if not self.num_tokens:
            raise TraceError("no token is present in both traces, so their disagreement is undefined")
        return self.num_tokens


def compare(a: RoutingTrace, b: RoutingTrace) -> Disagreement:
    """Compare two traces of the same tokens as sets, on the common rows. Raises TraceError if shapes differ."""
    rows = common_rows(a, b)
    return Disagreement.of(shared_experts(a.experts[rows], b.experts[rows]), a.experts.shape[2])


def common_rows(a: RoutingTrace, b: RoutingTrace) -> np.ndarray:
    """bool [T], tokens with a row in both traces. Raises TraceError unless they are of the same tokens and model."""
    if a.experts.shape != b.experts.shape or a.num_experts != b.num_experts:
        facts = {"a": a, "shape_a": list(a.experts.shape), "b": b, "shape_b": list(b.experts.shape)}
        raise TraceError(refusal("shapes_to_compare", **facts))
    return a.row_mask & b.row_mask


def shared_experts(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """|A and B| per token and layer: two [T, L, K] without duplicates in a row -> int64 [T, L]."""
    # Neither row has duplicates, so an expert stands twice in the joined row exactly if both rows hold it.
    joint_rows = np.sort(np.concatenate([first, second], axis=2), axis=2)
    return (joint_rows[:, :, 1:] == joint_rows[:, :, :-1]).sum(axis=2)
