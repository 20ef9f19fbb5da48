"""How long new weights take from a sharded Megatron model to an SGLang server, by way and by part.

    torchrun --nproc-per-node 2 tools/bench_sync.py --python .venv-sglang/bin/python [--rounds 5] [--hidden 256]

Starts one server of a random Qwen3-MoE in fp32. Every round measures all ways in turn.

- gather: from the ranks of the trainer
- quantise: rounding through FP8 blocks, and casting
- send: what involves the server (pause, transfer, flush, verification)

Prints medians with minimum and maximum, in seconds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from megarl.config.file import parse
from megarl.data.tiny import write_tiny_model
from megarl.megatron import distributed
from megarl.megatron.policy import Policy, schedule_of
from megarl.rollout.sglang.server import Server
from megarl.rollout.sglang.spec import ServerSpec
from megarl.rollout.sglang.weights.ipc import Exchange
from megarl.train.engines import make_engine

WAYS = ("tensor", "distributed", "ipc", "disk")
PARTS = ("gather", "quantise", "send")


def main() -> None:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    table: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": "", "dtype": "fp32"},
        "parallel": {"ep": 2},
        "data": {"train": "none", "max_prompt_tokens": 16},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": 4,
            "max_response_tokens": 8,
            "dtype": "fp32",
            "fp8_rounding": True,
            "engine": "sglang",
        },
        "train": {"micro_batch_tokens": 64},
        "optim": {"lr": 1e-6},
    }
    with ExitStack() as stack:
        table["model"]["path"] = model = stack.enter_context(tempfile.TemporaryDirectory()) + "/model"
        hidden = int(flags.get("--hidden", "256"))
        write_tiny_model(model, hidden_size=hidden, num_layers=4, num_experts=64, expert_width=hidden)
        table["run"]["dir"] = f"{model}-run"
        distributed.initialize(parse(table))
        urls: list[Any] = [None, f"{model}-run"]
        if dist.get_rank() == 0:
            spec = ServerSpec(model, flags["--python"], "float32", f"{model}-log", max_total_tokens=4096)
            server = stack.enter_context(Server(spec))
            server.wait_ready(300.0)
            urls[0] = server.url
        dist.broadcast_object_list(urls)
        table["sglang"], table["run"]["dir"] = {"urls": urls[:1]}, urls[1]
        # The configuration refuses "ipc" for servers at urls, which may be on another machine. This one is not.
        configs = {way: parse(table, {"sglang.sync": "distributed" if way == "ipc" else way}) for way in WAYS}
        policy = Policy(configs["tensor"], schedule_of(configs["tensor"]))
        engines = {way: make_engine(config, print) for way, config in configs.items()}
        if (fleet := engines["ipc"]._fleet) is not None:
            fleet.exchange = Exchange()
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for version in range(1 + int(flags.get("--rounds", "5"))):
            for way, engine in engines.items():
                engine.update_weights(policy.export(), version)
                found[way] += [dict(engine.sync_seconds)] if version else []  # the first one opens groups and caches
        num_bytes = sum(4 * tensor.numel() for _, tensor in policy.export())
        if dist.get_rank() == 0:
            _print(found, num_bytes)
        for engine in engines.values():
            engine.close()
    distributed.shutdown()


def _print(found: dict[str, list[dict[str, float]]], num_bytes: int) -> None:
    print(f"{num_bytes / 2**20:.0f} MiB of weights, {dist.get_world_size()} ranks")
    print(f"{'way':>12}" + "".join(f"{part:>28}" for part in PARTS))
    for way, rounds in found.items():
        cells = ""
        for part in PARTS:
            seconds = [one[part] for one in rounds]
            middle = statistics.median(seconds)
            cells += f"{f'{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f})':>28}"
        print(f"{way:>12}{cells}")


if __name__ == "__main__":
    main()
