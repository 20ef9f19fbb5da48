"""The quickstart's task in TRL's GRPOTrainer, one step at a time (a process of tools/bench_trl.py).

    PYTHONPATH=TRL python tools/trl_worker.py MODEL PROMPTS.jsonl STEPS

Each line on standard input lets it run one step: sampling, two optimizer steps. It answers with a line of JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

UPDATES = 2


class _Turns(TrainerCallback):
    """Waits for a line before each step; a step is UPDATES optimizer steps."""

    def __init__(self) -> None:
        self.answers = sys.stdout
        sys.stdout = sys.stderr  # the trainer prints too
        self.tokens = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % UPDATES == 0:
            sys.stdin.readline()
            self.started, self.tokens = time.process_time(), 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % UPDATES == 0:
            told = {"seconds": time.process_time() - self.started, "tokens": self.tokens}
            print(json.dumps(told), file=self.answers, flush=True)


def main(model_path: str, prompts: str, steps: int) -> None:
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # tools/environments.py has a folder for TRL

    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    turns = _Turns()
    rows = [json.loads(line) for line in Path(prompts).read_text(encoding="utf-8").splitlines()]

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        turns.tokens = sum(map(len, completion_ids))
        return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=32 * 8 // UPDATES,
        steps_per_generation=UPDATES,
        gradient_accumulation_steps=1,
        num_generations=8,
        num_iterations=1,
        max_completion_length=10,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        router_aux_loss_coef=0.0,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        max_steps=steps * UPDATES,
        logging_steps=UPDATES,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[turns],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
