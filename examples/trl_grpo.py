"""TRL's GRPOTrainer with an objective of megarl, on a CPU. Lines of megarl are marked ``# megarl``. See docs/trl.md.

    python examples/trl_grpo.py MODEL TASK --objective minirl --steps 20

MODEL is a folder of transformers, TASK a folder with train.jsonl and heldout.jsonl (prompt, answer), as `megarl
quickstart` writes them. It prints the share of right held-out answers before and after, and the reward of each step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig  # pyright: ignore[reportMissingImports]
from trl.models import unwrap_model_for_generation  # pyright: ignore[reportMissingImports]

from megarl.adapters.trl import MegarlGRPOTrainer  # megarl


def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Sample with transformers, and keep log mu of each token: TRL's own sampling keeps none."""
    inputs = trainer.processing_class(prompts, padding=True, padding_side="left", return_tensors="pt")
    inputs = {name: inputs[name].to(trainer.accelerator.device) for name in ("input_ids", "attention_mask")}
    options = {"generation_config": trainer.generation_config, "return_dict_in_generate": True, "output_scores": True}
    # Without this, gradient checkpointing (TRL's default) takes the cache away, and the model samples nonsense.
    with torch.no_grad(), unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        found = model.generate(**inputs, **options)
    # Scores are logits after temperature, top_p and the like: the distribution that the token was drawn from.
    logprobs = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    tokens = found.sequences[:, -logprobs.size(1) :]
    ends = torch.isin(tokens, torch.tensor(trainer.eos_token_ids, device=tokens.device)).int()
    lengths = (ends.cumsum(1) - ends == 0).sum(1).tolist()  # up to the first end, included
    cut = [[row[:length] for row, length in zip(x.tolist(), lengths, strict=True)] for x in (tokens, logprobs)]
    prompt_ids = [row[mask.bool()].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    return {"prompt_ids": prompt_ids, "completion_ids": cut[0], "logprobs": cut[1]}


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def pass_rate(trainer: Any, rows: list[dict[str, str]]) -> float:
    """The share of right answers, one sampled for each prompt, always with the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        tokens = sample([row["prompt"] for row in rows], trainer)["completion_ids"]
    texts = trainer.processing_class.batch_decode(tokens, skip_special_tokens=True)
    return sum(reward(texts, [row["answer"] for row in rows])) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("task", type=Path)
    parser.add_argument("--objective", default="minirl")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    train, heldout = (
        [json.loads(line) for line in (asked.task / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    )
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=128,
        steps_per_generation=2,  # 256 responses, two updates: the second is off-policy
        num_generations=8,
        max_completion_length=10,
        learning_rate=1e-4,
        max_steps=2 * asked.steps,
        logging_steps=2,
        router_aux_loss_coef=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    trainer = MegarlGRPOTrainer(  # megarl
        model=AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(train),
        objective=asked.objective,  # megarl
        rollout_func=sample,  # for mu
    )
    before = pass_rate(trainer, heldout)
    trainer.train()
    names = ("reward", "grad_norm", "megarl/ratio/max")
    told = {"heldout": [before, pass_rate(trainer, heldout)]}
    told |= {name: [line[name] for line in trainer.state.log_history if name in line] for name in names}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
