"""Metrics of several ranks reach the main rank as one column of sums and one of maxima."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix_world import LAYOUTS, Variant, settings_of
from ranks import Case
from tiny_world import join

from megarl.core.metrics import Stat, finalize, merge
from megarl.megatron import distributed

CASES = {
    name: Case(LAYOUTS[name][0], "test_megatron_metrics:collected", LAYOUTS[name][1])
    for name in ("dp2", "dp4", "pp2", "cp2 tp2 ep2 etp1", "tp2 ep2 etp2")
}


@pytest.mark.multirank
@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=[name.replace(" ", "-") for name in CASES])
def test_metrics_are_those_of_a_merge_in_rank_order(name: str, case: Case, outcome: list[dict[str, Any]]) -> None:
    copies = case.world_size // {"pp2": 2, "cp2 tp2 ep2 etp1": 4, "tp2 ep2 etp2": 2}.get(name, 1)
    for of_rank in outcome:
        assert all(found["same"] for found in of_rank.values() if isinstance(found, dict))
    assert ("two uses of one name" in outcome[0]["kinds"]) == (copies > 1)
    assert outcome[0]["differing"]["names"] == ["only/0", "loss", *(f"only/{copy}" for copy in range(1, copies))]
    assert "unseen" not in outcome[0]["alike"]["names"]
    (most,) = outcome[0]["nan"]
    assert math.isnan(most) == (copies > 1), "a maximum must not lose it"


def collected(layout: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers whose sums are exact, so that the order of ranks changes no bit; and what travelled."""
    join(settings_of(layout, Variant()))
    rank, copy = dist.get_rank(), distributed.dp_rank()
    values = torch.arange(4, dtype=torch.float64) + copy
    alike = {
        "layer/9": Stat.summary(values),
        "loss": Stat.total(-0.0),
        "layer/10": Stat.summary(values, values > 1),
        "most": Stat.max(values * (-1) ** copy),
        "unseen": Stat.max(values, values < 0),
    }
    own = {f"only/{copy}": Stat.mean(values), "loss": Stat.total(float(copy))}
    found = {}
    for name, mine in {"alike": alike, "differing": own, "none": {}}.items():
        got = distributed.collect([mine])
        everything = distributed.gather_objects(mine if distributed.holds_outputs() else {})
        found[name] = {
            "same": (got is None) == (rank > 0) and (got is None or _same(got, merge(everything))),
            "names": [] if got is None else list(finalize(got)),
        }
    broken = {"most": Stat.max(torch.tensor([float("nan") if distributed.dp_rank() else 1.0]))}
    got = distributed.collect([broken])
    found["nan"] = None if got is None else got["most"].maxima.tolist()
    kinds = {"loss": Stat.total(1.0) if copy else Stat.mean(torch.ones(2))}
    try:
        distributed.collect([kinds])
        found["kinds"] = "no error"
    except ValueError as error:
        found["kinds"] = str(error)
    return distributed.gather_objects(found)


def _same(first: dict[str, Stat], second: dict[str, Stat]) -> bool:
    return list(first) == list(second) and all(
        (one.kind, one.sums.tolist(), str(one.sums.tolist()), one.maxima.tolist())
        == (other.kind, other.sums.tolist(), str(other.sums.tolist()), other.maxima.tolist())
        for one, other in zip(first.values(), second.values(), strict=True)
    )
