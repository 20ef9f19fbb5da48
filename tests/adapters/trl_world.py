"""Real TRL trainers in a process whose path begins with TRL's release (a process of test_adapters_trl.py).

    python trl_world.py MODEL OUT rows|splits      with RANK and WORLD_SIZE for several processes

A rollout function answers with drawn tokens, log-probabilities and masks that depend on the prompt alone. Gradients of
each update are kept before the optimizer steps; log-probabilities are those of the model in float64.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import zlib
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from megarl.adapters.trl import MegarlGRPOTrainer
from megarl.core.choices.parts import Penalty
from megarl.core.objectives import OBJECTIVES
from megarl.errors import ConfigError

LONGEST, GROUP = 9, 2  # with 2, the fp32 correction n / (n - 1) of TRL's standard deviation is exact
EPS = {"std_eps": 1e-4}  # TRL's
GRPO, DAPO, SAPO, CISPO = (replace(OBJECTIVES[name], **EPS) for name in ("grpo", "dapo", "sapo", "cispo"))
UNSCALED = {"scale_rewards": "none"}
DR_GRPO = replace(OBJECTIVES["dr_grpo"], norm_length=LONGEST)
VESPO = OBJECTIVES["vespo"]
VESPO = replace(VESPO, factors=(replace(VESPO.factors[0], policies="theta_old"),), **EPS)
SAPO = replace(SAPO, gate=replace(SAPO.gate, negative=float(torch.tensor(1.05))))  # TRL has its temperatures in fp32
KL, UNBIASED = (replace(GRPO, penalties=(Penalty(name, coef=0.1),)) for name in ("k3", "unbiased"))
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "grpo": ({"loss_type": "grpo"}, GRPO),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, DAPO),
    "dr_grpo": ({"loss_type": "dr_grpo", **UNSCALED}, DR_GRPO),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4,
              "learning_rate": 3e-5}, replace(OBJECTIVES["gspo"], **EPS)),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3,
               "learning_rate": 3e-5}, replace(OBJECTIVES["luspo"], **EPS)),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, CISPO),
    "sapo": ({"loss_type": "sapo"}, SAPO),
    "vespo": ({"loss_type": "vespo"}, VESPO),
    "deepseek_v32": ({"loss_type": "grpo", "off_policy_mask_threshold": 0.5, **UNSCALED}, OBJECTIVES["deepseek_v32"]),
    "kl_k3": ({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}, KL),
    "kl_unbiased": ({"loss_type": "grpo", "beta": 0.1}, UNBIASED),
}  # fmt: skip
"""By row: TRL's settings, and the objective. TRL's mask of DeepSeek-V3.2 reads mu, the others of these do not."""
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "reads mu": ("minirl", {}),
    "set beta": (KL, {}),
    "which would have no effect": ("grpo", {"epsilon_high": 0.28}),
    "gradient_accumulation_steps divide": ("grpo", {"gradient_accumulation_steps": 2, "steps_per_generation": 1}),
    "facts of a whole step": ("adaptive_power", {"gradient_accumulation_steps": 2}),
    "advantages or top K": ("kl_grpo", {}),
}


class Doubles:
    """Log-probabilities in the model's dtype: TRL's own kernel computes in fp32 whatever the model has."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, size, **_):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -size - 1 : -1]
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, input_ids[:, -size:, None]).squeeze(-1)
        return chosen, -(logprobs.exp() * logprobs).sum(-1), None

    def _calculate_rewards(self, *args, **named):
        self._rewards = super()._calculate_rewards(*args, **named).double()
        return self._rewards


class Theirs(Doubles, GRPOTrainer):
    pass


class Ours(Doubles, MegarlGRPOTrainer):
    pass


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.of_updates: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        named = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        self.of_updates.append(named)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Random answers of 1 to LONGEST tokens, with holes, by prompt and place in its group."""
    found: dict[str, Any] = {"prompt_ids": trainer.processing_class(prompts)["input_ids"]}
    found |= {"completion_ids": [], "logprobs": [], "env_mask": []}
    for index, prompt in enumerate(prompts):
        draw = torch.Generator().manual_seed(zlib.crc32(f"{prompt} {index % GROUP}".encode()))
        length = int(torch.randint(2, LONGEST + 1, (), generator=draw))
        found["completion_ids"].append(torch.randint(3, 13, (length,), generator=draw).tolist())
        found["logprobs"].append((-3.2 - torch.rand(length, generator=draw)).tolist())
        found["env_mask"].append([1, *(torch.rand(length - 1, generator=draw) > 0.3).int().tolist()])
    return found


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(tokens) % 5 / 4 for tokens in completion_ids]


def run(kind: Any, model: str, settings: dict[str, Any], **named: Any) -> Any:
    """Gradients and log of two generations of 8 responses, each used for two updates."""
    config = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": 8, "num_generations": GROUP, "num_iterations": 2, "router_aux_loss_coef": 0.0,
        "max_completion_length": LONGEST, "optim": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0, "max_steps": 4,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0, **settings,
    }  # fmt: skip
    torch.manual_seed(0)
    gradients = Gradients()
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = kind(
        model=weights.double(), processing_class=AutoTokenizer.from_pretrained(model), reward_funcs=reward,
        args=GRPOConfig(**config), train_dataset=Dataset.from_list([{"prompt": f"{n}="} for n in range(64)]),
        callbacks=[gradients], **{"rollout_func": rollout, **named},
    )  # fmt: skip
    if trainer.ref_model is not None:  # a reference of the same weights would hide the sign of the KL
        generator = torch.Generator().manual_seed(1)
        for each in trainer.ref_model.double().parameters():
            each.data += 0.1 * each.abs().mean() * torch.randn(each.shape, generator=generator, dtype=each.dtype)
    trainer.train()
    return gradients.of_updates, trainer.state.log_history


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of an entry, by the largest entry."""
    largest = max(float(each.abs().max()) for each in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a) / (
        largest or 1.0
    )  # 0 where masks drop every token


def rows(model: str) -> dict[str, Any]:
    told: dict[str, Any] = {"refused": {}}
    for name, (settings, objective) in ROWS.items():
        theirs, _ = run(Theirs, model, settings)
        kept = {key: settings[key] for key in settings.keys() & {"beta", "learning_rate"}}
        ours, log = run(Ours, model, kept, objective=objective)
        told[name] = [difference(a, b) for a, b in zip(theirs, ours, strict=True)]
        told[f"{name} ratio"] = log[1]["megarl/ratio/max"]
    for expected, (objective, settings) in REFUSED.items():
        try:
            run(Ours, model, settings, objective=objective, rollout_func=None)
        except ConfigError as error:
            told["refused"][expected] = str(error)
    return told


def splits(model: str) -> dict[str, Any]:
    """The same responses in one micro-batch, in two, or on two processes."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    told: dict[str, Any] = {}
    for name in ("minirl", "dapo", "reinforce_pp", "reinforce_rej_signed"):
        objective = replace(OBJECTIVES["dapo"], advantage=name) if name == "reinforce_pp" else name
        size = {"per_device_train_batch_size": 8 // world}
        found = {"whole": run(Ours, model, size, objective=objective)}
        if world == 1:
            size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
            found["accumulated"] = run(Ours, model, size, objective=objective)
        told[name] = found
    return told


def main() -> None:
    model, out, what = sys.argv[1:]
    logging.disable(logging.WARNING)
    torch.save(rows(model) if what == "rows" else splits(model), out)


if __name__ == "__main__":
    main()
