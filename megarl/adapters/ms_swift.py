"""A row of ``OBJECTIVES`` as the loss of GRPO in Megatron-SWIFT: in the file of ``--external_plugins``,

    megarl.adapters.ms_swift.use_row("minirl")

Everything but the loss is that of ``MegatronGRPOTrainer``.
"""

from typing import Any

from torch import Tensor

from megarl.adapters.columns import find_row, row_loss
from megarl.core.choices.parts import Objective

POLICIES = ("old", "rollout", "ref")


def use_row(row: str | Objective) -> None:
    """Let ``megatron rlhf --rlhf_type grpo`` train with a row; its metrics are ms-swift's, of ``--loss_type``."""
    from megatron.core import parallel_state
    from swift.megatron import trainers  # pyright: ignore[reportMissingImports]

    objective, parent = find_row(row, "ms-swift"), trainers.MegatronGRPOTrainer

    class RowTrainer(parent):
        def loss_func(self, output_tensor: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            """logprobs [B, S] of the completions in, the loss of Megatron's schedule out."""
            _, metrics = super().loss_func(output_tensor.detach(), data)
            batch, mask = data["grpo_batch"], data["grpo_batch"].completion_mask
            if self.args.overlong_filter:
                mask = mask & ~batch.truncated_mask[:, None]
            columns = {f"{name}_logprobs": getattr(batch, f"{name}_per_token_logps") for name in POLICIES}
            columns |= {"advantages": batch.advantages, "loss_mask": mask}
            # Every micro-batch has as many sequences; the number of tokens is that of all ranks.
            scale, divisor = 1, len(mask)
            if objective.aggregation == "token-mean":
                scale = self.args.num_microbatches * parallel_state.get_data_parallel_world_size()
                divisor = batch.num_items_in_batch
            loss = row_loss(objective, "ms-swift", output_tensor, **columns) * scale / divisor
            return loss, {**metrics, "loss": loss.detach().clone()}

    trainers.MegatronGRPOTrainer = RowTrainer
