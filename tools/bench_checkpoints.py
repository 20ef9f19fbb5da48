"""What the digests of checkpoints cost: time to save and to verify and load one, with them and without, side by side.

    python tools/bench_checkpoints.py [--experts 8] [--repeats 3] [--folder FOLDER]

One process, fp32 weights and the distributed optimizer (16 bytes per parameter). "no digests" computes none while files
are written; the manifest and fsync stay. Medians of repetitions that visit the variants in turn. Files that were just
written are read from memory, so verification shows the cost of SHA-256, not of the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from megarl.config.file import parse
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.megatron import distributed
from megarl.megatron.checkpoints import checkpoint
from megarl.megatron.checkpoints import saver as saver_module
from megarl.megatron.checkpoints.saver import Saver
from megarl.megatron.policy import Policy, schedule_of


def policy_of(folder: Path, experts: int) -> Policy:
    write_tiny_model(
        folder / "model",
        hidden_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        num_experts=experts,
        top_k=2,
        expert_width=512,
        dense_layers=(),
        max_positions=64,
    )
    write_sort_task(folder / "task", num_train=8, num_heldout=8, num_demonstrations=8, digits=3)
    table = {
        "run": {"steps": 1, "dir": str(folder / "run")},
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {"train": str(folder / "task" / "train.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "exact"},
        "rollout": {"prompts_per_step": 8, "group_size": 2, "max_response_tokens": 8, "dtype": "fp32"},
        "train": {"micro_batch_tokens": 64},
        "optim": {"lr": 1e-3},
    }
    config = parse(table, {})
    distributed.initialize(config)
    return Policy(config, schedule_of(config))


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        policy = policy_of(folder, asked.experts)
        policy.zero_grad()
        policy.optimizer_step()  # from here on Adam has moments to save
        path = folder / "checkpoints" / "step_0000001"
        saver = Saver(path.parent, keep=1)

        def save() -> None:
            saver.begin(1, policy, {})
            saver.poll(wait=True)

        def save_plainly() -> None:
            with mock.patch.object(saver_module, "sha256_of", return_value=""):
                saver.begin(1, policy, {})
                saver._calls.maybe_finalize_async_calls(blocking=True)
                saver._pending = None

        actions = {
            "save, no digests, not published": save_plainly,
            "save": save,
            "verify": lambda: checkpoint.require_intact(path),
            "load": lambda: checkpoint.load(path, policy),
        }
        found: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(asked.repeats):
            for name, action in actions.items():
                found[name].append(seconds(action))
        size = sum(file.stat().st_size for file in path.iterdir())
        block, started = bytes(64 << 20), time.perf_counter()
        hashlib.sha256(block)
        rate = len(block) / 2**30 / (time.perf_counter() - started)
        print(f"checkpoint of {size / 2**20:.0f} MiB in {len(list(path.iterdir()))} files; SHA-256 {rate:.2f} GiB/s")
        for name, times in found.items():
            print(f"{name:<34} {statistics.median(times):6.2f} s   ({', '.join(f'{one:.2f}' for one in times)})")


if __name__ == "__main__":
    main()
