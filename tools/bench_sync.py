"""What an update of an engine's weights costs, against a plain copy of the same bytes, by way and by part.

    python tools/bench_sync.py [--json FILE] [--rounds 5] [--python .venv-sglang/bin/python]

One rank of real Megatron sends a random Qwen3-MoE in fp32 to a server on this machine, and to the local engine. The
server is the stand-in of the tests, a process of its own that reads every byte and loads none. With ``--python`` it is
a real SGLang server, whose own loading then rules.

A plain copy puts the weights into new memory (``clone``); it is measured beside every update. Updates are in CPU
seconds of this process, all threads; "clock" is what the trainer waits.

Ratios are medians over rounds, with minimum and maximum. The small model shows fixed costs. Peak memory is the growth
of this process over its size before an update, in units of the largest bucket.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoConfig

from megarl.config.file import parse
from megarl.config.tables.rollout import SGLangConfig
from megarl.data.tiny import write_tiny_model
from megarl.engines.local.engine import LocalEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec, free_port
from megarl.engines.sglang.transports.broadcast import Broadcast
from megarl.engines.sglang.transports.folder import Disk
from megarl.engines.sglang.transports.ipc import SharedMemory
from megarl.engines.sglang.transports.protocol import Tensors, Transport
from megarl.engines.weights import BUCKET_BYTES, WeightForm
from megarl.megatron import distributed
from megarl.megatron.policy import Policy, schedule_of

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, finish

STAND_IN = Path(__file__).parents[1] / "tests/engines/sglang_stand_in.py"
FP32, BF16 = torch.float32, torch.bfloat16
SIZES = {"small": {"hidden_size": 64, "num_experts": 32}, "large": {"hidden_size": 256, "num_experts": 64}}
BUDGET = 3.0
"""At most, for the whole update of a large model by the best way, in plain copies."""


def measure(rounds: int, python: str | None) -> Iterator[dict[str, Any]]:
    """Yields the rows."""
    for size, fields in SIZES.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = write_tiny_model(folder / "model", num_layers=4, expert_width=fields["hidden_size"], **fields)
            policy = stack.enter_context(_policy(model, folder))
            url = stack.enter_context(_real(model, python, folder) if python else _stand_in(folder))
            yield from _measure(size, policy, model, folder, url, rounds, real=python is not None)


def _measure(
    size: str, policy: Policy, model: Path, folder: Path, url: str, rounds: int, real: bool
) -> Iterator[dict[str, Any]]:
    ways: dict[str, tuple[Fleet, WeightForm]] = {}

    def add(name: str, form: WeightForm, transport: Transport, copies: Any = "memory") -> None:
        settings = SGLangConfig(checksums=False)
        fleet = Fleet(urls=[url], source=model, tell=print, transport=transport, settings=settings, copies=copies)
        ways[name] = fleet, form

    add("ipc", WeightForm(FP32), SharedMemory(), "none")
    add("ipc, spare copy", WeightForm(FP32), SharedMemory())
    add("ipc, bf16", WeightForm(BF16), SharedMemory(), "none")
    add("ipc, FP8 rounded", WeightForm(FP32, "rounded"), SharedMemory(), "none")
    add("disk", WeightForm(FP32), Disk(), folder / "weights")
    if real:
        add("distributed", WeightForm(FP32), Broadcast())
    else:
        add("ipc, FP8 blocks", WeightForm(FP32, "blocks"), SharedMemory(), "none")
    if real or size == "small":
        add("tensor over HTTP", WeightForm(FP32), Tensors())
    num_bytes = sum(4 * tensor.numel() for _, tensor in policy.export())
    source, target = (torch.ones(num_bytes // 4) for _ in range(2))
    local = {f"local engine{name}": _local(model, on) for name, on in (("", False), (", FP8 rounded", True))}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*ways, *local)}
    for fleet, _ in ways.values():
        fleet.start()

    def update(name: str, version: int) -> None:
        if name in local:
            local[name].update_weights(policy.export(), version)
        else:
            fleet, form = ways[name]
            fleet.update(policy.export(), version, form)

    for version in range(1, rounds + 3):  # the first two open groups and fill caches
        for name in found:
            copy_s, _ = _seconds(source.clone)
            warm_s, _ = _seconds(lambda: target.copy_(source))
            with _peak() as grown:
                cpu_s, clock_s = _seconds(partial(update, name, version))
            cost = {"update": cpu_s / copy_s, "clock": clock_s / copy_s, "warm": cpu_s / warm_s, "memory": grown[0]}
            found[name] += [cost] if version > 2 else []
    for fleet, _ in ways.values():
        fleet.close()
    largest = min(BUCKET_BYTES, max(8 << 20, num_bytes // 16))
    for name, runs in found.items():
        best = size == "large" and name == "ipc" and not real
        columns = {
            "update / plain copy": "update",
            "update / copy into memory in use": "warm",
            "clock / plain copy": "clock",
        }
        for what, part in columns.items():
            budget = BUDGET if best and part == "update" else None
            yield _row(f"{size}: {name}", what, [run[part] for run in runs], budget)
        yield _row(f"{size}: {name}", "peak memory / largest bucket", [run["memory"] / largest for run in runs])


def _row(name: str, what: str, values: list[float], budget: float | None = None) -> dict[str, Any]:
    found = {"value": statistics.median(values), "unit": "x", "low": min(values), "high": max(values)}
    return {"name": name, "what": what, **found, "budget": budget, "kind": "at_most" if budget else None}


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds of this process, seconds of the clock)."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - started


@contextmanager
def _peak() -> Iterator[list[float]]:
    """Gives the bytes by which this process grew inside at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is used now
    before, grown = _status("VmRSS"), [0.0]
    yield grown
    grown[0] = _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _local(model: Path, fp8: bool) -> LocalEngine:
    return LocalEngine(AutoConfig.from_pretrained(model), fp8_rounding=fp8)


@contextmanager
def _policy(model: Path, folder: Path, engine: str = "local", **tables: Any) -> Iterator[Policy]:
    table: Mapping[str, Any] = {
        "run": {"steps": 1, "dir": str(folder / "run")},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "none", "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 8, "dtype": "fp32"}
        | {"engine": engine},
        "train": {"micro_batch_tokens": 64},
        "optim": {"lr": 1e-6},
        **tables,
    }
    config = parse(table)
    distributed.initialize(config)
    try:
        yield Policy(config, schedule_of(config))
    finally:
        distributed.shutdown()


@contextmanager
def _stand_in(folder: Path) -> Iterator[str]:
    port = free_port("127.0.0.1")
    process = subprocess.Popen([sys.executable, str(STAND_IN), str(port), str(folder)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{url}/health", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def _real(model: Path, python: str, folder: Path) -> Iterator[str]:
    spec = ServerSpec(model, python, "float32", folder / "log", max_total_tokens=4096)
    with Server(spec) as server:
        server.wait_ready(300.0)
        yield server.url


def main() -> int:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    torch.set_num_threads(1)
    rows = []
    for row in measure(int(flags.get("--rounds", "5")), flags.get("--python")):
        rows.append(row)
        budget = f"  at most {row['budget']:.1f}" if row["budget"] else ""
        span = f"{row['value']:8.2f} {row['unit']}  ({row['low']:.2f} to {row['high']:.2f})"
        print(f"{row['name']:32} {row['what']:32} {span}{budget}", flush=True)
    return finish([Row(**row) for row in rows], Path(flags["--json"]) if "--json" in flags else None)


if __name__ == "__main__":
    sys.exit(main())
