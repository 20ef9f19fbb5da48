"""Rows of ``OBJECTIVES`` as policy losses of SkyRL: before training, in the script that starts it,

    megarl.adapters.skyrl.register("grpo")

and ``trainer.algorithm.policy_loss_type=megarl_grpo``. SkyRL divides advantages before the update, by its
``loss_reduction``; a row takes no other part in the division.
"""

from typing import Any

from torch import Tensor

from megarl.adapters.columns import find_row, row_loss
from megarl.core.choices.parts import Objective
from megarl.errors import ConfigError, refuse_if

REDUCTIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
"""SkyRL's ``loss_reduction`` by aggregation; the other aggregations have "seq_mean_token_sum_norm"."""


def register(row: str | Objective, name: str | None = None) -> None:
    """Register a row as the policy loss ``name``, by default "megarl_" and the name of the row.

    ConfigError for a row with penalties, which are not divided as advantages are, and in a step with another
    ``loss_reduction`` than the row's, or without a column that the row reads.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import register_policy_loss  # pyright: ignore[reportMissingImports]

    objective = find_row(row, "SkyRL")
    refuse_if(any(penalty.coef for penalty in objective.penalties), ConfigError, "skyrl_penalty")
    wanted = REDUCTIONS.get(objective.aggregation, "seq_mean_token_sum_norm")

    @register_policy_loss(name or f"megarl_{row}")
    def loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, **given: Any) -> Any:
        refuse_if(config.loss_reduction != wanted, ConfigError, "skyrl_loss_reduction", config=config, wanted=wanted)
        given |= {"old_logprobs": old_log_probs, "advantages": advantages}
        total = row_loss(objective, "SkyRL", log_probs, by_token=True, **given)
        # "seq_mean_token_sum_norm" divided by max_seq_len.
        scale = config.max_seq_len / (objective.norm_length or 1) if wanted not in REDUCTIONS.values() else 1
        return total * scale, {}
