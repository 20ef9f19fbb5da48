"""One of two pipeline stages that update a server, from one source and from two; bench_sync.py starts both.

    python tools/sources_worker.py MODEL URL ROUNDS FOLDER

Rank 0 prints, as JSON, for each way the measures of each round: CPU seconds of both ranks ("update") and of the clock,
both in copies of the weights into new memory; bytes that rank 0 receives from the other stage ("gathered") and has sent
("sent"), in those of the weights; and by how many largest buckets it grows ("memory").
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_sync import FP32, _peak, _policy, _seconds

from megarl.core.types import WeightShare
from megarl.engines.buckets import Bucket
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import BUCKET_BYTES, Fleet
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.weights import WeightForm
from megarl.megatron import distributed, hf_weights
from megarl.models.hf_files import bucket_bytes
from megarl.trainer import engines

COUNTED = {"gathered": 0, "sent": 0}


def _count() -> None:
    """Count what passes from now on."""
    hand_over, broadcast = hf_weights._Hop.hand_over, WeightSender.broadcast

    def received(hop: Any, whole: torch.Tensor | None, owner: int, *more: Any) -> torch.Tensor | None:
        found = hand_over(hop, whole, owner, *more)
        COUNTED["gathered"] += found.nbytes if found is not None and owner != hop.group.rank() else 0
        return found

    def sent(sender: WeightSender, bucket: Bucket, *more: Any) -> None:
        COUNTED["sent"] += bucket.flat.numel()
        broadcast(sender, bucket, *more)

    hf_weights._Hop.hand_over, WeightSender.broadcast = received, sent  # type: ignore[method-assign]


def main() -> None:
    model, url, rounds, folder = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    _count()
    served = {"sglang": {"urls": [url], "sync": "distributed", "spare_weights": "none"}}
    with _policy(model, folder, parallel={"pp": 2}, engine="sglang", **served) as policy:
        several = engines.make_sglang_engine(policy.config, lambda _: None)
        fleet = Fleet(urls=[url], source=model, broadcast=True, keeps_copy=False, tell=lambda _: None)
        fleet = fleet if distributed.is_main_rank() else None
        if fleet is not None:
            fleet.start()
        settings = json.loads((model / "config.json").read_text())
        agree = partial(distributed.fail_together, what="the update")
        one = SGLangEngine([url], settings, fleet=fleet, agree=agree, form=WeightForm(FP32))
        found = {name: list(_measure(policy, engine, rounds)) for name, engine in (("one", one), ("two", several))}
        if distributed.is_main_rank():
            print(json.dumps(found))
        several.close()
        one.close()
        distributed.barrier()


def _measure(policy: Any, engine: SGLangEngine, rounds: int) -> Iterator[dict[str, float]]:
    share = engine.receives_weights
    mine = sum(4 * tensor.numel() for _, tensor in policy.export(WeightShare(True, False)))
    num_bytes = sum(distributed.gather_objects(mine))
    source = torch.ones(num_bytes // 4)
    for version in range(rounds + 2):  # the first two open groups and fill caches
        copy_s, _, _ = _seconds(source.clone)
        COUNTED.update(gathered=0, sent=0)
        ctypes.CDLL(None).malloc_trim(0)  # what earlier updates have left would hide what this one takes
        distributed.barrier()
        with _peak() as grown:
            cpu_s, clock_s, _ = _seconds(lambda version=version: engine.update_weights(policy.export(share), version))
        cpu_s = sum(distributed.gather_objects(cpu_s))
        parts = {"update": cpu_s / copy_s, "clock": clock_s / copy_s}
        parts |= {name: number / num_bytes for name, number in COUNTED.items()}
        parts["memory"] = grown[0] / bucket_bytes(num_bytes // 4, BUCKET_BYTES)
        if version > 1:
            yield parts


if __name__ == "__main__":
    main()
