"""The SGLang client: bytes on the wire, what coding them costs, and what its defaults cost and spare on a real server.

    python tools/bench_sglang.py [--requests 192] [--repeats 3] [--prompt 32] [--response 16] [--turns 6] [--json FILE]
                                 [--layers 3] [--experts 32] [--top-k 2] [--url URL --model FOLDER]

Starts a server of a tiny random model (.venv-sglang, see `make sglang-cpu`), or asks the one at --url, whose weights
version it sets to 0. All variants take turns on one server, which shares the machine; ratios are of neighbours.

- Rates: the limit is what a loop over plain sockets gets out of the same server with the same requests, written
  beforehand, that reads the answers and throws them away. "cpu" is time of this process.
- Concurrency: seconds for all requests with the number that the server says, against 64, a fixed number.
- Checks: what a keeper asks (the scheduler's state), against SGLang's /health, which generates a token when idle.
  Forward passes are counted in the server's log.
- Turns: answers of an episode whose turns leave out the rows that are known, against answers with all rows.

Rates of coding are of one thread and random routes. The exit code is 1 if a ratio is above its budget.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from megarl.config.tables.rollout import SGLangConfig
from megarl.core.types import Rollout, SampleRequest
from megarl.data.tiny import write_tiny_model
from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.answers import parse_answer
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.plugin.compact import HEADER, compact, make_header
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.files.hf_config import MoeShape
from megarl.routes.answers import decode_routes
from megarl.routes.turns import join, known_rows

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, add_json, finish, ratio_row

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
def server_of(args: argparse.Namespace) -> Iterator[tuple[str, Path, Server | None]]:
    if args.url:
        yield args.url, Path(args.model), None
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(
            Path(folder) / "model",
            hidden_size=64,
            expert_width=32,
            num_layers=args.layers,
            num_experts=args.experts,
            top_k=args.top_k,
            max_positions=4096,
            initializer_range=0.3,
        )
        spec = ServerSpec(model, PYTHON, "float32", Path(folder) / "log", max_total_tokens=65536)
        with Server(spec) as server:
            server.wait_ready(deadline_s=300.0)
            yield server.url, model, server


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


def engine_of(url: str, model: Path, **settings: Any) -> SGLangEngine:
    config = json.loads((model / "config.json").read_text())
    engine = SGLangEngine([url], config, fleet=None, settings=SGLangConfig(**settings))
    engine.update_weights([], 0)  # none are sent: the server keeps its own
    return engine


def requests_of(model: Path, num: int, prompt: int) -> list[SampleRequest]:
    vocabulary, rng = json.loads((model / "config.json").read_text())["vocab_size"], np.random.default_rng(0)
    return [SampleRequest(rng.integers(2, vocabulary, prompt, dtype=np.int32), group, 0, 0) for group in range(num)]


def rates(url: str, model: Path, args: argparse.Namespace) -> None:
    params = SamplingParams(max_response_tokens=args.response)
    requests, shape = requests_of(model, args.requests, args.prompt), shape_of(model)
    engines = {f"client, {name}": engine_of(url, model, concurrency=64) for name in ("short", "plain")}
    del engines["client, plain"]._client.headers[HEADER]
    bodies = [json.dumps(engines["client, short"]._make_body(request, params)).encode() for request in requests]
    answer_sizes(url, bodies[0], shape)
    work: dict[str, Callable[[], object]] = {"limit": lambda: raw_posts(url, bodies, 64)}
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


def concurrency(url: str, model: Path, args: argparse.Namespace) -> list[Row]:
    """The server's own number against a fixed one."""
    params = SamplingParams(max_response_tokens=args.response)
    requests = requests_of(model, args.requests, args.prompt)
    fixed, asked = (engine_of(url, model, concurrency=number) for number in (64, None))
    ratios = []
    for repeat in range(args.repeats + 1):
        before, after = (timed(lambda engine=engine: engine.generate(requests, params)) for engine in (fixed, asked))
        if repeat:
            ratios.append(after.seconds / before.seconds)
    what = f"{args.requests} requests at once: as many as the server says it can run, against 64"
    return [ratio_row("sglang_concurrency", what, ratios, at_most=1.0)]


def checks(server: Server, args: argparse.Namespace) -> list[Row]:
    """Of an idle server."""

    def passes() -> int:
        return Path(server.spec.log_file).read_text().count("Prefill batch")

    ratios, counts = [], {"healthy": 0, "responds": 0}
    for _ in range(args.repeats):
        seconds = {}
        for check in counts:
            before, started = passes(), time.perf_counter()
            if not getattr(server, check)():
                raise SystemExit(f"the server fails its check ({check})")
            seconds[check] = time.perf_counter() - started
            counts[check] += passes() - before
        ratios.append(seconds["responds"] / seconds["healthy"])
    share = counts["responds"] / counts["healthy"]
    return [
        ratio_row("sglang_check_seconds", "the scheduler's state, against /health", ratios, at_most=1.0),
        Row("sglang_check_passes", "forward passes of the same", share, "x", share, share, 0.0, "at_most"),
    ]


def turns(url: str, model: Path, args: argparse.Namespace) -> list[Row]:
    """An episode whose observations have as many tokens as its prompt, which is long; its first turn is left out."""
    params = SamplingParams(max_response_tokens=args.response)
    engine, shape, rng = engine_of(url, model), shape_of(model), np.random.default_rng(1)
    ratios: dict[str, list[float]] = {"bytes": [], "seconds": []}
    with httpx.Client(base_url=url, headers=make_header(shape), timeout=600.0) as http:

        def ask(request: SampleRequest) -> tuple[int, float, Rollout]:
            started = time.perf_counter()
            body = engine._make_body(request, params) | {"rid": "a"}
            answer = http.post("/generate", json=body).raise_for_status()
            seconds = time.perf_counter() - started
            return (
                len(answer.content),
                seconds,
                parse_answer(request, answer.json(), 0, shape, "a", params, engine._bounds),
            )

        for _ in range(args.repeats):
            (request,) = requests_of(model, 1, 400)
            whole = ask(request)[2]
            for turn in range(1, args.turns):
                seen = rng.integers(2, 30, 400, dtype=np.int32)
                request = replace(request, prompt_tokens=np.concatenate([whole.tokens, seen]))
                later = replace(request, known_rows=known_rows(whole))
                ask(request)  # the prompt is in the server's cache for both
                anew, short = (ask(request), ask(later)) if turn % 2 else (ask(later), ask(request))[::-1]
                ratios["bytes"].append(short[0] / anew[0])
                ratios["seconds"].append(short[1] / anew[1])
                whole = join(whole, short[2])
    what = f"answers to {args.turns - 1} later turns without known rows, against with all"
    spared = ratio_row("sglang_turn_bytes", what, ratios["bytes"], at_most=1.0)
    return [spared, ratio_row("sglang_turn_seconds", what, ratios["seconds"])]


def shape_of(model: Path) -> MoeShape:
    return MoeShape.of(json.loads((model / "config.json").read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"requests": 192, "repeats": 3, "prompt": 32, "response": 16, "turns": 6, "layers": 3, "experts": 32}
    for name, default in {**sizes, "top-k": 2, "tokens": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--url")
    parser.add_argument("--model")
    add_json(parser)
    args = parser.parse_args()
    for name, shape in MODELS.items():
        coding(name, shape, args.tokens, args.repeats)
    with server_of(args) as (url, model, server):
        httpx.post(f"{url}/update_weight_version", json={"new_version": "0"}, timeout=60.0).raise_for_status()
        rates(url, model, args)
        rows = [*concurrency(url, model, args), *(checks(server, args) if server else ()), *turns(url, model, args)]
    for row in rows:
        print(f"{row.name}: {row.value:.3f} ({row.low:.3f} to {row.high:.3f}) {row.what}")
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
