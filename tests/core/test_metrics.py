from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.metrics import (
    HISTOGRAM_EDGES,
    Stat,
    finalize,
    merge,
    to_host,
)
from megarl.errors import NumericsError

BUILDERS = {
    "mean": Stat.mean,
    "max": Stat.max,
    "summary": Stat.summary,
    "ratio": Stat.ratio,
    "ess": lambda values, mask: Stat.ess_of(Stat.summary(values.exp(), mask)),
    "count": lambda values, mask: Stat.total(mask.sum()),
}
entries = st.lists(st.tuples(st.floats(-3, 3), st.booleans()), max_size=8)


def every_stat(values: list[tuple[float, bool]]) -> dict[str, Stat]:
    tensor = torch.tensor([x for x, _ in values], dtype=torch.float64)
    mask = torch.tensor([m for _, m in values], dtype=torch.bool)
    return {name: build(tensor, mask) for name, build in BUILDERS.items()}


def test_hand_computed():
    values = torch.tensor([1.0, 1, 1, 7, 1000])
    mask = torch.tensor([True, True, True, True, False])
    summary = Stat.summary(values, mask)
    numbers = finalize({"m": Stat.mean(values, mask), "e": Stat.ess_of(summary), "s": summary})
    assert numbers["m"] == 2.5
    assert numbers["e"] == pytest.approx(1.9230769230769231, abs=1e-12)
    assert numbers["e/fraction"] == pytest.approx(0.4807692307692308, abs=1e-12)
    assert (numbers["s/mean"], numbers["s/min"], numbers["s/max"]) == (2.5, 1, 7)
    assert numbers["s/std"] == pytest.approx(math.sqrt(6.75))
    of_ratio = finalize({"e": Stat.ess_of(Stat.ratio(values.log(), mask))})
    assert of_ratio["e"] == pytest.approx(numbers["e"], abs=1e-6)


def test_arrays_lists_and_numbers_are_values_too():
    values, mask = np.array([1.0, 2.5, 9.0]), np.array([True, True, False])
    assert float(Stat.mean(values, mask)) == float(Stat.mean([1.0, 2.5])) == float(Stat.mean(1.75)) == 1.75
    assert float(Stat.mean([0.1])) == 0.1, "a list is not rounded to fp32"
    assert float(Stat.mean(values > 2)) == pytest.approx(2 / 3)
    assert float(Stat.max(values, mask)) == 2.5


@settings(max_examples=60, deadline=None)
@given(left=entries, right=entries)
def test_merging_parts_gives_the_whole(left, right):
    whole = finalize(every_stat(left + right))
    assert finalize(merge([every_stat(left), every_stat(right)])) == pytest.approx(whole, rel=1e-9, abs=1e-7)


def test_nothing_observed_is_left_out():
    numbers = finalize(every_stat([(1.0, False)]))
    assert numbers == {"count": 0.0}
    assert finalize({}) == {}


def test_quantiles_of_a_known_distribution():
    """Quantiles come from a histogram whose bins are 15 % wide in |log r|, so they are good to 7.5 % there."""
    log_ratio = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    numbers = finalize({"r": Stat.ratio(log_ratio, torch.ones(20001, dtype=torch.bool))})
    assert math.log(numbers["r/p01"]) == pytest.approx(-0.98, rel=0.075)
    assert math.log(numbers["r/p99"]) == pytest.approx(0.98, rel=0.075)
    assert numbers["r/p50"] == pytest.approx(1.0, abs=2e-4)
    assert len(HISTOGRAM_EDGES) == 172
    constant = finalize({"r": Stat.ratio(torch.full((5,), 0.0), torch.ones(5, dtype=torch.bool))})
    assert [constant[f"r/{name}"] for name in ("mean", "std", "min", "max", "p01", "p99")] == [1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("bound", [-20.0, 20.0])
def test_quantiles_at_the_clamp(bound):
    numbers = finalize({"r": Stat.ratio(torch.full((3,), bound), torch.ones(3, dtype=torch.bool))})
    assert math.log(numbers["r/p50"]) == pytest.approx(bound, rel=0.075)


def test_a_metric_that_is_not_finite_is_an_error():
    with pytest.raises(NumericsError, match="'loss' is nan"):
        finalize({"loss": Stat.total(math.nan)})


def test_two_uses_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="two uses of one name"):
        Stat.total(1.0).merge(Stat.mean(torch.ones(2)))


def test_names_may_be_absent_from_some_parts():
    merged = merge([{"a": Stat.total(1)}, {"a": Stat.total(2), "b": Stat.total(5)}])
    assert finalize(merged) == {"a": 3.0, "b": 5.0}


def test_numbers_of_the_host_are_not_rounded():
    assert finalize({"a": Stat.max(0.1), "b": Stat.total(0.3)}) == {"a": 0.1, "b": 0.3}


def test_on_the_host_nothing_moves():
    given = every_stat([(1.0, True), (2.0, True)])
    moved = to_host(given)
    assert list(moved) == list(given)
    assert all(moved[name].sums is stat.sums and moved[name].maxima is stat.maxima for name, stat in given.items())
    assert [len(part) for part in (given["count"].sums, given["count"].maxima)] == [1, 0]


class Remote(torch.Tensor):
    """A tensor of the host that says it is on another device, and counts its transfers."""

    device = torch.device("meta")
    transfers = 0

    def cpu(self) -> torch.Tensor:
        Remote.transfers += 1
        return self.as_subclass(torch.Tensor)


def test_what_is_on_a_device_moves_to_the_host_at_once():
    given = every_stat([(1.0, True), (2.0, True), (9.0, False)])
    remote = {name: replace(given[name], sums=given[name].sums.as_subclass(Remote)) for name in ("mean", "summary")}
    moved = to_host(given | remote)
    assert Remote.transfers == 1
    assert all(type(moved[name].sums) is torch.Tensor for name in given)
    assert finalize(moved) == finalize(given)


def test_at_the_ends():
    below = finalize({"r": Stat.ratio(torch.full((3,), -30.0), torch.ones(3, dtype=torch.bool))})
    assert below["r/p50"] == pytest.approx(math.exp(-20)), "the first edge, not the second"
    above = finalize({"r": Stat.ratio(torch.full((3,), 30.0), torch.ones(3, dtype=torch.bool))})
    assert above["r/p50"] == pytest.approx(math.exp(20)), "the last edge"
    assert finalize({"m": Stat.max(torch.empty(0, dtype=torch.int64))}) == {}
    flags, mask = torch.tensor([True, True, False, True]), torch.tensor([True, True, True, False])
    assert float(Stat.mean(flags, mask)) == pytest.approx(2 / 3)


def test_means_of_columns_are_the_means_over_their_mask() -> None:
    mask = torch.tensor([True, False, True])
    columns = {"a": torch.tensor([1.0, 0.0, 2.0]), "b": torch.tensor([True, False, False])}
    found = Stat.means(columns, torch.count_nonzero(mask))
    assert finalize(found) == {name: finalize({name: Stat.mean(c, mask)})[name] for name, c in columns.items()}
    assert finalize(Stat.means(columns, torch.tensor(0))) == {}


def test_numbers_of_the_host_make_statistics() -> None:
    means = Stat.means_of({"share": (3.0, 4.0), "nothing": (0.0, 0.0)})
    maxima = {"low": Stat.max(-1.0), "high": Stat.max(2.5)}
    assert finalize(means | maxima) == {"share": 0.75, "low": -1.0, "high": 2.5}
    assert finalize(merge([means, means, maxima, {"low": Stat.max(1.0)}])) == {
        "share": 0.75,
        "low": 1.0,
        "high": 2.5,
    }
    totals = {"count": Stat.total(3), "sum": Stat.total(-0.5)}
    assert finalize(merge([totals, totals])) == {"count": 6.0, "sum": -1.0}
    assert Stat.means_of({}) == {}
