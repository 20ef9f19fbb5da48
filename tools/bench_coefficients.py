"""What the objectives cost: coefficients and metrics of many tokens, against a plain vectorised GRPO.

    python tools/bench_coefficients.py [--tokens 2000000] [--repeats 3] [--rows grpo ctpo] [--json FILE]

"Plain" is what a straightforward loss does with the same columns: ratio, clipped surrogate, masked mean, backward, and
three means as metrics. It checks nothing. Plain and every row are timed turn by turn in one run, on one thread;
medians of their ratios are printed, with the least and the largest. On a CPU the time is that of this process, so that
others do not count. A row above its budget (12 times the plain loss, 16 with a search for an exponent) is named, and
the exit code is then 1.

The budget holds for any number of tokens, because memory is kept between calls here. By default glibc gives columns of
32 MiB (8.4e6 tokens) and more back to the kernel: then the plain loss takes 69 ns per token instead of 15, four fifths
of it page faults, while the rows, which work in parts of the batch, take 90 to 180 ns at any size.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megarl.core.choices.parts import NON_NEGATIVE_ADVANTAGES
from megarl.core.objectives import OBJECTIVES, Denominators, Factor, Mask, Penalty, TokenColumns, coefficients

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import add_json, finish, ratio_row

LIMIT, SEARCH_LIMIT = 12.0, 16.0
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
PENALISED = replace(OBJECTIVES["grpo"], penalties=(Penalty("k3", coef=0.1),))
SEARCHING = replace(OBJECTIVES["adaptive_power"], factors=(Factor("theta_old", fn="adaptive_power", ess_target=0.999),))
WHOLE = replace(OBJECTIVES["grpo"], masks=(*OBJECTIVES["grpo"].masks, Mask("old_mu", "k3", "sequence_max", high=2.0)))
ROWS = {
    **{name: row for name, row in OBJECTIVES.items() if not row.needs_topk},
    "grpo + k3 to a reference": PENALISED,
    "grpo + k3 of whole responses": WHOLE,
    "adaptive_power, q < 1": SEARCHING,
}


def random_columns(num_tokens: int) -> TokenColumns:
    """fp32 columns of responses of 10 to 2000 tokens, nine tenths of them with loss."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 2001, (num_tokens // 900 + 2,), generator=generator)
    lengths = lengths[: int((lengths.cumsum(0) < num_tokens).sum())]
    lengths = torch.cat([lengths, torch.tensor([num_tokens - int(lengths.sum())])])
    old = -3 * torch.rand(num_tokens, generator=generator) - 1
    noise = torch.randn(3, num_tokens, generator=generator)
    return TokenColumns(
        logprobs=old + 0.05 * noise[0],
        old_logprobs=old,
        rollout_logprobs=old + 0.1 * noise[1],
        advantages=torch.randn(len(lengths), generator=generator).repeat_interleave(lengths),
        loss_mask=torch.rand(num_tokens, generator=generator) < 0.9,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        ref_logprobs=old + 0.1 * noise[2],
    )


def plain_grpo(columns: TokenColumns) -> list[float]:
    """The clipped surrogate over all tokens, with its gradient; returns three metrics."""
    logprobs, mask = columns.logprobs.detach().requires_grad_(), columns.loss_mask
    ratio = (logprobs - columns.old_logprobs).exp()
    surrogate = torch.minimum(ratio * columns.advantages, ratio.clamp(0.8, 1.2) * columns.advantages)
    (-(surrogate * mask).sum() / mask.sum()).backward()
    with torch.no_grad():
        clipped = ((ratio > 1.2) | (ratio < 0.8)) & mask
        moved = ((columns.old_logprobs - logprobs) * mask).sum() / mask.sum()
        return [float((ratio * mask).sum() / mask.sum()), float(clipped.float().mean()), float(moved)]


def seconds(call: Callable[[], object]) -> float:
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    started = clock()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    add_json(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    columns = random_columns(arguments.tokens)
    positive = replace(columns, advantages=columns.advantages.abs())
    denominators = Denominators.of(columns.loss_mask, columns.cu_seqlens)
    columns_of = {name: positive if ROWS[name].advantage in NON_NEGATIVE_ADVANTAGES else columns for name in ROWS}
    calls: dict[str, Callable[[], object]] = {
        name: partial(coefficients, ROWS[name], columns_of[name], denominators) for name in arguments.rows
    }
    ratios: dict[str, list[float]] = defaultdict(list)
    plain: list[float] = []
    for repeat in range(-1, arguments.repeats):  # one round to warm up
        for name, call in calls.items():
            base, own = seconds(lambda: plain_grpo(columns)), seconds(call)
            if repeat >= 0:
                plain.append(base)
                ratios[name].append(own / base)
    print(f"plain GRPO, {arguments.tokens} tokens: {statistics.median(plain):.2f} s; {arguments.repeats} repeats")
    print(f"{'row':>30}{'times plain':>13}{'least':>8}{'largest':>9}")
    for name, found in ratios.items():
        print(f"{name:>30}{statistics.median(found):13.2f}{min(found):8.2f}{max(found):9.2f}")
    what = f"coefficients and metrics of {arguments.tokens:.0e} tokens / a plain GRPO loss"
    limits = {"adaptive_power, q < 1": SEARCH_LIMIT}
    rows = [ratio_row(name, what, found, limits.get(name, LIMIT)) for name, found in ratios.items()]
    return finish(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
