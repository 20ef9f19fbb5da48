"""Statistics that merge exactly over micro-batches and ranks, in any order and grouping.

A ``Stat`` holds only sums and maxima; a minimum is a negated maximum.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megarl.errors import NumericsError

Values = Tensor | np.ndarray | Sequence[float] | float
Kind = Literal["total", "mean", "exp_mean", "max", "summary", "ratio", "spread", "ess"]
Layout = tuple[tuple[str, Kind, int, int], ...]
"""Of statistics: name, kind, and how many sums and maxima each has."""

QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}
"""Suffix and level of the quantiles that a "ratio" or "spread" statistic reports."""

_EDGES = torch.logspace(-4, math.log10(20.0), 86, dtype=torch.float64)
HISTOGRAM_EDGES = torch.cat([-_EDGES.flip(0), _EDGES])
"""Float64 [172], edges of the log-ratio histogram: geometric on both sides of 0, so that a quantile of |log r| is
good to 7.5 % from 1e-4 to 20, and anything nearer to 0 counts as exactly 0."""
SPREAD_EDGES = torch.logspace(-12, 12, 385, dtype=torch.float64)
"""Float64 [385], edges of the histogram of values from 0 up: good to 7.5 % from 1e-12, below which all counts as 0."""
_HISTOGRAM_EDGES, _SPREAD_EDGES = HISTOGRAM_EDGES.tolist(), SPREAD_EDGES.tolist()
_LARGEST_EXPONENT = math.log(sys.float_info.max)
MOST_IN_HISTOGRAM = 1 << 16
"""Larger batches put every second entry, every third and so on into a histogram, with as much weight."""


@dataclass(frozen=True, slots=True, eq=False)
class Stat:
    """One statistic in a form that merges. Build it with the class methods; masks are bool and select the entries.

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
        """A sum: a count, or a loss that is already divided by global denominators."""
        return cls("total", _vector(value), _vector())

    @classmethod
    def mean(cls, values: Values, mask: Values | None = None) -> Stat:
        """Mean of the values over the mask."""
        return cls("mean", torch.stack(_sum(values, mask)), _vector(device=torch.as_tensor(values).device))

    @classmethod
    def means(cls, columns: Mapping[str, Tensor], count: Tensor) -> dict[str, Stat]:
        """The ``mean`` of several columns [T], each 0 outside of one mask with ``count`` entries; in one reduction."""
        sums = torch.stack([column.detach().double() for column in columns.values()]).sum(1)
        pairs = torch.stack([sums, count.double().expand_as(sums)], 1)
        return cls._means(columns, pairs)

    @classmethod
    def means_of(cls, sums: Mapping[str, tuple[float, float]]) -> dict[str, Stat]:
        """The ``mean`` of entries on the host, given their sum and how many they are."""
        return cls._means(sums, torch.tensor(list(sums.values()), dtype=torch.float64))

    @classmethod
    def _means(cls, names: Iterable[str], pairs: Tensor) -> dict[str, Stat]:
        none = _vector(device=pairs.device)
        return {name: cls("mean", pair, none) for name, pair in zip(names, pairs.unbind(), strict=True)}

    @classmethod
    def max(cls, values: Values, mask: Values | None = None) -> Stat:
        """Largest value over the mask."""
        largest = _largest(values, mask)
        return cls("max", _vector(device=largest.device), largest.reshape(1))

    @classmethod
    def maxima_of(cls, numbers: Mapping[str, float]) -> dict[str, Stat]:
        """The ``max`` of single numbers of the host."""
        found, none = torch.tensor([[value] for value in numbers.values()], dtype=torch.float64), _vector()
        return {name: cls("max", none, value) for name, value in zip(numbers, found.unbind(), strict=True)}

    @classmethod
    def totals_of(cls, numbers: Mapping[str, float]) -> dict[str, Stat]:
        """The ``total`` of numbers of the host, one each."""
        return {name: cls("total", each.maxima, each.sums) for name, each in cls.maxima_of(numbers).items()}

    @classmethod
    def summary(cls, values: Tensor, mask: Tensor | None = None) -> Stat:
        """Mean, population standard deviation, minimum and maximum over the mask."""
        values, mask = values.flatten(), None if mask is None else mask.flatten()
        selected, count = _select(values, mask)
        sums = torch.stack([count, selected.sum(), torch.dot(selected, selected)])
        wide = values.detach().double()
        return cls("summary", sums, _inside(torch.stack([wide, -wide]), mask, -math.inf).amax(1))

    @classmethod
    def ratio(cls, log_ratio: Tensor, mask: Tensor) -> Stat:
        """The summary of ``exp(log_ratio)`` and its quantiles, these from a histogram with HISTOGRAM_EDGES."""
        return cls._with_histogram("ratio", log_ratio.double().exp(), log_ratio, mask, HISTOGRAM_EDGES)

    @classmethod
    def spread(cls, values: Tensor, mask: Tensor) -> Stat:
        """The summary of values from 0 up over the mask, and their quantiles from a histogram with SPREAD_EDGES."""
        return cls._with_histogram("spread", values, values, mask, SPREAD_EDGES)

    @classmethod
    def _with_histogram(cls, kind: Kind, values: Tensor, sorted_by: Tensor, mask: Tensor, edges: Tensor) -> Stat:
        summary = cls.summary(values, mask)
        stride = -(-values.numel() // MOST_IN_HISTOGRAM) or 1
        if stride > 1:
            sorted_by, mask = sorted_by[::stride], mask[::stride]
        # Edges never change, so the host need not wait for their copy.
        bins = torch.bucketize(sorted_by.detach().double().contiguous(), edges.to(values.device, non_blocking=True))
        counts = summary.sums.new_zeros(edges.numel() + 1)
        counts.index_add_(0, bins, mask.double(), alpha=stride)
        return cls(kind, torch.cat([summary.sums, counts]), summary.maxima)

    @classmethod
    def ess_of(cls, summary: Stat) -> Stat:
        """Effective sample size ``(sum w)^2 / sum w^2`` of the weights that a "summary" or "ratio" is of, and, as
        ``_fraction``, its share of their number."""
        return cls("ess", summary.sums[:3], _vector(device=summary.sums.device))

    def merge(self, other: Stat) -> Stat:
        """Return the statistic of both sets of observations together."""
        if (self.kind, self.sums.shape) != (other.kind, other.sums.shape):
            raise ValueError(f"cannot merge a {other.kind!r} statistic into a {self.kind!r} one: two uses of one name")
        return Stat(self.kind, self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def values(self) -> dict[str, float]:
        """Return suffix -> number ("" for the main one); empty if nothing was observed."""
        return _FINALIZERS[self.kind](self.sums.tolist(), self.maxima.tolist())

    def __float__(self) -> float:
        """The main number; ValueError if the statistic has several, or saw nothing."""
        values = self.values()
        if "" not in values:
            raise ValueError(f"a {self.kind!r} statistic with the values {values} is not one number: use finalize()")
        return values[""]


def merge(dictionaries: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """Return name -> statistic over all observations; a name may be absent from some of the dictionaries."""
    merged: dict[str, Stat] = {}
    for statistics in dictionaries:
        for name, stat in statistics.items():
            merged[name] = merged[name].merge(stat) if name in merged else stat
    return merged


def layout_of(statistics: Mapping[str, Stat]) -> Layout:
    """Return what ``flatten`` needs to know of statistics, in their order."""
    return tuple((name, stat.kind, len(stat.sums), len(stat.maxima)) for name, stat in statistics.items())


def join_layouts(layouts: Iterable[Layout]) -> Layout:
    """Return the layout of all names; ValueError if a name has two kinds."""
    joined: dict[str, tuple[str, Kind, int, int]] = {}
    for entry in chain.from_iterable(layouts):
        if joined.setdefault(entry[0], entry) != entry:
            raise ValueError(f"cannot merge {entry} into {joined[entry[0]]}: two uses of one name")
    return tuple(joined.values())


def flatten(statistics: Mapping[str, Stat], layout: Layout) -> tuple[Tensor, Tensor]:
    """Return all sums and all maxima, float64 on the host, of names in this order.

    Statistics of the host that are the same or fewer. Sums and maxima of several ranks merge by addition and by
    maximum: an absent name is -0 and -inf, which change nothing, and a NaN among maxima is inf, because a maximum could
    lose it.
    """

    def column(of: Callable[[Stat], Tensor], sizes: Iterable[int], absent: float) -> Tensor:
        given = zip((statistics.get(name) for name, *_ in layout), sizes, strict=True)
        parts = [_vector().new_full((size,), absent) if stat is None else of(stat) for stat, size in given]
        return torch.cat([_vector(), *parts])

    sums = column(lambda stat: stat.sums, (size for *_, size, _ in layout), -0.0)
    maxima = column(lambda stat: stat.maxima, (size for *_, size in layout), -math.inf)
    return sums, torch.where(maxima.isnan(), math.inf, maxima)


def unflatten(sums: Tensor, maxima: Tensor, layout: Layout) -> dict[str, Stat]:
    """Return statistics from what ``flatten`` gave."""
    parts = zip(sums.split([a for *_, a, _ in layout]), maxima.split([b for *_, b in layout]), strict=True)
    return {name: Stat(kind, *each) for (name, kind, *_), each in zip(layout, parts, strict=True)}


def to_host(statistics: Mapping[str, Stat]) -> dict[str, Stat]:
    """Return the statistics on the host, after one transfer from their device."""
    parts = [part for stat in statistics.values() for part in (stat.sums, stat.maxima)]
    away = [part for part in parts if part.device.type != "cpu"]
    if not away:
        return dict(statistics)
    moved = iter(torch.cat(away).cpu().split([part.numel() for part in away]))
    found = iter([part if part.device.type == "cpu" else next(moved) for part in parts])
    return {name: replace(stat, sums=next(found), maxima=next(found)) for name, stat in statistics.items()}


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
    return torch.as_tensor(value).detach().double().reshape(1)


def _select(values: Values, mask: Values | None) -> tuple[Tensor, Tensor]:
    """Return the values in float64 with 0 outside the mask, and the number of entries inside."""
    wide = torch.as_tensor(values, dtype=torch.float64).detach()
    if mask is None:
        return wide, torch.full((), float(wide.numel()), dtype=torch.float64, device=wide.device)
    chosen = torch.as_tensor(mask)
    return torch.where(chosen, wide, 0.0), torch.count_nonzero(chosen).double()


def _sum(values: Values, mask: Values | None) -> list[Tensor]:
    """Return sum and number of the entries inside the mask, in float64."""
    given = torch.as_tensor(values)
    if given.dtype == torch.bool and mask is not None:
        chosen = torch.as_tensor(mask)
        return [torch.count_nonzero(given & chosen).double(), torch.count_nonzero(chosen).double()]
    selected, count = _select(values, mask)
    return [selected.sum(), count]


def _largest(values: Values, mask: Values | None) -> Tensor:
    """The largest entry in float64; -inf of nothing, which is what a later maximum needs."""
    flat = torch.as_tensor(values).flatten()
    return _inside(flat, None if mask is None else torch.as_tensor(mask).flatten(), -math.inf).amax().double()


def _inside(values: Values, mask: Values | None, other: float) -> Tensor:
    given = torch.as_tensor(values).detach()
    given = given if given.is_floating_point() else given.double()
    if not given.numel():
        return given.new_full((*given.shape[:-1], 1), other)
    return given if mask is None else torch.where(torch.as_tensor(mask), given, other)


def _mean(sums: list[float]) -> dict[str, float]:
    return {"": sums[0] / sums[1]} if sums[1] else {}


def _summary(sums: list[float], maxima: list[float]) -> dict[str, float]:
    count, first, second = sums[:3]
    if not count:
        return {}
    mean = first / count
    variance = max(second / count - mean * mean, 0.0)
    return {"mean": mean, "std": math.sqrt(variance), "min": -maxima[1], "max": maxima[0]}


def _exp(values: dict[str, float]) -> dict[str, float]:
    return {name: math.inf if value > _LARGEST_EXPONENT else math.exp(value) for name, value in values.items()}


def _quantiles(counts: list[float], edges: list[float]) -> dict[str, float]:
    """Return the middle of the first bin at which the cumulative share reaches each level; nothing of no counts."""
    cumulative = list(accumulate(counts))
    found: dict[str, float] = {}
    for suffix, level in QUANTILES.items() if cumulative[-1] else ():
        index = bisect_left(cumulative, level * cumulative[-1])
        if 0 < index < len(edges):
            low, high = edges[index - 1], edges[index]
            found[suffix] = 0.0 if low < 0 < high else math.copysign(math.sqrt(low * high), low)
        else:
            found[suffix] = min(edges[0], 0.0) if index == 0 else edges[-1]
    return found


def _ess(sums: list[float]) -> dict[str, float]:
    count, first, second = sums
    effective = first * first / second if second else 0.0
    return {"": effective, "fraction": effective / count} if second else {}


_FINALIZERS: Mapping[Kind, Callable[[list[float], list[float]], dict[str, float]]] = {
    "total": lambda sums, _: {"": sums[0]},
    "mean": lambda sums, _: _mean(sums),
    "exp_mean": lambda sums, _: _exp(_mean(sums)),
    "max": lambda _, maxima: {"": maxima[0]} if maxima[0] != -math.inf else {},
    "summary": _summary,
    "ratio": lambda sums, maxima: _summary(sums, maxima) | _exp(_quantiles(sums[3:], _HISTOGRAM_EDGES)),
    "spread": lambda sums, maxima: _summary(sums, maxima) | _quantiles(sums[3:], _SPREAD_EDGES),
    "ess": lambda sums, _: _ess(sums),
}
