"""Cases that run on several ranks: metrics reach the main rank as one column of sums and one of maxima."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from matrix_world import Variant, settings_of
from tiny_world import join

from megarl.core.metrics import Stat, finalize, merge
from megarl.megatron import distributed


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
        got = distributed.collect_metrics(mine)
        everything = distributed.gather_objects(mine if distributed.holds_outputs() else {})
        found[name] = {
            "same": (got is None) == (rank > 0) and (got is None or _same(got, merge(everything))),
            "names": [] if got is None else list(finalize(got)),
        }
    broken = {"most": Stat.max(torch.tensor([float("nan") if distributed.dp_rank() else 1.0]))}
    got = distributed.collect_metrics(broken)
    found["nan"] = None if got is None else got["most"].maxima.tolist()
    kinds = {"loss": Stat.total(1.0) if copy else Stat.mean(torch.ones(2))}
    try:
        distributed.collect_metrics(kinds)
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
