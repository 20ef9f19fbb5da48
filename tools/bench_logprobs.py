"""Log-probabilities from hidden states: blocks of logits against whole logits, forward and backward, in one run.

    python tools/bench_logprobs.py [--tokens 512] [--hidden 1024] [--vocab 151936] [--repeats 3] [--dtype fp32]
                                   [--kept 50] [--variants blocks entropy] [--json FILE]

"whole" is what a straightforward loss does: logits [S, V], log_softmax in fp32, gather, and the entropy of the same
distribution. "entropy" is "blocks" with a gradient of the entropies, "kept" with log-probabilities over ``--kept`` ids
of each row, "both" with both. Extra memory is the peak above what hidden states, weight and their gradients need; time
is the median of paired repetitions. On a CPU, time and peak are those of the process (Linux); on a GPU the peak is that
of torch's allocator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megarl.megatron.passes.logprobs import linear_logprobs

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import add_json, finish, ratio_row

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.t()).float()
    logprobs = torch.log_softmax(logits, 1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(1)
    return logprobs.gather(1, labels[:, None]).squeeze(1), entropies


def blocks(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return linear_logprobs(hidden, weight, labels, 1.0, weight.size(0))


def sets_of(labels: torch.Tensor, vocab: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, offsets): for each row the label and other ids spread over the vocabulary."""
    steps = torch.arange(size, device=labels.device) * (vocab // size)
    ids = (labels[:, None] + steps) % vocab
    return ids.flatten().int(), torch.arange(labels.numel() + 1) * size


def variant(entropy: bool, kept: tuple[torch.Tensor, torch.Tensor] | None) -> Loss:
    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = linear_logprobs(hidden, weight, labels, 1.0, weight.size(0), None, kept)
        return logprobs + 0.01 * entropies if entropy else logprobs, entropies

    return loss


def reset_peak(device: str) -> int:
    """Forget the peak so far; returns the bytes in use."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def once(loss: Loss, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[int, float]:
    """Return (peak bytes above the start, seconds). Gradient buffers exist before, so they do not count."""
    clock = time.perf_counter if hidden.is_cuda else time.process_time
    before, started = reset_peak(hidden.device.type), clock()
    logprobs, _ = loss(hidden, weight, labels)
    logprobs.sum().backward()
    return peak(hidden.device.type) - before, clock() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--kept", type=int, default=50)
    names = ("whole", "blocks", "entropy", "kept", "both")
    parser.add_argument("--variants", nargs="+", choices=names, default=["whole", "blocks"])
    add_json(parser)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden, device=device, dtype=dtype) / args.hidden**0.5).requires_grad_()
    labels = torch.randint(args.vocab, (args.tokens,), device=device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    sets = sets_of(labels, args.vocab, args.kept)
    known = {"entropy": variant(True, None), "kept": variant(False, sets), "both": variant(True, sets)}
    variants: dict[str, Loss] = {name: {"whole": whole, "blocks": blocks, **known}[name] for name in args.variants}
    results: dict[str, list[tuple[int, float]]] = {name: [] for name in variants}
    for repeat in range(args.repeats + 1):
        for name, loss in variants.items():
            result = once(loss, hidden, weight, labels)
            if repeat:
                results[name].append(result)
    print(f"S {args.tokens}, H {args.hidden}, V {args.vocab}, {args.dtype}, {device}, median of {args.repeats}")
    for name, rows in results.items():
        memory, seconds = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:>7}: {seconds:8.3f} s  {memory / 2**20:9.0f} MiB extra")
    first, *others = results
    rows = []
    for name in others:
        pairs = list(zip(results[first], results[name], strict=True))
        what = f"log-probabilities of {args.tokens} tokens, vocabulary {args.vocab}, forward and backward"
        times, memory = ([other[place] / one[place] for one, other in pairs] for place in (1, 0))
        rows.append(ratio_row(f"{name} / {first}, time", what, times, 1.1 if name == "blocks" else None))
        rows.append(ratio_row(f"{name} / {first}, extra memory", what, memory, 0.2 if name == "blocks" else None))
    for row in rows:
        print(f"{row.name}: {row.value:.3f}")
    return finish(rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
