"""The ratios of two policies over the tokens of a scope, each computed once."""

import torch
from torch import Tensor

from megarl.core.choices.parts import Policies, Scope
from megarl.core.objectives.columns import TokenState
from megarl.core.ratios import LOG_RATIO_BOUND, aggregate, positions


class PolicyRatios:
    """Ratios of a batch [T]: 0 (or 1) on tokens that do not train. Single log-ratios are clamped to +-20."""

    def __init__(self, state: TokenState) -> None:
        self._state = state
        self._found: dict[tuple[str, ...], Tensor] = {}
        self._positions: Tensor | None = None
        self.count = torch.count_nonzero(state.keep)
        """int64 [], tokens that train."""

    @property
    def positions(self) -> Tensor:
        """int64 [T], t of each token among those of its response that train, counted from 1."""
        if self._positions is None:
            self._positions = positions(self._state.keep, self._state.cu_seqlens)
        return self._positions

    def log(self, policies: Policies, scope: Scope = "token") -> Tensor:
        """Return the log-ratio over the tokens of ``scope``: sums and means are not clamped."""
        if (policies, scope) not in self._found:
            if scope == "token":
                first, second = self._state.pair(policies)
                found = (first - second).clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            else:
                found = aggregate(scope, self.log(policies), self._state.keep, self._state.cu_seqlens)
            self._found[policies, scope] = found
        return self._found[policies, scope]

    def ratio(self, policies: Policies, scope: Scope = "token") -> Tensor:
        """Return ``exp(log)``, which may overflow to inf over several tokens."""
        key = (policies, scope, "ratio")
        if key not in self._found:
            self._found[key] = self.log(policies, scope).exp()
        return self._found[key]
