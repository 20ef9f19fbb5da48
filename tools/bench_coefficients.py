"""What the objectives cost: coefficients for a million tokens, for every row of the table, against the forward pass.

    python tools/bench_coefficients.py [--tokens 1000000] [--forward-tokens 65536] [--repeats 5]

The model is that of the quickstart with random weights. Its forward pass (log-probabilities and entropies, without
gradient) over ``--forward-tokens`` is measured and scaled linearly to ``--tokens``; coefficients are computed on all
tokens at once, metrics included, responses of 10 to 2000 tokens. One pass and one call of every row are timed turn by
turn in one run; medians are printed. On a CPU the time is that of this process on its one thread, so that other
processes do not count. A row that costs more than 5 % of the forward pass is marked, and the exit code is then 1.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from megarl.config.file import parse
from megarl.core.objectives import OBJECTIVES, Objective, TokenColumns, coefficients
from megarl.core.types import TrainBatch
from megarl.data.tiny import write_tiny_model
from megarl.megatron import distributed
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import split_micro_batches
from megarl.megatron.policy import Policy, schedule_of

LIMIT = 0.05
RESPONSE_TOKENS = 10
PROMPT_TOKENS = 7
MICRO_BATCH_TOKENS = 4096


def table() -> dict[str, Objective]:
    """Every row, one with each kind of penalty that none has by itself, and an exponent that has to be searched."""
    searching = {"adaptive_power, q < 1": replace(OBJECTIVES["adaptive_power"], ess_target=0.999)}
    penalties = {f"grpo + {kl}": replace(OBJECTIVES["grpo"], kl=kl, kl_coef=0.1) for kl in ("k1", "k2", "k3")}
    return {**OBJECTIVES, **searching, **penalties}


def random_columns(num_tokens: int) -> TokenColumns:
    """fp32 columns of responses of 10 to 2000 tokens, nine tenths of them with loss."""
    generator = torch.Generator().manual_seed(0)
    lengths = []
    while (rest := num_tokens - sum(lengths)) > 0:
        drawn = int(torch.randint(10, 2001, (), generator=generator))
        lengths.append(min(drawn, rest))
    old = -3 * torch.rand(num_tokens, generator=generator) - 1
    noise = torch.randn(3, num_tokens, generator=generator)
    advantages = torch.randn(len(lengths), generator=generator)
    return TokenColumns(
        logprobs=old + 0.05 * noise[0],
        old_logprobs=old,
        rollout_logprobs=old + 0.1 * noise[1],
        advantages=advantages.repeat_interleave(torch.tensor(lengths)),
        loss_mask=torch.rand(num_tokens, generator=generator) < 0.9,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        ref_logprobs=old + 0.1 * noise[2],
    )


def forward_pass(folder: Path, num_tokens: int) -> Callable[[], object]:
    """The quickstart model over so many tokens, in micro-batches of the quickstart's size and sequences."""
    model = write_tiny_model(folder / "model")
    config = parse(
        {
            "run": {"name": "bench", "steps": 1},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": "unused", "max_prompt_tokens": 16},
            "rollout": {"prompts_per_step": 1, "group_size": 1, "max_response_tokens": 10},
            "train": {"replay": "none", "micro_batch_tokens": MICRO_BATCH_TOKENS},
            "optim": {"lr": 1e-4},
        }
    )
    distributed.initialize(config)
    policy = Policy(config, schedule_of(config))
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(policy.shape.vocab_size, (num_tokens,), generator=generator)
    batch = TrainBatch(
        tokens=tokens,
        cu_seqlens=torch.tensor([*range(0, num_tokens, length), num_tokens]),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        rollout_logprobs=torch.zeros(num_tokens),
        advantages=torch.zeros(num_tokens),
    )
    micro_batches = split_micro_batches(batch, MICRO_BATCH_TOKENS)
    return lambda: forward.run(policy.chunks, micro_batches, temperature=1.0, vocab_size=policy.shape.vocab_size)


def seconds(call: Callable[[], object]) -> float:
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    started = clock()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def main() -> int:
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    num_tokens, part = int(flags.get("--tokens", "1000000")), int(flags.get("--forward-tokens", "65536"))
    repeats = int(flags.get("--repeats", "5"))
    torch.set_num_threads(1)
    columns = random_columns(num_tokens)
    spent: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        run_forward = forward_pass(Path(folder), part)
        for repeat in range(-1, repeats):  # one round to warm up
            calls = {"forward": run_forward}
            calls |= {name: (lambda o=o: coefficients(o, columns)) for name, o in table().items()}
            for name, call in calls.items():
                took = seconds(call)
                if repeat >= 0:
                    spent[name].append(took * (num_tokens / part if name == "forward" else 1))
    distributed.shutdown()
    whole = statistics.median(spent.pop("forward"))
    print(
        f"forward pass of the quickstart model, {num_tokens} tokens: {whole:.2f} s "
        f"(measured on {part} tokens, scaled by {num_tokens / part:.2f}); medians of {repeats}"
    )
    print(f"{'row':>24}{'seconds':>10}{'of the pass':>13}")
    for name, times in spent.items():
        share = statistics.median(times) / whole
        print(f"{name:>24}{statistics.median(times):10.3f}{share:13.2%}" + ("  ABOVE 5 %" if share > LIMIT else ""))
    return int(any(statistics.median(times) / whole > LIMIT for times in spent.values()))


if __name__ == "__main__":
    sys.exit(main())
