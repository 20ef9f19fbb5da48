"""Statistics that merge exactly over micro-batches and ranks, in any order and grouping.

A ``Stat`` holds only sums and maxima; a minimum is a negated maximum.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.errors import NumericsError

Values = Tensor | np.ndarray | Sequence[float] | float
Kind = Literal["total", "mean", "max", "summary", "ratio", "ess"]

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
"""Suffix and level of the quantiles that a "ratio" statistic reports."""

_EDGES = torch.logspace(-4, math.log10(20.0), 86, dtype=torch.float64)
HISTOGRAM_EDGES = torch.cat([-_EDGES.flip(0), _EDGES])
"""Float64 [172], edges of the log-ratio histogram: geometric on both sides of 0. A quantile of |log r| is exact to 7.5
% from 1e-4 to 20; smaller values count as 0."""
_HISTOGRAM_EDGES = HISTOGRAM_EDGES.tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Stat:
    """A statistic that merges by addition and maximum. Build it with the class methods; masks are bool and select the
    entries.

    Values and masks are tensors, on any device, or arrays or lists on the host.
    """

    kind: Kind
    """How ``finalize`` reads the numbers."""
    sums: Tensor
    """float64 [S], merged by addition."""
    maxima: Tensor
    """float64 [M], merged by maximum; -inf where nothing was observed."""

    @classmethod
    def total(cls, value: Tensor | float) -> Stat:
        """A sum: a count, or a loss that is already divided by global denominators. value: a scalar."""
        return cls("total", _vector(value), _vector())

    @classmethod
    def mean(cls, values: Values, mask: Values | None = None) -> Stat:
        """Mean of the values over the mask."""
        selected, count = _select(values, mask)
        return cls("mean", torch.stack([selected.sum(), count]), _vector(device=selected.device))

    @classmethod
    def means(cls, columns: Mapping[str, Tensor], count: Tensor) -> dict[str, Stat]:
        """Return the ``mean`` of columns [T] by name, in one reduction. Columns are 0 outside a mask with ``count``
        entries."""
        sums = torch.stack([column.detach().double() for column in columns.values()]).sum(1)
        pairs, none = torch.stack([sums, count.double().expand_as(sums)], 1), _vector(device=sums.device)
        return {name: cls("mean", pair, none) for name, pair in zip(columns, pairs.unbind(), strict=True)}

    @classmethod
    def means_of(cls, sums: Mapping[str, tuple[float, float]]) -> dict[str, Stat]:
        """Return the ``mean`` by name of entries on the host, from (sum, count)."""
        return {name: cls("mean", torch.tensor(pair, dtype=torch.float64), _vector()) for name, pair in sums.items()}

    @classmethod
    def max(cls, values: Values, mask: Values | None = None) -> Stat:
        """Largest value over the mask."""
        flat = (values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))).flatten()
        largest = _inside(flat, None if mask is None else torch.as_tensor(mask).flatten()).amax().double()
        return cls("max", _vector(device=largest.device), largest.reshape(1))

    @classmethod
    def summary(cls, values: Tensor, mask: Tensor | None = None) -> Stat:
        """Mean, population standard deviation, minimum and maximum over the mask. values, mask: [T]."""
        values, mask = values.flatten(), None if mask is None else mask.flatten()
        selected, count = _select(values, mask)
        sums = torch.stack([count, selected.sum(), torch.dot(selected, selected)])
        wide = values.detach().double()
        return cls("summary", sums, _inside(torch.stack([wide, -wide]), mask).amax(1))

    @classmethod
    def ratio(cls, log_ratio: Tensor, mask: Tensor) -> Stat:
        """The summary of ``exp(log_ratio)``, with quantiles from a histogram with HISTOGRAM_EDGES. log_ratio, mask:
        [T].
        """
        summary = cls.summary(log_ratio.double().exp(), mask)
        # Edges are constant: the host need not wait for the copy.
        edges = HISTOGRAM_EDGES.to(log_ratio.device, non_blocking=True)
        bins = torch.bucketize(log_ratio.detach().double().contiguous(), edges)
        counts = summary.sums.new_zeros(edges.numel() + 1)
        counts.index_add_(0, bins, mask.double())
        return cls("ratio", torch.cat([summary.sums, counts]), summary.maxima)

    @classmethod
    def ess_of(cls, summary: Stat) -> Stat:
        """Effective sample size ``(sum w)^2 / sum w^2`` of the weights in a "summary" or "ratio", with suffix
        ``fraction`` also divided by the number of weights."""
        return cls("ess", summary.sums[:3], _vector(device=summary.sums.device))

    def merge(self, other: Stat) -> Stat:
        """Return the statistic of both sets of observations together. ValueError for two kinds."""
        if (self.kind, self.sums.shape) != (other.kind, other.sums.shape):
            raise ValueError(f"cannot merge a {other.kind!r} statistic into a {self.kind!r} one: two uses of one name")
        return Stat(self.kind, self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def values(self) -> dict[str, float]:
        """Return suffix -> number ("" for the main one); empty if nothing was observed."""
        return _FINALIZERS[self.kind](self.sums.tolist(), self.maxima.tolist())

    def __float__(self) -> float:
        """The main number; KeyError if the statistic has none, or saw nothing."""
        return self.values()[""]


def merge(dictionaries: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Return name -> statistic over all observations; a name may be absent from some of the dictionaries."""
    merged: dict[str, Stat] = {}
    for statistics in dictionaries:
        for name, stat in statistics.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    return merged


def to_host(statistics: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return the statistics on the host, with a single transfer."""
    tensors = [tensor for stat in statistics.values() for tensor in (stat.sums, stat.maxima)]
    remote = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not remote:
        return dict(statistics)
    moved = iter(torch.cat(remote).cpu().split([tensor.numel() for tensor in remote]))
    on_host = iter([tensor if tensor.device.type == "cpu" else next(moved) for tensor in tensors])
    return {name: replace(stat, sums=next(on_host), maxima=next(on_host)) for name, stat in statistics.items()}


def finalize(statistics: Mapping[str, Stat]) -> dict[str, float]:
    """Return plain numbers by name, several statistics with a suffix (``ratio/max``); unobserved ones are left out.

    Raises NumericsError if a number is not finite: a metric must not hide it.
    """
    numbers = {
        f"{name}/{suffix}" if suffix else name: value
        for name, stat in statistics.items()
        for suffix, value in stat.values().items()
    }
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise NumericsError(f"metric {name!r} is {value}, expected a finite number: look at the column behind it")
    return numbers


def _vector(value: Tensor | float | None = None, device: torch.device | None = None) -> Tensor:
    if value is None:
        return torch.empty(0, dtype=torch.float64, device=device)
    return torch.as_tensor(value, dtype=torch.float64).detach().reshape(1)


def _select(values: Values, mask: Values | None) -> tuple[Tensor, Tensor]:
    """Return the values in float64 with 0 outside the mask, and the number of entries inside."""
    wide = torch.as_tensor(values, dtype=torch.float64).detach()
    if mask is None:
        return wide, torch.full((), float(wide.numel()), dtype=torch.float64, device=wide.device)
    inside = torch.as_tensor(mask)
    return torch.where(inside, wide, 0.0), torch.count_nonzero(inside).double()


def _inside(values: Tensor, mask: Tensor | None) -> Tensor:
    """The entries inside the mask; -inf, neutral for a maximum, elsewhere and for no entries."""
    entries = values.detach()
    entries = entries if entries.is_floating_point() else entries.double()
    if not entries.numel():
        return entries.new_full((*entries.shape[:-1], 1), -math.inf)
    return entries if mask is None else torch.where(mask, entries, -math.inf)


def _summary(sums: list[float], maxima: list[float]) -> dict[str, float]:
    count, first, second = sums[:3]
    if not count:
        return {}
    mean = first / count
    return {"mean": mean, "std": math.sqrt(max(second / count - mean * mean, 0.0)), "min": -maxima[1], "max": maxima[0]}


def _quantiles(counts: list[float]) -> dict[str, float]:
    """Return by quantile the ratio in the middle of the first bin with a cumulative share above the level."""
    edges, cumulative = _HISTOGRAM_EDGES, list(accumulate(counts))
    quantiles: dict[str, float] = {}
    for suffix, level in QUANTILES.items() if cumulative[-1] else ():
        index = bisect_left(cumulative, level * cumulative[-1])
        if 0 < index < len(edges):
            low, high = edges[index - 1], edges[index]
            log_ratio = 0.0 if low < 0 < high else math.copysign(math.sqrt(low * high), low)
        else:
            log_ratio = edges[0] if index == 0 else edges[-1]
        quantiles[suffix] = math.exp(log_ratio)
    return quantiles


def _ess(sums: list[float]) -> dict[str, float]:
    count, first, second = sums
    effective = first * first / second if second else 0.0
    return {"": effective, "fraction": effective / count} if second else {}


_FINALIZERS: Mapping[Kind, Callable[[list[float], list[float]], dict[str, float]]] = {
    "total": lambda sums, _: {"": sums[0]},
    "mean": lambda sums, _: {"": sums[0] / sums[1]} if sums[1] else {},
    "max": lambda _, maxima: {"": maxima[0]} if maxima[0] != -math.inf else {},
    "summary": _summary,
    "ratio": lambda sums, maxima: _summary(sums, maxima) | _quantiles(sums[3:]),
    "ess": lambda sums, _: _ess(sums),
}
