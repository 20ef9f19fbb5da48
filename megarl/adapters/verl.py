"""megarl's objectives in verl 0.9: every row as a policy loss and as an advantage (docs/verl.md).

verl loads this module by the entry point ``verl.plugins``, or by ``VERL_USE_EXTERNAL_MODULES=megarl.adapters.verl``.
The import registers the names ``megarl_<row>`` in ``verl.trainer.ppo.core_algos``, and wraps verl's ``ppo_loss``:
``ppo_loss`` drops the sampler's log-probabilities from the micro-batch before the call of a policy loss.

Read in verl 0.9.1: ``workers/utils/losses.py``, ``trainer/ppo/core_algos.py``, ``workers/engine``.
"""

# verl has an environment of its own: make verl
# pyright: reportMissingImports=false

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.utils import losses

from megarl.adapters.columns import policies_read, refuse_by
from megarl.core.metrics import Stat, to_host
from megarl.core.objectives import OBJECTIVES, Denominators, Objective, TokenColumns, advantages_of, select_responses
from megarl.core.objectives import policy_loss as objective_loss

REPORTED = {"mean": [""], "max": [""], "summary": ["mean", "max"], "ratio": ["mean", "min", "max"], "ess": ["fraction"]}
"""By kind of statistic the numbers that become metrics; verl averages them over micro-batches."""
_NEEDS_MORE = ("token_level_kl", "process")
"""Advantages of more than rewards."""
_micro_batch: ContextVar[Mapping[str, Any]] = ContextVar("megarl_micro_batch")
_verl_ppo_loss = losses.ppo_loss


def register(name: str, objective: Objective) -> None:
    """Make an objective verl's policy loss ``actor.policy_loss.loss_mode=NAME`` and advantage
    ``algorithm.adv_estimator=NAME``.

    For variants: ``register("minirl_wide", replace(OBJECTIVES["minirl"], masks=()))`` in a module of
    ``VERL_USE_EXTERNAL_MODULES``, because each process of verl needs it. ValueError if the name is taken.
    """
    core_algos.register_adv_est(name)(partial(advantage, name, objective))
    core_algos.register_policy_loss(name)(partial(policy_loss, name, objective))


def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """verl's ``ppo_loss``, with the micro-batch ``data`` (columns [b, r]) at hand for the policy losses of this module.

    config: verl's ActorConfig; model_output: packed or nested log-probabilities; result: loss scalar, and metrics.
    """
    token = _micro_batch.set(data)
    try:
        return _verl_ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    finally:
        _micro_batch.reset(token)


def policy_loss(
    name: str, objective: Objective, *, config: Any, loss_agg_mode: str, rollout_is_weights: Any = None, **batch: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one micro-batch, ``-dp_size * (coefficients * log_prob).sum()``, and metrics.

    Denominators are verl's: loss tokens of the mini-batch over all data-parallel ranks, and its number of responses,
    responses without a loss token included. batch: ``old_log_prob``, ``log_prob``, ``advantages``, ``response_mask``.
    Prefixes and sequences run over the loss tokens of a row of ``response_mask`` in order, with or without holes. All
    tensors [b, r]. ConfigError, with the name and the setting to
    change, if verl's settings contradict the objective, or if a column of the objective is missing.
    """
    info, data = config.global_batch_info, _micro_batch.get({})
    old_log_prob, advantages, mask = (batch[key] for key in ("old_log_prob", "advantages", "response_mask"))
    read = policies_read(objective) | ({"mu"} if objective.own_functions else set())
    num_tokens = info.get("batch_num_tokens")
    is_part = num_tokens is not None and (info["dp_size"] > 1 or int(mask.sum()) < num_tokens)
    reads_mu, reads_ref = "mu" in read, "ref" in read
    problems = {
        "aggregation": loss_agg_mode != objective.aggregation,
        "norm_length": objective.norm_length is not None and not config.loss_scale_factor,
        "no_mu": reads_mu and "rollout_log_probs" not in data,
        "mu_twice": reads_mu and rollout_is_weights is not None,
        "no_ref": reads_ref and "ref_log_prob" not in data,
        "kl_twice": reads_ref and config.use_kl_loss and config.kl_loss_coef,
        "topk": objective.needs_topk,
        "drift": objective.router_shift_floor,
        "beforehand": objective.beforehand and is_part,
        "entropy": objective.entropy_coef,
        "advantage": objective.advantage in _NEEDS_MORE,
    }
    refuse_by("verl", f"{name}: ", problems, row=objective, mode=loss_agg_mode)
    if objective.norm_length is not None:
        objective = replace(objective, norm_length=config.loss_scale_factor)
    columns = {
        "old_logprobs": old_log_prob,
        "rollout_logprobs": _padded(data["rollout_log_probs"]) if reads_mu else old_log_prob,
        "advantages": advantages if rollout_is_weights is None else advantages * rollout_is_weights,
        "loss_mask": mask.bool(),
    }
    if reads_ref:
        columns["ref_logprobs"] = _padded(data["ref_log_prob"])
    denominators = None  # those of this micro-batch, which is all
    if num_tokens is not None and not objective.beforehand:
        denominators = Denominators(int(num_tokens), int(info["global_batch_size"]))
    loss, statistics = objective_loss(objective, TokenColumns.of_padded(batch["log_prob"], columns), denominators)
    return loss * info.get("dp_size", 1), _metrics(statistics)


def advantage(
    name: str, objective: Objective, *, token_level_rewards: Tensor, response_mask: Tensor, index: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return advantages [N, r] twice, as verl's estimators do; index [N] has equal entries for responses to one prompt.

    token_level_rewards, response_mask: [N, r]. ConfigError, with the name, if the advantage needs more than rewards,
    and if the objective leaves responses out that are in the batch.
    """
    refuse_by("verl", f"{name}: ", {"advantage": objective.advantage in _NEEDS_MORE})
    rewards, lengths = token_level_rewards.sum(-1), response_mask.sum(-1)
    groups = np.unique(index, return_inverse=True)[1]
    if objective.selection != "all":
        trains = select_responses(objective, rewards, groups, lengths=lengths).to(lengths.device)
        refuse_by("verl", f"{name}: ", {"left_out": (~trains & (lengths > 0)).any()})
    values = advantages_of(objective, rewards, groups, lengths=lengths)[:, None] * response_mask
    return values, values


def _padded(column: Tensor) -> Tensor:
    return column.to_padded_tensor(0.0) if column.is_nested else column


def _metrics(statistics: Mapping[str, Stat]) -> dict[str, float]:
    """Return the same names for every micro-batch, 0 without observations: verl merges ranks by position."""
    stats = [(name, end, s) for name, s in to_host(statistics).items() for end in REPORTED.get(s.kind, [])]
    return {f"actor/megarl/{name}{end and '_' + end}": stat.values().get(end, 0.0) for name, end, stat in stats}


for _name, _objective in OBJECTIVES.items():
    register(f"megarl_{_name}", _objective)
# Modules that have imported verl's function already; with the entry point, there are none.
for _module in ("verl.workers.utils.losses", "verl.workers.engine_workers", "verl.trainer.distillation.losses"):
    if getattr(sys.modules.get(_module), "ppo_loss", None) is _verl_ppo_loss:
        setattr(sys.modules[_module], "ppo_loss", ppo_loss)  # noqa: B010
