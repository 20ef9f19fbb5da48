"""The loss layer on a GPU: Triton kernels, blocks of torch operations and whole logits; times, memory and errors.

    python tools/bench_loss_layer.py [--tokens 8192] [--hidden 2048] [--vocab 151936] [--dtype bf16] [--repeats 5]
                                     [--sweep] [--profile] [--json FILE]

Errors are against float64 on a slice of the tokens, with log-probabilities, entropies and both gradients. Times of
"blocks", "triton" and "whole" are taken turn by turn; "+entropy" adds a gradient of the entropies, "+kept" takes
log-probabilities over 50 ids of each token. ``--sweep`` tries sizes of blocks and configurations of the kernels,
``--profile`` prints the kernels that take the longest on a GPU.
Needs torch, numpy and, for the kernels, triton. On a CPU the kernels run only under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megarl.megatron.passes import blocks, logprobs

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, add_json, finish

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ENTROPY, KEPT = 0.01, 50


@dataclass(frozen=True, slots=True)
class Inputs:
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    coefficients: torch.Tensor
    """fp32 [T], of both signs, 0 for a quarter of the tokens."""
    kept: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Cost:
    forward_ms: float
    backward_ms: float
    peak_mib: float
    """Above hidden states, weight, and the gradients that exist before."""


def make_inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, device=DEVICE).to(dtype).requires_grad_()
    # Logits have a standard deviation of 3: the largest are near 15.
    weight = torch.empty(vocab, hidden, device=DEVICE, dtype=dtype).normal_(std=3 / hidden**0.5).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=DEVICE)
    coefficients = torch.randn(tokens, device=DEVICE) * (torch.rand(tokens, device=DEVICE) > 0.25)
    size = min(KEPT, vocab)
    ids = (labels[:, None] + torch.arange(size, device=DEVICE) * (vocab // size)) % vocab
    states.grad, weight.grad = torch.zeros_like(states), torch.zeros_like(weight)
    return Inputs(states, weight, labels, coefficients, (ids.flatten().int(), torch.arange(tokens + 1) * size))


def triton_kernels() -> ModuleType | None:
    """The kernels, where they can run."""
    if find_spec("triton") is None or (DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        return None
    from megarl.megatron.passes import logprob_kernels

    return logprob_kernels


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def whole(inputs: Inputs, entropy: bool, kept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (inputs.hidden @ inputs.weight.t()).float()
    log_p = torch.log_softmax(logits, 1)
    with torch.set_grad_enabled(entropy):
        entropies = -(log_p.exp() * log_p).sum(1)
    return log_p.gather(1, inputs.labels[:, None]).squeeze(1), entropies


def linear(inputs: Inputs, entropy: bool, kept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    sets = inputs.kept if kept else None
    return logprobs.linear_logprobs(inputs.hidden, inputs.weight, inputs.labels, 1.0, inputs.weight.size(0), None, sets)


def now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(loss: Callable[..., Any], inputs: Inputs, entropy: bool, kept: bool) -> Cost:
    """One forward and backward pass."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
    started = now()
    found, entropies = loss(inputs, entropy, kept)
    value = (found * inputs.coefficients).sum() + (ENTROPY * entropies.sum() if entropy else 0.0)
    half = now()
    value.backward()
    ended = now()
    peak = torch.cuda.max_memory_allocated() - before if DEVICE.type == "cuda" else 0
    return Cost(1e3 * (half - started), 1e3 * (ended - half), peak / 2**20)


def median(costs: list[Cost]) -> Cost:
    return Cost(
        *(
            statistics.median(getattr(cost, name) for cost in costs)
            for name in ("forward_ms", "backward_ms", "peak_mib")
        )
    )


def kinds(kernels: ModuleType | None) -> dict[str, tuple[Callable[..., Any], ModuleType | None]]:
    found: dict[str, tuple[Callable[..., Any], ModuleType | None]] = {"blocks": (linear, None), "whole": (whole, None)}
    return found if kernels is None else {**found, "triton": (linear, kernels)}


def times(inputs: Inputs, kernels: ModuleType | None, repeats: int) -> list[Row]:
    what = f"{inputs.hidden.size(0)} tokens, H {inputs.hidden.size(1)}, V {inputs.weight.size(0)}"
    rows: list[Row] = []
    for suffix, entropy, kept in (("", False, False), ("+entropy", True, False), ("+kept", False, True)):
        known = {name: kind for name, kind in kinds(kernels).items() if name != "whole" or not suffix}
        costs: dict[str, list[Cost]] = {name: [] for name in known}
        for repeat in range((repeats if not suffix else 2) + 1):
            for name, (loss, module) in known.items():
                with replaced(logprobs, kernels_for=lambda device, module=module: module):
                    cost = measure(loss, inputs, entropy, kept)
                if repeat:
                    costs[name].append(cost)
                if DEVICE.type == "cuda" and name == "whole":
                    torch.cuda.empty_cache()
        for name, several in costs.items():
            one, total = median(several), [cost.forward_ms + cost.backward_ms for cost in several]
            print(
                f"{name + suffix:>16}: forward {one.forward_ms:8.2f} ms, backward {one.backward_ms:8.2f} ms, "
                f"together {statistics.median(total):8.2f} ({min(total):.2f} to {max(total):.2f}), "
                f"{one.peak_mib:8.0f} MiB",
                flush=True,
            )
            middle = statistics.median(total)
            rows.append(Row(f"{name}{suffix}", f"forward and backward, {what}", middle, "ms", min(total), max(total)))
            peak = one.peak_mib / 1024
            rows.append(Row(f"{name}{suffix}, memory", f"extra, {what}", peak, "GiB", peak, peak))
    return rows


def reference(inputs: Inputs, kept: bool) -> list[torch.Tensor]:
    """float64 log-probabilities, entropies, gradients of states and weight."""
    hidden, weight = (one.detach().double().requires_grad_() for one in (inputs.hidden, inputs.weight))
    logits = hidden @ weight.t()
    log_p = logits.log_softmax(1)
    entropies = -(log_p.exp() * log_p).sum(1)
    if kept:
        ids = inputs.kept[0].view(logits.size(0), -1).long()
        log_p = log_p - log_p.gather(1, ids).logsumexp(1, keepdim=True)
    found = log_p.gather(1, inputs.labels[:, None]).squeeze(1)
    ((found * inputs.coefficients).sum() + ENTROPY * entropies.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [found.detach(), entropies.detach(), hidden.grad, weight.grad]


def errors(given: Inputs, kernels: ModuleType | None, dtype: torch.dtype) -> None:
    """Print errors against float64: of one call in the middle of the vocabulary's sizes, odd, with several blocks."""
    tokens, hidden, vocab = min(203, given.hidden.size(0)), given.hidden.size(1), given.weight.size(0) - 7
    inputs = make_inputs(tokens, hidden, vocab, dtype)
    for kept in (False, True):
        expected = reference(inputs, kept)
        for name, (loss, module) in kinds(kernels).items():
            if kept and name == "whole":
                continue
            for one in (inputs.hidden, inputs.weight):
                one.grad = None
            several_blocks = {"FUSED_ROWS": 64, "FUSED_BYTES": 64 * 4 * max(128, vocab // 5)}
            kernels_for = {"kernels_for": lambda device, module=module: module}
            with replaced(logprobs, **kernels_for), replaced(blocks, **several_blocks):
                found, entropies = loss(inputs, True, kept)
                ((found * inputs.coefficients).sum() + ENTROPY * entropies.sum()).backward()
            got = [found.detach(), entropies.detach(), inputs.hidden.grad, inputs.weight.grad]
            differences = [one.double() - other for one, other in zip(got, expected, strict=True)]
            print(
                f"{name + (' kept' if kept else ''):>16}: largest error of a log-probability "
                f"{float(differences[0].abs().max()):.2e}, of an entropy {float(differences[1].abs().max()):.2e}; "
                f"norm of the gradient's error: states {float(differences[2].norm() / expected[2].norm()):.2e}, "
                f"weight {float(differences[3].norm() / expected[3].norm()):.2e}",
                flush=True,
            )


def time_of(call: Callable[[], Any], repeats: int = 5, calls: int = 4) -> float:
    """Median milliseconds of one call."""
    call()
    seconds = []
    for _ in range(repeats):
        started = now()
        for _ in range(calls):
            call()
        seconds.append((now() - started) / calls)
    return 1e3 * statistics.median(seconds)


def products(inputs: Inputs, columns: int) -> None:
    """Times of the products of one block, which bound everything else from below."""
    columns = min(columns, inputs.weight.size(0))
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()[:columns]
    tokens, width = hidden.shape
    fp32 = torch.empty(tokens, columns, device=DEVICE)
    half = fp32.view(hidden.dtype)[:, :columns]
    packed = torch.empty(tokens, columns, device=DEVICE, dtype=hidden.dtype)
    of_states, of_weight = torch.zeros(tokens, width, device=DEVICE), torch.zeros(columns, width, device=DEVICE)
    narrow = torch.empty(columns, width, device=DEVICE, dtype=hidden.dtype)
    half.zero_()
    packed.zero_()
    to_fp32: dict[str, Any] = {"out_dtype": torch.float32}
    calls = {
        "logits, fp32 out": lambda: torch.mm(hidden, weight.t(), out=fp32, **to_fp32),
        "logits, 16-bit out": lambda: torch.mm(hidden, weight.t(), out=packed),
        "states, added in fp32": lambda: torch.addmm(of_states, half, weight, out=of_states, **to_fp32),
        "states, added, packed": lambda: torch.addmm(of_states, packed, weight, out=of_states, **to_fp32),
        "states, fp32 and add": lambda: of_states.add_(torch.mm(half, weight, **to_fp32)),
        "weight, fp32 out": lambda: torch.mm(half.t(), hidden, out=of_weight, **to_fp32),
        "weight, fp32, packed": lambda: torch.mm(packed.t(), hidden, out=of_weight, **to_fp32),
        "weight, added in fp32": lambda: torch.addmm(of_weight, half.t(), hidden, out=of_weight, **to_fp32),
        "weight, 16-bit out": lambda: torch.mm(half.t(), hidden, out=narrow),
        "weight, copy to 16-bit": lambda: narrow.copy_(of_weight),
    }
    operations = 2 * tokens * columns * width
    for name, call in calls.items():
        half.zero_()
        try:
            took = time_of(call)
        except RuntimeError as error:
            print(f"{name:>24}: {error}")
            continue
        print(f"{name:>24}: {took:7.3f} ms, {operations / took / 1e9:6.0f} TFLOP/s", flush=True)


def sweep_kernels(inputs: Inputs, kernels: ModuleType, columns: int) -> None:
    """Choose the kernels' configurations, and leave them set."""
    tokens = inputs.hidden.size(0)
    logits = torch.randn(tokens, columns, device=DEVICE)
    largest, sums = torch.full((tokens,), -torch.inf, device=DEVICE), torch.zeros(3, tokens, device=DEVICE)
    column = torch.zeros(tokens, device=DEVICE)
    labels, dtype = inputs.labels, inputs.hidden.dtype
    calls = {
        "FOLD": lambda: kernels.fold(logits, 1.0, labels, 0, largest, sums, None),
        "BY_LOGIT": lambda: kernels.by_logit(logits, 1.0, labels, 0, (column, column), None, None, dtype),
    }
    for name, call in calls.items():
        moved = 4 * logits.numel() + (0 if name == "FOLD" else dtype.itemsize * logits.numel())
        found = {}
        for block in (1024, 2048, 4096, 8192, 16384):
            for warps in (2, 4, 8, 16):
                if not 8 <= block // (32 * warps) <= 64:
                    continue
                logits.normal_()
                with replaced(kernels, **{name: (block, warps)}):
                    found[block, warps] = time_of(call)
        ranked = sorted(found, key=found.__getitem__)
        setattr(kernels, name, ranked[0])
        each = ", ".join(f"{key} {found[key]:.3f} ms {moved / found[key] / 1e6:.0f} GB/s" for key in ranked)
        print(f"{name}: {each}", flush=True)


def sweep_shapes(inputs: Inputs, kernels: ModuleType) -> None:
    """Choose the fastest size of a block that keeps the memory below 1 GiB, and leave it set."""
    tokens, allowed = inputs.hidden.size(0), {}
    for rows in sorted({min(tokens, rows) for rows in (1024, 2048, 4096, 8192)}):
        for mib in (16, 32, 64, 128, 192, 256, 384):
            settings = {"FUSED_ROWS": rows, "FUSED_BYTES": mib << 20}
            with replaced(logprobs, kernels_for=lambda device: kernels), replaced(blocks, **settings):
                columns = logprobs.fused_shape(tokens, inputs.weight.size(0))[1]
                costs = [measure(linear, inputs, False, False) for _ in range(4)][1:]
            one = median(costs)
            print(
                f"rows {rows:5d}, {mib:4d} MiB ({columns:6d} columns): forward {one.forward_ms:7.2f} ms, "
                f"backward {one.backward_ms:7.2f} ms, {one.peak_mib:6.0f} MiB",
                flush=True,
            )
            if one.peak_mib <= 1024:
                allowed[rows, mib << 20] = one.forward_ms + one.backward_ms
    blocks.FUSED_ROWS, blocks.FUSED_BYTES = min(allowed, key=allowed.__getitem__)
    print(f"chosen: {blocks.FUSED_ROWS} rows, {blocks.FUSED_BYTES >> 20} MiB")


def profile(inputs: Inputs, kernels: ModuleType) -> None:
    """Print the kernels of one forward and backward pass, and that the host never waits."""
    with replaced(logprobs, kernels_for=lambda device: kernels):
        measure(linear, inputs, False, False)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found, _ = linear(inputs, False, False)
            (found * inputs.coefficients).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        print("the host did not wait")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            measure(linear, inputs, False, False)
    for event in sorted(recorded.key_averages(), key=lambda one: -one.device_time_total)[:14]:
        print(f"{event.device_time_total / 1e3:9.3f} ms {event.count:5d} x {event.key[:120]}", flush=True)


FAILED: list[str] = []
"""Titles of the parts that failed."""


def attempt(title: str, call: Callable[[], Any]) -> Any:
    """Run a part; a part that fails does not keep the others from running, and makes the exit code 1."""
    print(f"\n== {title}", flush=True)
    started = time.perf_counter()
    try:
        return call()
    except Exception:
        traceback.print_exc(file=sys.stdout)
        FAILED.append(title)
        return None
    finally:
        print(f"({time.perf_counter() - started:.1f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    is_gpu = DEVICE.type == "cuda"
    parser.add_argument("--tokens", type=int, default=8192 if is_gpu else 96)
    parser.add_argument("--hidden", type=int, default=2048 if is_gpu else 64)
    parser.add_argument("--vocab", type=int, default=151_936 if is_gpu else 1000)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if is_gpu else "fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--profile", action="store_true")
    add_json(parser)
    args = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    kernels = triton_kernels()
    name = torch.cuda.get_device_name() if is_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, T {args.tokens}, H {args.hidden}, V {args.vocab}, {args.dtype}")
    inputs = make_inputs(args.tokens, args.hidden, args.vocab, dtype)
    columns = logprobs.fused_shape(args.tokens, args.vocab)[1]
    attempt("errors against float64", lambda: errors(inputs, kernels, dtype))
    if is_gpu:
        attempt(f"products of a block of {columns} columns", lambda: products(inputs, columns))
    rows = attempt("times", lambda: times(inputs, kernels, args.repeats)) or []
    if kernels is not None and args.profile:
        attempt("kernels of a pass", lambda: profile(inputs, kernels))
    if kernels is not None and args.sweep:
        attempt("configurations of the kernels", lambda: sweep_kernels(inputs, kernels, columns))
        attempt("sizes of a block", lambda: sweep_shapes(inputs, kernels))
        attempt("times with the chosen configuration", lambda: times(inputs, kernels, args.repeats))
        if args.profile:
            attempt("kernels of a pass with the chosen configuration", lambda: profile(inputs, kernels))
    return finish(rows, args.json) or int(bool(FAILED))


if __name__ == "__main__":
    sys.exit(main())
