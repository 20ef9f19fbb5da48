"""TRL: a row of ``OBJECTIVES`` as loss and advantages of its GRPOTrainer (docs/trl.md). Run against TRL 1.16.0.

>>> trainer = MegarlGRPOTrainer(model, reward, args, dataset, objective="minirl", rollout_func=sample)  # or use_vllm

TRL samples, rewards, computes log-probabilities and steps. This file computes what lies between: advantages of the
whole generation batch, and coefficients whose denominators count the whole optimizer step.
"""

from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer  # pyright takes this file itself for TRL

from megarl.adapters.columns import policies_read, refuse_by
from megarl.core import objectives as core
from megarl.core.choices.parts import TOKEN_ADVANTAGES
from megarl.core.choices.table import find_objective
from megarl.core.metrics import Stat, finalize, merge, to_host
from megarl.core.objectives.columns import count_loss_tokens
from megarl.files.texts import read_table

OF_THE_ROW: list[str] = read_table(__file__)["of_the_row"]
"""Settings of GRPOConfig without effect, because the row decides; they stay at TRL's default."""


class MegarlGRPOTrainer(GRPOTrainer):  # pyright: ignore[reportGeneralTypeIssues]
    """GRPOTrainer with the coefficients, the denominators and the advantages of a row of ``OBJECTIVES``.

    - objective: a row, or its name.
    - mu_is_old: the policy before the update stands in for mu where TRL does not hand mu over. True is right where
      transformers samples from the trained weights at this temperature, without top_p, top_k or other changes.

    Log-probabilities of mu are TRL's ``sampling_per_token_logps``, from vLLM or a ``rollout_func``. A token without a
    finite one leaves the loss and its denominators. Other arguments as in GRPOTrainer. ConfigError if the row reads
    what these settings do not provide, or if a setting would have no effect. UnknownNameError for an unknown row.
    """

    def __init__(
        self, *args: Any, objective: core.Objective | str = "minirl", mu_is_old: bool = False, **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self.objective = row = find_objective(objective)
        self._statistics: list[dict[str, Stat]] = []
        every, per_step = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        every_setting: Any = GRPOConfig
        settings = [field for field in fields(every_setting) if field.name in OF_THE_ROW]
        changed = [field.name for field in settings if getattr(self.args, field.name) != field.default]
        kl = [penalty.coef for penalty in row.penalties if penalty.to == "ref" and penalty.coef] or [0.0]
        self._needs_mu = not mu_is_old and (row.own_functions or "mu" in policies_read(row))
        problems = {
            "changed": changed,
            "kl": self.beta not in kl,
            "no_mu": self._needs_mu and not (self.use_vllm or self.rollout_func),
            "beforehand": every % per_step,
            "whole_step": row.beforehand and per_step * self.accelerator.num_processes > 1,
            "tokens": row.advantage in TOKEN_ADVANTAGES or row.needs_topk or row.router_shift_floor,
        }
        subject = f"TRL: the objective {objective if isinstance(objective, str) else ''} "
        refuse_by("trl", subject, problems, changed=", ".join(changed), kl=kl[0], beta=self.beta)

    def _calculate_rewards(self, *args: Any, **named: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*args, **named)  # [N, functions] of all processes; NaN: no reward
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with the row's advantages [B, T], and with ``loss_mask`` bool [B, T]."""
        batch = super()._generate_and_score_completions(inputs)
        mu, mask = batch.get("sampling_per_token_logps"), (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
        refuse_by("trl", "TRL: the objective ", {"no_mu": mu is None and self._needs_mu})
        mask = mask if mu is None else mask & mu.isfinite()
        size = self.num_generations if self.model.training else self.num_generations_eval
        rewards, weights = self._rewards, self.reward_weights.to(self._rewards)
        judged = ~rewards.isnan().all(1)  # others do not train, and no group counts them
        groups = torch.arange(len(rewards)).to(rewards.device) // size
        scored = self.objective, (rewards * weights).nansum(1)[judged], groups[judged]
        more: Any = {"components": (rewards.nan_to_num()[judged], weights)}
        more["lengths"] = self.accelerator.gather(mask.sum(1))[judged]
        own = torch.arange(len(mask), device=mask.device)[:, None] + self.accelerator.process_index * len(mask)
        trains, advantages = judged.clone(), torch.zeros_like(rewards[:, 0])
        trains[judged], advantages[judged] = core.select_responses(*scored, **more), core.advantages_of(*scored, **more)
        batch["loss_mask"], batch["advantages"] = mask & trains[own], advantages[own].expand_as(mask)
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the micro-batch's part of the step's loss, times the processes over which DDP averages."""
        mode, per_step = ("train", self.args.gradient_accumulation_steps) if self.model.training else ("eval", 1)
        of_model = signature(self._get_per_token_logps_and_entropies).parameters.keys() & inputs.keys()
        more = {name: inputs[name] for name in of_model} | {"compute_aux_loss": self.aux_loss_enabled}
        rows = [torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")]
        rows.append(inputs["completion_ids"].size(1))
        found = self._get_per_token_logps_and_entropies(model, *rows, compute_entropy=True, **more)
        logprobs, entropies, aux_loss = found
        # TRL has no old log-probabilities where the update follows sampling with the same weights: old is theta.
        old = inputs.get("old_per_token_logps", logprobs.detach())
        mu = inputs.get("sampling_per_token_logps", old)
        batch = {**inputs, "old_logprobs": old, "rollout_logprobs": mu}
        batch |= {"ref_logprobs": inputs["ref_per_token_logps"]} if self.beta else {}
        if mode == "eval" or self._step % per_step == 0:  # count the whole optimizer step, on all processes
            first = self._step % self.args.steps_per_generation
            step = [inputs] if mode == "eval" else self._buffered_inputs[first : first + per_step]
            mask = torch.cat([each["loss_mask"] for each in step])
            bounds = torch.arange(0, mask.numel() + 1, mask.size(1), device=mask.device)
            counts = self.accelerator.reduce(count_loss_tokens(mask.flatten(), bounds), "sum")
            self._denominators = core.Denominators(*counts.tolist())
        columns = core.TokenColumns.of_padded(logprobs, batch)
        loss, stats = core.policy_loss(self.objective, columns, self._denominators, entropies=entropies.flatten())
        stats["entropy"] = Stat.mean(entropies, inputs["loss_mask"])
        stats["unscored_fraction"] = Stat.mean(~mu.isfinite(), inputs["completion_mask"].bool())
        self._statistics.append(stats)
        if mode == "eval" or (self._step + 1) % per_step == 0:
            for name, value in finalize(merge(gather_object([to_host(merge(self._statistics))]))).items():
                self._metrics[mode][f"megarl/{name}"].append(value)
            self._statistics.clear()
        loss = loss * self.accelerator.num_processes
        return loss + self.router_aux_loss_coef * aux_loss / per_step if self.aux_loss_enabled else loss
