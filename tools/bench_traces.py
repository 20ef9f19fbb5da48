"""Routing traces as bytes: size and speed of every way to write them, side by side in one run.

    python tools/bench_traces.py [--tokens 2048] [--repeats 9] [--skew 0.3] [--memory 0.5] [--json FILE]

Routes are those of random router scores: independent normal ones, a constant per expert and layer of standard deviation
``skew`` (uneven load), and a correlation ``memory`` between neighbouring tokens. "log2" is the bound for sets
of even load, L log2 C(E, K) / 8; "wire" what SGLang sends: base64 of int32 for all layers, dense ones included. Rates
are of one thread, in tokens per second of CPU time, of the fastest of repetitions that visit the variants in turn: a
neighbour on the machine only slows them. The file has the interval of the median as well.

- encode: from a ``RoutingTrace``, which was checked when it was made.
- check and encode: from the array; range and duplicates are checked first.
- decode: into a checked trace, with the check of range and duplicates.

"uint8, zstd" is pyarrow's zstd, level 1, without a checksum or a header. "int16" and its like are what numpy makes of
the array. The exit code is 1 if megarl's trace of Qwen3-30B-A3B breaks a budget.
"""

from __future__ import annotations

import argparse
import base64
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from megarl.routes import RoutingTrace, decode, encode

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, add_json, finish, interval_of_median

MOST_BYTES, LEAST_RATE = 336.1, 1e6
"""Of "megarl" for the first model: bytes per token, and tokens per second both ways."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    layers: int
    """MoE layers."""
    dense: int
    """Layers without experts: SGLang sends rows of zeros for them."""
    top_k: int
    experts: int

    @property
    def bound(self) -> float:
        return self.layers * math.log2(math.comb(self.experts, self.top_k)) / 8


MODELS = (
    Model("Qwen3-30B-A3B", 48, 0, 8, 128),
    Model("Qwen3-235B-A22B", 94, 0, 8, 128),
    Model("DeepSeek-V3", 58, 3, 8, 256),
    Model("Qwen3-Next-80B-A3B", 48, 0, 10, 512),
)
Codec = tuple[Callable[[RoutingTrace], bytes], Callable[[bytes], RoutingTrace]]


def routes(model: Model, tokens: int, skew: float, memory: float) -> RoutingTrace:
    generator = np.random.default_rng(0)
    constant = skew * generator.standard_normal((model.layers, model.experts), dtype=np.float32)
    state = generator.standard_normal(constant.shape, dtype=np.float32)
    rows = np.empty((tokens, model.layers, model.top_k), dtype=np.int64)
    for row in rows:
        fresh = generator.standard_normal(constant.shape, dtype=np.float32)
        state = memory * state + math.sqrt(1 - memory**2) * fresh
        row[:] = np.argpartition(-(state + constant), model.top_k, axis=1)[:, : model.top_k]
    return RoutingTrace(rows, model.experts)


def plain(model: Model, dtype: str) -> Codec:
    """The experts as they are; checked when they are read, as by every other variant."""

    def read(data: bytes) -> RoutingTrace:
        return RoutingTrace(np.frombuffer(data, dtype).reshape(-1, model.layers, model.top_k), model.experts)

    return lambda trace: trace.experts.astype(dtype).tobytes(), read


def wire(model: Model) -> Codec:
    layers = model.dense + model.layers

    def write(trace: RoutingTrace) -> bytes:
        rows = np.zeros((len(trace.experts), layers, model.top_k), dtype=np.int32)
        rows[:, model.dense :] = trace.experts
        return base64.b64encode(rows.tobytes())

    def read(data: bytes) -> RoutingTrace:
        rows = np.frombuffer(base64.b64decode(data), np.int32).reshape(-1, layers, model.top_k)
        return RoutingTrace(rows[:, model.dense :], model.experts)

    return write, read


def zstd(model: Model) -> Codec:
    size = model.layers * model.top_k

    def write(trace: RoutingTrace) -> bytes:
        return len(trace.experts).to_bytes(4, "little") + pa.compress(trace.experts, "zstd", asbytes=True)

    def read(data: bytes) -> RoutingTrace:
        raw = pa.decompress(data[4:], int.from_bytes(data[:4], "little") * size, "zstd", asbytes=True)
        return RoutingTrace(np.frombuffer(raw, np.uint8).reshape(-1, model.layers, model.top_k), model.experts)

    return write, read


def codecs(model: Model) -> dict[str, Codec]:
    narrow = {"uint8": plain(model, "<u1"), "uint8, zstd": zstd(model)} if model.experts <= 256 else {}
    return {
        "wire (base64 int32)": wire(model),
        "int32": plain(model, "<i4"),
        "int16": plain(model, "<i2"),
        **narrow,
        "megarl": (encode, decode),
    }


def measure(model: Model, trace: RoutingTrace, repeats: int) -> list[Row]:
    """Print all variants of one model; the rows are those of "megarl"."""
    tokens, variants = len(trace.experts), codecs(model)
    rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in variants}
    sizes: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, (write, read) in variants.items():
            times = [time.process_time()]
            data = write(trace)
            times.append(time.process_time())
            found = read(data)
            times.append(time.process_time())
            write(RoutingTrace(trace.experts, model.experts))
            times.append(time.process_time())
            sizes[name] = len(data)
            if repeat:
                encoding, decoding, checked = (tokens / seconds for seconds in np.diff(times))
                rates[name].append((encoding, checked, decoding))
            elif not np.array_equal(np.sort(found.experts, axis=2), np.sort(trace.experts, axis=2)):
                raise SystemExit(f"{name} does not give back what it was given")
    shape = f"{model.layers} x {model.top_k} of {model.experts}"
    print(f"\n{model.name}: {shape}, bound log2 {model.bound:.1f} bytes per token")
    columns = ("encode tok/s", "check and encode", "decode tok/s")
    print(f"{'':>22} {'bytes/token':>12} {'of wire':>8} {'of bound':>9}", *(f"{column:>17}" for column in columns))
    for name, size in sizes.items():
        fastest = (max(column) for column in zip(*rates[name], strict=True))
        share, excess = size / sizes["wire (base64 int32)"], size / tokens / model.bound
        print(f"{name:>22} {size / tokens:12.1f} {share:8.3f} {excess:9.3f}", *(f"{rate:17,.0f}" for rate in fastest))
    return rows_of(model, sizes["megarl"] / tokens, rates["megarl"])


def rows_of(model: Model, size: float, rates: list[tuple[float, float, float]]) -> list[Row]:
    rows = [Row("bytes", model.name, size, "bytes/token", size, size)]
    for name, column in zip(("encode", "check and encode", "decode"), zip(*rates, strict=True), strict=True):
        rows.append(Row(name, model.name, max(column), "tokens/s", *interval_of_median(column)))
    if model is MODELS[0]:
        rows[0] = replace(rows[0], budget=MOST_BYTES, kind="at_most")
        rows[1::2] = [replace(row, budget=LEAST_RATE, kind="at_least") for row in rows[1::2]]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--skew", type=float, default=0.3)
    parser.add_argument("--memory", type=float, default=0.5)
    add_json(parser)
    args = parser.parse_args()
    print(f"{args.tokens} tokens, skew {args.skew}, memory {args.memory}, fastest of {args.repeats}")
    rows = []
    for model in MODELS:
        rows += measure(model, routes(model, args.tokens, args.skew, args.memory), args.repeats)
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
