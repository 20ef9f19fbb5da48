"""TRL: a row of ``OBJECTIVES`` as loss and advantages of its GRPOTrainer (docs/trl.md). Run against TRL 1.16.0.

>>> trainer = MegarlGRPOTrainer(model, reward, args, dataset, objective="minirl", rollout_func=sample)  # or use_vllm

TRL samples, rewards, computes log-probabilities and steps. This file computes what lies between: advantages of the
whole generation batch, and coefficients whose denominators count the whole optimizer step.
"""

from __future__ import annotations

import math
from dataclasses import fields
from inspect import signature
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # a stack that megarl does not install

from megarl.core import objectives as core
from megarl.core.choices.parts import TOKEN_ADVANTAGES
from megarl.core.choices.table import find_objective
from megarl.core.metrics import Stat, finalize, merge, to_host
from megarl.core.objectives.columns import count_loss_tokens
from megarl.errors import ConfigError

OF_THE_ROW = (
    *("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards", "entropy_coef"),
    *("multi_objective_aggregation", "off_policy_mask_threshold", "top_entropy_quantile", "use_adaptive_entropy"),
    *("use_bias_correction_kl", *(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))),
)
"""Settings of GRPOConfig without effect, because the row decides; they stay at TRL's default."""
_NO_MU = (
    "reads mu, which TRL does not hand over with these settings: set use_vllm, give a rollout_func that returns "
    "logprobs, or say mu='old' where transformers samples from the trained weights, at this temperature alone"
)


class MegarlGRPOTrainer(GRPOTrainer):
    """GRPOTrainer with the coefficients, the denominators and the advantages of a row of ``OBJECTIVES``.

    - objective: a row, or its name.
    - mu: where the log-probabilities of the sampling policy come from. "sampled": TRL's ``sampling_per_token_logps``,
      which vLLM and a ``rollout_func`` give; a token without one (NaN) leaves the loss and its denominators. "old": the
      policy before the update, where transformers samples from the trained weights and no other engine is involved.

    Other arguments as in GRPOTrainer. ConfigError if the row reads what these settings do not provide, or if a setting
    would have no effect. UnknownNameError for an unknown row.
    """

    def __init__(
        self, *args: Any, objective: core.Objective | str = "minirl", mu: Literal["sampled", "old"] = "sampled", **named
    ) -> None:
        super().__init__(*args, **named)
        self.objective, self._statistics = find_objective(objective), []
        row, config, micro_steps = self.objective, self.args, self.args.gradient_accumulation_steps
        defaults = {field.name: field.default for field in fields(GRPOConfig)}
        changed = [name for name in OF_THE_ROW if getattr(config, name) != defaults[name]]
        coefs = [penalty.coef for penalty in row.penalties if penalty.to == "ref" and penalty.coef] or [0.0]
        policies = {*row.pairs, *(name for penalty in row.penalties for name in (penalty.to, penalty.behaviour))}
        self._is_sampled = mu == "sampled"
        self._needs_mu = self._is_sampled and (row.own_functions or any("mu" in name for name in policies))
        for problem, applies in {
            f"leaves {', '.join(changed)} without effect, because the row decides: keep TRL's default": changed,
            f"has the coefficient {coefs[0]} of a KL to the reference, but beta is {self.beta}: set beta to it, which "
            "lets TRL load the reference, or give the objective a penalty with it": self.beta not in coefs,
            _NO_MU: self._needs_mu and not (self.use_vllm or self.rollout_func),
            "counts an optimizer step beforehand: let gradient_accumulation_steps divide steps_per_generation":
                config.steps_per_generation % micro_steps,
            "must know all tokens of a step beforehand: use one process and gradient_accumulation_steps 1":
                row.beforehand and micro_steps * self.accelerator.num_processes > 1,
            "needs advantages per token or the sampler's top K tokens, which TRL does not have":
                row.advantage in TOKEN_ADVANTAGES or row.needs_topk,
        }.items():  # fmt: skip
            if applies:
                raise ConfigError(f"TRL: objective {objective if isinstance(objective, str) else ''} {problem}")

    def _calculate_rewards(self, *args: Any, **named: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **named)  # [N, functions] of all processes; NaN: no reward
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with the row's advantages, ``loss_mask`` bool [B, T], and ``mu`` [B, T] where it is known."""
        batch = super()._generate_and_score_completions(inputs)
        if self._is_sampled and (sampled := batch.get("sampling_per_token_logps")) is not None:
            batch["mu"] = torch.where(sampled.isnan(), -math.inf, sampled)
        elif self._needs_mu:
            raise ConfigError(f"TRL: the objective {_NO_MU}")
        mask = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        size = self.num_generations if self.model.training else self.num_generations_eval
        rewards, weights = self._rewards, self.reward_weights.to(self._rewards)
        scored = self.objective, (rewards * weights).nansum(1), torch.arange(len(rewards)).to(rewards.device) // size
        more: Any = {"valid": ~rewards.isnan().all(1), "components": (rewards.nan_to_num(), weights)}
        more["lengths"] = self.accelerator.gather(mask.sum(1))
        start = self.accelerator.process_index * len(mask)
        own = slice(start, start + len(mask)), None
        batch["loss_mask"] = mask & core.select_responses(*scored, **more)[own]
        batch["advantages"] = core.advantages_of(*scored, **more)[own].expand_as(mask)
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the micro-batch's part of the step's loss, times the processes over which DDP averages."""
        is_train, micro_steps = self.model.training, self.args.gradient_accumulation_steps
        of_model = signature(self._get_per_token_logps_and_entropies).parameters.keys() & inputs.keys()
        more = {name: inputs[name] for name in of_model} | {"compute_aux_loss": self.aux_loss_enabled}
        rows = [torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")]
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model, *rows, inputs["completion_ids"].size(1), compute_entropy=True, **more
        )
        # TRL has no old log-probabilities where the update follows sampling with the same weights: old is theta.
        old = inputs.get("old_per_token_logps", logprobs.detach())
        batch = {**inputs, "old_logprobs": old, "rollout_logprobs": inputs.get("mu", old)}
        if "ref_per_token_logps" in inputs:
            batch["ref_logprobs"] = inputs["ref_per_token_logps"]
        if is_train and self._step % micro_steps == 0:
            self._denominators = self._count_step(micro_steps)
        columns, denominators = core.TokenColumns.of_padded(logprobs, batch), self._denominators if is_train else None
        loss, statistics = core.policy_loss(self.objective, columns, denominators, entropies=entropies.flatten())
        self._statistics.append({**statistics, "entropy": Stat.mean(entropies, inputs["loss_mask"])})
        if not is_train or (self._step + 1) % micro_steps == 0:
            for name, value in finalize(merge(gather_object([to_host(merge(self._statistics))]))).items():
                self._metrics["train" if is_train else "eval"][f"megarl/{name}"].append(value)
            self._statistics.clear()
        aux = self.router_aux_loss_coef * aux_loss / (micro_steps if is_train else 1) if self.aux_loss_enabled else 0.0
        return loss * (self.accelerator.num_processes if is_train else 1) + aux

    def _count_step(self, micro_steps: int) -> core.Denominators:
        """Count the micro-batches of this optimizer step on all processes; a collective call."""
        first, counts = self._step % self.args.steps_per_generation, []
        for batch in self._buffered_inputs[first : first + micro_steps]:
            mask = batch["loss_mask"] & ~batch["mu"].isneginf() if "mu" in batch else batch["loss_mask"]
            bounds = torch.arange(0, mask.numel() + 1, mask.size(1), device=mask.device)
            counts.append(count_loss_tokens(mask.flatten(), bounds))
        return core.Denominators(*self.accelerator.reduce(torch.stack(counts).sum(0), "sum").tolist())
