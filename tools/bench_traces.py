"""Routing traces as bytes: size and speed of every way to write them, side by side in one run.

    python tools/bench_traces.py [--tokens 2048] [--repeats 5] [--skew 0.3] [--memory 0.5]

Routes are those of random router scores: independent normal ones, a constant per expert and layer of standard deviation
``skew`` (uneven load), and a correlation ``memory`` between neighbouring tokens. "log2" is the bound for unordered rows
of even load, L log2 C(E, K) / 8; "wire" what SGLang sends: base64 of int32 for all layers, dense ones included. Rates
are of one thread, in tokens per second of CPU time, the median of repetitions that visit the variants in turn; reading
includes the check that every variant needs (range, duplicates). "int16" and its like are what numpy makes of the array.
"""

from __future__ import annotations

import argparse
import base64
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megarl.core.routing import RoutingTrace, decode, encode


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


def codecs(model: Model) -> dict[str, Codec]:
    narrow = {"uint8": plain(model, "<u1")} if model.experts <= 256 else {}
    return {
        "wire (base64 int32)": wire(model),
        "int32": plain(model, "<i4"),
        "int16": plain(model, "<i2"),
        **narrow,
        "unordered": (encode, decode),
        "unordered, compressed": (lambda trace: encode(trace, compress=True), decode),
        "ordered": (lambda trace: encode(trace, ordered=True), decode),
        "ordered, compressed": (lambda trace: encode(trace, ordered=True, compress=True), decode),
    }


def measure(model: Model, trace: RoutingTrace, repeats: int) -> None:
    tokens, variants = len(trace.experts), codecs(model)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    sizes: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, (write, read) in variants.items():
            started = time.process_time()
            data = write(trace)
            written = time.process_time()
            found = read(data)
            done = time.process_time()
            sizes[name] = len(data)
            if repeat:
                seconds[name].append((written - started, done - written))
            elif not np.array_equal(np.sort(found.experts, axis=2), np.sort(trace.experts, axis=2)):
                raise SystemExit(f"{name} does not give back what it was given")
    shape = f"{model.layers} x {model.top_k} of {model.experts}"
    print(f"\n{model.name}: {shape}, bound log2 {model.bound:.1f} bytes per token")
    print(f"{'':>22} {'bytes/token':>12} {'of wire':>8} {'of bound':>9} {'encode tok/s':>13} {'decode tok/s':>13}")
    for name, size in sizes.items():
        encoding, decoding = (tokens / statistics.median(column) for column in zip(*seconds[name], strict=True))
        share, excess = size / sizes["wire (base64 int32)"], size / tokens / model.bound
        print(f"{name:>22} {size / tokens:12.1f} {share:8.3f} {excess:9.3f} {encoding:13,.0f} {decoding:13,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skew", type=float, default=0.3)
    parser.add_argument("--memory", type=float, default=0.5)
    args = parser.parse_args()
    print(f"{args.tokens} tokens, skew {args.skew}, memory {args.memory}, median of {args.repeats}")
    for model in MODELS:
        measure(model, routes(model, args.tokens, args.skew, args.memory), args.repeats)


if __name__ == "__main__":
    main()
