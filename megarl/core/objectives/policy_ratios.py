"""Ratios of two policies over the tokens of a scope."""

import torch
from torch import Tensor

from megarl.core.choices.parts import Policies, Scope
from megarl.core.objectives.columns import TokenState
from megarl.core.ratios import LOG_RATIO_BOUND, aggregate, positions


class PolicyRatios:
    """Ratios of a batch, [T] and computed once each; log-ratios are 0 on tokens without training."""

    def __init__(self, state: TokenState) -> None:
        self._state = state
        self._cache: dict[tuple[str, ...], Tensor] = {}
        self.count = torch.count_nonzero(state.keep)
        """int64 [], tokens that train."""

    @property
    def positions(self) -> Tensor:
        """int64 [T], the position t of each token among the trained tokens of its response, counted from 1."""
        if ("positions",) not in self._cache:
            self._cache["positions",] = positions(self._state.keep, self._state.cu_seqlens)
        return self._cache["positions",]

    def log(self, policies: Policies, scope: Scope = "token") -> Tensor:
        """Return the log-ratio [T] over the tokens of ``scope``; single tokens are clamped to +-20, sums are not."""
        if (policies, scope) not in self._cache:
            if scope == "token":
                numerator, denominator = self._state.pair(policies)
                log_ratio = (numerator - denominator).clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            else:
                log_ratio = aggregate(scope, self.log(policies), self._state.keep, self._state.cu_seqlens)
            self._cache[policies, scope] = log_ratio
        return self._cache[policies, scope]

    def ratio(self, policies: Policies, scope: Scope = "token") -> Tensor:
        """Return ``exp(log)`` [T], which may overflow to inf over several tokens."""
        key = (policies, scope, "ratio")
        if key not in self._cache:
            self._cache[key] = self.log(policies, scope).exp()
        return self._cache[key]
