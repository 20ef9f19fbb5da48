"""A row of ``OBJECTIVES`` as the custom loss of prime-rl, which divides by the tokens of the step:

[trainer.loss]
type = "custom"
import_path = "megarl.adapters.prime_rl.loss"
kwargs = { row = "dis" }
"""

from typing import Any

from megarl.adapters.columns import find_row, token_columns, token_losses, undivided
from megarl.core.choices.parts import Objective
from megarl.core.choices.records import make
from megarl.core.choices.table import find_objective


def loss(inputs: Any, row: str | Objective, **parts: Any) -> Any:
    """Return the ``LossOutputs`` of one sequence, not divided.

    parts: replace those of the row, such as ``aggregation = "token-mean"``. prime-rl takes one optimizer step per
    batch, so pi_old is pi_theta. ConfigError for a row with another division, or for a missing ``ref_logprobs``.
    """
    from prime_rl.trainer.rl.loss import LossOutputs  # pyright: ignore[reportMissingImports]

    objective = find_row(make(Objective, parts, find_objective(row)), "prime-rl", ("token-mean",))
    columns = {"rollout_logprobs": inputs.inference_logprobs, "ref_logprobs": inputs.ref_logprobs}
    columns |= {"old_logprobs": inputs.trainer_logprobs.detach(), "advantages": inputs.advantages}
    given = token_columns(objective, "prime-rl", inputs.trainer_logprobs, loss_mask=inputs.loss_mask, **columns)
    values = undivided(objective, given).values
    values = values if inputs.loss_weights is None else values * inputs.loss_weights
    share = (values != 0).sum() / inputs.loss_mask.sum().clamp(min=1)
    return LossOutputs(token_losses(values, inputs.trainer_logprobs).sum(), {"megarl/trained": share})
