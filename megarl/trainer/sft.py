"""The supervised cold start: a short phase on demonstrations, with the trainer's own forward and backward passes.

Only the coefficients differ from RL. Each demonstrated token has ``1 / D``, with ``D`` the number of demonstrated
tokens in the batch: the loss is the mean negative log-likelihood.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megarl.config import Config
from megarl.core.metrics import finalize
from megarl.core.objectives.columns import Denominators
from megarl.core.packing import pack
from megarl.data.prompts import Demonstration, PromptOrder, load_demonstrations
from megarl.data.tokenizer import load_model_tokenizer
from megarl.errors import ConfigError
from megarl.files.outputs import partial_of, require_apart, require_own
from megarl.megatron import distributed
from megarl.megatron.hf_weights import save_hf
from megarl.megatron.passes import forward
from megarl.megatron.policy import Policy, Schedule
from megarl.megatron.versions import as_config_error
from megarl.models.shapes import read_shape
from megarl.run.folder import fingerprint_data, fingerprint_model
from megarl.run.progress import StepProgress
from megarl.trainer.mini_batch import make_rollout, over_ranks, split


def sft(config: Config) -> None:
    """Train on ``config.sft`` and write a Hugging Face checkpoint to ``config.sft_out``; a collective call.

    ConfigError without an [sft] table.
    """
    table = config.sft
    if table is None:
        raise ConfigError("found no [sft] table, expected one with data, steps, batch_size and lr")
    out = config.sft_out.resolve()
    require_apart(out, Path(config.model.path), Path(table.data))
    require_own(out, partial_of(out))
    distributed.initialize(config)
    inputs = distributed.from_main_rank(lambda: fingerprint_model(config) | {"sft.data": fingerprint_data(table.data)})
    demonstrations = read_demonstrations(config)
    order = PromptOrder(len(demonstrations), config.run.seed)
    policy = Policy(config, Schedule(table, max(table.steps, table.warmup_steps + 1)))
    progress = StepProgress(enabled=distributed.is_main_rank())
    progress.line(
        f"cold start of {config.model.path}: {table.steps} steps of {table.batch_size} demonstrations from "
        f"{table.data}, on {dist.get_world_size()} ranks; the result goes to {out}"
    )
    if policy.left_out:
        progress.line(policy.left_out)
    share = table.batch_size // distributed.dp_size()
    local = slice(distributed.dp_rank() * share, (distributed.dp_rank() + 1) * share)
    for step in range(table.steps):
        indices = order.take(step * table.batch_size, table.batch_size)[local]
        with as_config_error("train", config.megatron) if step == 0 and config.megatron else nullcontext():
            metrics = _step(config, policy, [demonstrations[i] for i in indices])
        if metrics and (step % 10 == 9 or step + 1 == table.steps):
            progress.line(f"cold start {step + 1}/{table.steps}  loss {metrics['loss']:.4f}")
    save_hf(policy.chunks, policy.shape, config.model.path, out, inputs=inputs)
    progress.line(f"cold start: wrote {config.sft_out}")
    distributed.shutdown()


def read_demonstrations(config: Config) -> list[Demonstration]:
    """Read the demonstrations of the [sft] table; errors as in ``load_demonstrations``."""
    positions = read_shape(config.model.path).max_sequence_length
    return load_demonstrations(config, load_model_tokenizer(config.model), positions)


def _step(config: Config, policy: Policy, demonstrations: list[Demonstration]) -> dict[str, float]:
    batch = pack([make_rollout(d.tokens, d.loss_mask) for d in demonstrations], np.zeros(len(demonstrations)))
    total = over_ranks(Denominators.of(batch.loss_mask, batch.cu_seqlens)).num_tokens
    policy.zero_grad()
    options: Any = {"temperature": 1.0, "vocab_size": policy.shape.vocab_size, "coefficients": forward.by_mask(total)}
    outputs = forward.run(policy.chunks, split(config, batch), **options)
    policy.optimizer_step()
    statistics = distributed.collect([output.metrics for output in outputs])
    return finalize(statistics) if statistics is not None else {}
