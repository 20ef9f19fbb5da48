"""A row of ``OBJECTIVES`` as the loss of GRPO in Megatron-SWIFT: in the file of ``--external_plugins``,

    megarl.adapters.ms_swift.use_row("minirl")

Everything but the loss is that of ``MegatronGRPOTrainer``.
"""

from typing import Any

import torch
from torch import Tensor

from megarl.adapters.columns import find_row, row_loss
from megarl.core.choices.parts import Objective

COLUMNS = {f"{name}_logprobs": f"{name}_per_token_logps" for name in ("old", "rollout", "ref")} | {
    "advantages": "advantages"
}


def use_row(row: str | Objective) -> None:
    """Let ``megatron rlhf --rlhf_type grpo`` train with a row; its metrics are ms-swift's, of ``--loss_type``."""
    from megatron.core import parallel_state
    from swift.megatron import trainers  # pyright: ignore[reportMissingImports]

    objective, parent = find_row(row, "ms-swift"), trainers.MegatronGRPOTrainer

    class RowTrainer(parent):
        def loss_func(self, output_tensor: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            """logprobs [B, S] of the completions in, the loss of Megatron's schedule out."""
            _, metrics = super().loss_func(output_tensor.detach(), data)
            batch = data["grpo_batch"]
            filtered = batch.truncated_mask[:, None] if self.args.overlong_filter else False
            columns = {name: getattr(batch, key) for name, key in COLUMNS.items()}
            columns["loss_mask"] = batch.completion_mask & ~torch.as_tensor(filtered, device=output_tensor.device)
            total, _ = row_loss(objective, "ms-swift", output_tensor, **columns)
            if objective.aggregation == "token-mean":
                ranks = parallel_state.get_data_parallel_world_size()
                loss = total * self.args.num_microbatches * ranks / batch.num_items_in_batch
            else:
                loss = total / len(output_tensor)  # every micro-batch has as many sequences
            return loss, {**metrics, "loss": loss.detach().clone()}

    trainers.MegatronGRPOTrainer = RowTrainer
