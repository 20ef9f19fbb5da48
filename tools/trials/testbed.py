"""The testbed: a tiny Qwen3-MoE trained by megarl itself, on a task of 64 tokens, with a gap between the engines.

Task: walk for 64 steps over ten symbols. The last two symbols decide which three of the ten may come next, by a
random table; the prompt is the first two. A response is right if all its steps are allowed and it ends after the last.
There are 3**64 right responses to each prompt, and the policy has to know 100 facts, each at every place of the
response. The cold start ends while the facts are half-learned: RL has to sharpen them, it does not choose between two
known behaviours.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.rewards import instantaneous
from megarl.errors import RolloutError
from trials.grids import Cell

SYMBOLS = "0123456789"
LENGTH = 64
HELD_OUT = 20
NUM_ALLOWED = 3
NUM_DEMONSTRATIONS = 9600
ROUTER_NOISE = {"weak": 0.1, "strong": 0.3}
"""Standard deviation of the Gaussian noise on the logits of every router, for each token and layer anew."""
GAPS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"dtype": "bf16"},
    "fp8_weights": {"fp8_rounding": True},
    "fp8_activations": {"fp8_rounding": True, "fp8_activations": True},
    "weak_noise": {"engine": "trials.testbed:WEAK_NOISE"},
    "strong_noise": {"engine": "trials.testbed:STRONG_NOISE"},
}
"""Name -> keys of [rollout]. Training is in fp32 always."""
COLD_START = {"batch_size": 32, "lr": 4e-3}
MODEL = {"hidden_size": 64, "num_layers": 4, "num_experts": 16, "top_k": 2, "expert_width": 32, "num_heads": 4}


def make_table() -> np.ndarray:
    """Return the allowed next symbols by the last two, int64 [10, 10, 3]; the same table for every seed."""
    size, generator = len(SYMBOLS), np.random.default_rng(0)
    rows = [generator.permutation(size)[:NUM_ALLOWED] for _ in range(size**2)]
    return np.stack(rows).reshape(size, size, NUM_ALLOWED)


ALLOWED = make_table()


@instantaneous
def is_right(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response takes 64 allowed steps from the prompt's two symbols and then ends, else 0."""
    walk = [SYMBOLS.find(symbol) for symbol in prompt[1:] + response]
    steps = zip(walk, walk[1:], walk[2:], strict=False)
    return float(len(response) == LENGTH and -1 not in walk and all(c in ALLOWED[a, b] for a, b, c in steps))


def write_task(folder: Path, seed: int) -> None:
    """Write train.jsonl, heldout.jsonl and demonstrations.jsonl; the seed decides which prompts are held out."""
    from megarl.data.records import write_jsonl

    size, generator = len(SYMBOLS), np.random.default_rng(seed)
    pairs = np.stack(np.divmod(generator.permutation(size**2), size), 1)
    for name, part in (("heldout", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        write_jsonl(folder / f"{name}.jsonl", ({"prompt": f"={spell(pair)}", "answer": "any walk"} for pair in part))
    walks = pairs[HELD_OUT:][generator.integers(len(pairs) - HELD_OUT, size=NUM_DEMONSTRATIONS)]
    for step in range(LENGTH):
        choices = generator.integers(NUM_ALLOWED, size=len(walks))
        walks = np.column_stack([walks, ALLOWED[walks[:, step], walks[:, step + 1], choices]])
    shown = ({"prompt": f"={spell(walk[:2])}", "response": spell(walk[2:])} for walk in walks)
    write_jsonl(folder / "demonstrations.jsonl", shown)


def spell(values: np.ndarray) -> str:
    """Return the symbols of their numbers."""
    return "".join(SYMBOLS[value] for value in values.tolist())


def make_start(folder: Path, seed: int, steps: int) -> Path:
    """Return the folder of a seed's task and cold start of so many supervised steps; made once."""
    start = folder / "starts" / f"seed{seed}-{steps}"
    if (start / "model" / "config.json").exists():
        return start
    from megarl.data.tiny import write_tiny_model

    write_task(start / "task", seed)
    if not (start / "untrained" / "config.json").exists():
        write_tiny_model(start / "untrained", seed=seed, **MODEL)
    table = base_table(start, seed)
    table["sft"] = {"data": str(start / "task" / "demonstrations.jsonl"), "out": str(start / "model"), "steps": steps}
    table["sft"] |= COLD_START
    table["model"]["path"], table["run"]["dir"] = str(start / "untrained"), str(start)
    run_forked("sft", table, start / "sft.log")
    return start


def base_table(start: Path, seed: int) -> dict[str, Any]:
    """Return the tables that all runs of a seed share. Tripwires are off: they drop what the arms are to survive."""
    task = start / "task"
    return {
        "run": {"steps": 1, "seed": seed},
        "model": {"path": str(start / "model"), "dtype": "fp32"},
        "data": {
            "train": str(task / "train.jsonl"),
            "heldout": str(task / "heldout.jsonl"),
            "max_prompt_tokens": 3,
        },
        "reward": {"function": "trials.testbed:is_right"},
        "rollout": {"prompts_per_step": 2, "group_size": 8, "max_response_tokens": LENGTH + 1, "dtype": "fp32"},
        "train": {
            "mini_batches": 4,
            "micro_batch_tokens": 8192,
            "min_route_agreement": 0.0,
            "max_k3": "off",
            "max_native_flip": 0.999,
            "max_bad_steps": 0,
        },
        "optim": {"lr": 6e-4},
        "eval": {"every": 1, "samples": 2},
        "log": {"sinks": [], "samples_per_step": 0},
        "checkpoint": {"at_end": False},
    }


def train_cell(folder: Path, cell: Cell, seed: int) -> None:
    """Train one run of a cell into ``folder``/runs/CELL/seedS, from its first step; its status says how it ended."""
    start, run = make_start(folder, seed, cell.cold_start), folder / "runs" / cell.name / f"seed{seed}"
    if run.exists():
        shutil.rmtree(run)  # of a killed process: it is a function of the configuration, and begins anew
    with suppress(RolloutError):  # a value that is not finite is an outcome
        run_forked("train", tables_of(start, run, cell, seed), run / "log.txt")


def tables_of(start: Path, run: Path, cell: Cell, seed: int) -> dict[str, Any]:
    """Return the configuration of a run, for ``megarl.config.file.parse``."""
    table = base_table(start, seed)
    table["run"] |= {"name": cell.name, "dir": str(run), "steps": cell.steps}
    table["rollout"] |= GAPS[cell.gap]
    table["train"] |= {"objective": "minirl", "objective_overrides": cell.overrides}
    table["train"] |= {"replay": cell.replay, "mini_batches": cell.updates}
    table["rollout"]["prompts_per_step"] = 2 * cell.updates
    table["optim"] |= {"lr": cell.lr, "warmup_steps": cell.budget // 4}
    table["eval"]["every"] = max(cell.steps // 4, 1)
    return table


def run_forked(command: str, table: Mapping[str, Any], log: Path) -> None:
    """Run ``megarl sft`` or ``megarl train`` on one CPU rank in a fork of this process; RolloutError if it fails.

    The fork has torch and Megatron already. Everything that it prints goes to ``log``.
    """
    from megarl.config.file import parse
    from megarl.config.process_environment import apply
    from megarl.ops.quickstart import start_ranks

    def work() -> None:
        die_with_parent()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        config = parse(table)
        apply(config)
        _command(command)(config)

    start_ranks([command], work, num=1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, so that no orphan goes on with a claimed run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def fingerprint(cell: Cell, seed: int) -> str:
    """Return a digest of all that decides a run: its configuration without paths, model, task and cold start."""
    table = tables_of(Path("start"), Path("run"), cell, seed)
    del table["run"]["name"]
    constants = MODEL, COLD_START, ALLOWED.tolist(), ROUTER_NOISE, LENGTH, HELD_OUT, NUM_DEMONSTRATIONS
    text = json.dumps([table, constants], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _command(name: str) -> Callable[[Any], Any]:
    from megarl.trainer.loop import train
    from megarl.trainer.sft import sft

    return {"sft": sft, "train": train}[name]


def warm_up() -> None:
    """Import what all forks need, once, for a CPU with one thread."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    from megarl import enable_cpu

    enable_cpu()
    for name in ("sft", "train"):
        _command(name)


def _make_noisy_engine(strength: str, config: Any, tell: Callable[[str], None]) -> Any:
    """Return the local engine with noise on the logits of its routers, from a generator of the run's seed."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    from megarl.trainer.engines import make_local_engine

    engine = make_local_engine(config, tell)
    generator = torch.Generator().manual_seed(10_000 + config.run.seed)  # another stream than the initial weights'
    spread = ROUTER_NOISE[strength]

    def perturb(router: Any, inputs: Any, outputs: Any) -> tuple[Any, Any, Any]:
        logits = outputs[0] + spread * torch.randn(outputs[0].shape, generator=generator)
        gates, experts = logits.softmax(-1, dtype=torch.float).topk(router.top_k, dim=-1)
        return logits, (gates / gates.sum(-1, keepdim=True)).to(logits.dtype), experts

    routers: Iterable[Any] = (m for m in engine._model.modules() if isinstance(m, Qwen3MoeTopKRouter))
    for router in routers:
        router.register_forward_hook(perturb)
    return engine


def __getattr__(name: str) -> Any:
    """WEAK_NOISE and STRONG_NOISE: engines for ``rollout.engine``."""
    from dataclasses import replace

    from megarl.config.plugs import ENGINES

    strength, _, kind = name.partition("_")
    if kind != "NOISE" or strength.lower() not in ROUTER_NOISE:
        raise AttributeError(name)
    return replace(ENGINES["local"], factory=partial(_make_noisy_engine, strength.lower()))
