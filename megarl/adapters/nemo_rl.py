"""A row of ``OBJECTIVES`` as a ``LossFunction`` of NeMo-RL: in the run script, after ``setup(...)``,

    loss_fn = megarl.adapters.nemo_rl.PolicyLoss("minirl")

which goes to ``grpo_train`` in the place of the ``loss_fn`` of ``setup``. The denominators are NeMo-RL's global counts.
"""

from typing import Any

from torch import Tensor

from megarl.adapters.columns import POLICY_COLUMNS, find_row, row_loss
from megarl.core.choices.parts import Objective

_NAMES = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
COLUMNS = dict(zip(("advantages", *POLICY_COLUMNS.values()), _NAMES, strict=True))


class PolicyLoss:
    """The loss of a row, before NeMo-RL sums it over micro-batches and ranks."""

    def __init__(self, row: str | Objective) -> None:
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType  # pyright: ignore[reportMissingImports]

        self.row, self.input_type = find_row(row, "NeMo-RL"), LossInputType.LOGPROB
        by_token = self.row.aggregation == "token-mean"
        self.loss_type = LossType.TOKEN_LEVEL if by_token else LossType.SEQUENCE_LEVEL

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and its metrics; next_token_logprobs: [B, S - 1], columns of ``data``: [B, S].

        ConfigError if the row reads a column that ``data`` does not have.
        """
        columns = {name: data[key][:, 1:] for name, key in COLUMNS.items() if key in data}
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = row_loss(self.row, "NeMo-RL", next_token_logprobs, loss_mask=mask, **columns)
        loss = loss / (global_valid_toks if self.row.aggregation == "token-mean" else global_valid_seqs)
        return loss, {"loss": loss.item(), "num_valid_samples": data["sample_mask"].sum().item()}
