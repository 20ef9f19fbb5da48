"""The SGLang client: bytes on the wire, what coding them costs, and requests/s against the server's own limit.

    python tools/bench_sglang.py [--requests 256] [--repeats 5] [--prompt 32] [--response 16] [--concurrency 64]
                                 [--layers 3] [--experts 32] [--top-k 2] [--url URL --model FOLDER]

Starts a server of a tiny random model (.venv-sglang, see `make sglang-cpu`), or asks the one at --url, whose weights
version it sets to 0. The limit is what a loop over plain sockets gets out of the same server with the same requests,
written beforehand, that reads the answers and throws them away. Limit, client with the short form of routes, and client
with the plain form run in turn; ratios are of neighbours, the rest are medians (lowest to highest). "cpu" is time of
this process; the server shares the machine. Rates of coding are of one thread and random routes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np

from megarl.core.types import SampleRequest
from megarl.data.tiny import write_tiny_model
from megarl.models.shapes import MoeShape
from megarl.rollout.engine import SamplingParams
from megarl.rollout.sglang.answers import decode_routes
from megarl.rollout.sglang.client import ClientSettings
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.plugin.compact import compact, make_header
from megarl.rollout.sglang.server import Server
from megarl.rollout.sglang.spec import ServerSpec

PYTHON = Path(__file__).parents[1] / ".venv-sglang" / "bin" / "python"
MODELS = {
    "Qwen3-30B-A3B": MoeShape(48, tuple(range(48)), 128, 8),
    "Qwen3-235B-A22B": MoeShape(94, tuple(range(94)), 128, 8),
    "DeepSeek-V3": MoeShape(61, tuple(range(3, 61)), 256, 8),
}


def coding(name: str, shape: MoeShape, tokens: int, repeats: int) -> None:
    """Bytes per token, and microseconds per token at both ends."""
    rng = np.random.default_rng(0)
    whole = np.zeros((tokens, shape.num_layers, shape.topk), "<i4")
    for row in whole:
        scores = rng.random((len(shape.moe_layers), shape.num_experts), dtype=np.float32)
        row[list(shape.moe_layers)] = np.argpartition(scores, shape.topk, axis=1)[:, : shape.topk]
    raw = whole.tobytes()
    short = compact(raw, shape)
    assert short is not None
    plain_text, short_text = (base64.b64encode(data).decode() for data in (raw, short))
    steps: dict[str, Callable[[], object]] = {
        "server": lambda: compact(raw, shape),
        "client, plain": lambda: decode_routes(plain_text, tokens, shape, name),
        "client, short": lambda: decode_routes(short_text, tokens, shape, name),
    }
    seconds: dict[str, list[float]] = {step: [] for step in steps}
    for _ in range(repeats):
        for step, work in steps.items():
            started = time.process_time()
            work()
            seconds[step].append(time.process_time() - started)
    cost = ", ".join(f"{step} {1e6 * statistics.median(found) / tokens:.1f}" for step, found in seconds.items())
    sizes = [len(text) / tokens for text in (plain_text, short_text)]
    print(
        f"{name}: {sizes[0]:.0f} -> {sizes[1]:.1f} bytes/token, {sizes[0] / sizes[1]:.2f} times less; us/token: {cost}"
    )


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    cpu: float
    """Seconds of this process."""


def timed(work: Callable[[], object]) -> Run:
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return Run(time.perf_counter() - started, time.process_time() - cpu)


def raw_posts(url: str, bodies: Sequence[bytes], concurrency: int) -> int:
    """Send all bodies over plain sockets; returns the bytes of the answers."""
    address, received = urlsplit(url), 0
    waiting: Iterator[bytes] = iter(bodies)

    async def connection() -> None:
        nonlocal received
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 24)
        for body in waiting:
            writer.write(
                b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if not head.startswith(b"http/1.1 200"):
                raise SystemExit(f"the server answers {head!r}")
            length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            received += len(await reader.readexactly(length))
        writer.close()

    async def all_of_them() -> None:
        await asyncio.gather(*(connection() for _ in range(min(concurrency, len(bodies)))))

    asyncio.run(all_of_them())
    return received


@contextmanager
def server_of(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    if args.url:
        yield args.url, Path(args.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(
            Path(folder) / "model",
            hidden_size=64,
            expert_width=32,
            num_layers=args.layers,
            num_experts=args.experts,
            top_k=args.top_k,
            initializer_range=0.3,
        )
        spec = ServerSpec(model, PYTHON, "float32", Path(folder) / "log", max_total_tokens=65536)
        with Server(spec) as server:
            server.wait_ready(deadline_s=300.0)
            yield server.url, model


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def answer_sizes(url: str, body: bytes, shape: MoeShape) -> None:
    """Bytes of one answer, plain and short."""
    for name, headers in (("plain", {}), ("short", make_header(shape))):
        headers = headers | {"content-type": "application/json"}
        answer = httpx.post(f"{url}/generate", content=body, headers=headers, timeout=600.0).raise_for_status()
        meta = answer.json()["meta_info"]
        tokens = meta["prompt_tokens"] + meta["completion_tokens"]
        routes = len(meta["routed_experts"]) / tokens
        print(f"{name}: routes {routes:.1f} bytes per token, whole answer {len(answer.content) / tokens:.1f}")


def rates(url: str, model: Path, args: argparse.Namespace) -> None:
    config = json.loads((model / "config.json").read_text())
    httpx.post(f"{url}/update_weight_version", json={"new_version": "0"}, timeout=60.0).raise_for_status()
    params = SamplingParams(max_response_tokens=args.response)
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(rng.integers(2, config["vocab_size"], args.prompt, dtype=np.int32), group, 0, 0)
        for group in range(args.requests)
    ]
    engines = {}
    for name, is_short in (("client, short", True), ("client, plain", False)):
        settings = ClientSettings(concurrency=args.concurrency, compact_routes=is_short)
        engines[name] = SGLangEngine([url], config, fleet=None, settings=settings)
        engines[name].update_weights([], 0)  # none are sent: the server keeps its own
    bodies = [json.dumps(engines["client, short"]._body(request, params)).encode() for request in requests]
    answer_sizes(url, bodies[0], MoeShape.of(config))
    work: dict[str, Callable[[], object]] = {"limit": lambda: raw_posts(url, bodies, args.concurrency)}
    for name, engine in engines.items():
        work[name] = lambda engine=engine: engine.generate(requests, params)
    found: dict[str, list[Run]] = {name: [] for name in work}
    for repeat in range(args.repeats + 1):
        for name, step in work.items():
            run = timed(step)
            if repeat:  # the first round fills caches
                found[name].append(run)
    for name, runs in found.items():
        rate = spread([args.requests / run.seconds for run in runs], 1)
        cpu = spread([1e3 * run.cpu / args.requests for run in runs], 2)
        shares = [limit.seconds / run.seconds for limit, run in zip(found["limit"], runs, strict=True)]
        print(f"{name}: {rate} requests/s, {spread(shares, 3)} of the limit; cpu {cpu} ms per request")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"requests": 256, "repeats": 5, "prompt": 32, "response": 16, "concurrency": 64, "layers": 3, "experts": 32}
    for name, default in {**sizes, "top-k": 2, "tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--url")
    parser.add_argument("--model")
    args = parser.parse_args()
    for name, shape in MODELS.items():
        coding(name, shape, args.tokens, args.repeats)
    with server_of(args) as (url, model):
        rates(url, model, args)


if __name__ == "__main__":
    main()
