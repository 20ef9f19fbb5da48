"""A GRPO-like loop around Megatron-Core with routing replay and MiniRL. The lines of megarl are marked ``# megarl``.

    python examples/plugged_in.py --replay r3
    torchrun --nproc-per-node 2 examples/plugged_in.py --replay r2 --tp 2 --recompute

It trains a small MoE on random rollouts, on one rank, or on several with --tp, --pp, --vpp and --ep. At the end it
prints which experts the tokens were sent to, and exits with 1 if replay did not hold. See docs/plugin.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import toy  # isort: skip  (first: it lets Megatron run without a GPU)
import torch
import torch.distributed as dist
from dispatch_watch import DispatchWatch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.plugin import OBJECTIVES, RoutingReplay, StepLoss, TokenColumns, reduce_metrics  # megarl


def build(args: argparse.Namespace) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    config = TransformerConfig(**toy.model_fields(args))
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    chunks = []
    for stage in [None] if args.vpp is None else range(args.vpp):
        gpt = GPTModel(
            config,
            toy.layer_spec(config, stage),
            vocab_size=toy.VOCAB,
            max_sequence_length=toy.SEQ_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, **toy.named(stage)),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, **toy.named(stage)),
            position_embedding_type="rope",
            **toy.named(stage),
        )
        gpt.cuda(torch.cuda.current_device())
        chunks.append(DistributedDataParallel(config, ddp, gpt, disable_bucketing=bool(stage)))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def forward_step(data: Iterator[toy.Batch], model: torch.nn.Module, step_loss: Any = None) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    output = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )
    return output, partial(loss_func, batch, step_loss)


def loss_func(batch: toy.Batch, step_loss: Any, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    logprobs = -output  # [b, s]: with labels, the model returns their negative log-probabilities
    if step_loss is None:
        return logprobs.sum(), {"logprobs": logprobs.detach()}
    columns = TokenColumns.of_padded(logprobs, batch)  # megarl
    loss, statistics = step_loss(columns)  # megarl
    return loss, {"statistics": statistics}


def main() -> int:
    parser = toy.parser(__doc__)
    parser.add_argument("--replay", choices=("none", "r2", "r3"), default="r3")
    args = parser.parse_args()
    toy.join(args)
    chunks, optimizer = build(args)
    replay = RoutingReplay(chunks, min_agreement=0.0)  # megarl; 0.0 only because the toy's routes are random
    watch, batches, routes = DispatchWatch(chunks), [], []
    for step in range(args.steps):
        mini_batches = toy.sample(step)
        for micros in mini_batches:
            given = []  # megarl; stays empty for R2
            if args.replay == "r3":
                given = [replay.rows(b["routed_experts"], b["routed_mask"], b["tokens"]) for b in micros]  # megarl
            with replay.replay(given) if given else replay.record() as recording:  # megarl
                outputs = toy.forward_backward(forward_step, chunks, micros, forward_only=True)
            routes.append(given or recording.routes)  # megarl
            for batch, output in zip(micros, outputs, strict=False):  # only the last pipeline stage has outputs
                batch["old_logprobs"] = output["logprobs"]
            batches += micros
        for micros in mini_batches:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            step_loss = StepLoss.of(OBJECTIVES["minirl"], [batch["loss_mask"] for batch in micros])  # megarl
            weighted = partial(forward_step, step_loss=step_loss)  # megarl
            with nullcontext() if args.replay == "none" else replay.replay(routes.pop(0)):  # megarl; also backward
                losses = toy.forward_backward(weighted, chunks, micros, forward_only=False)
            _, grad_norm, _ = optimizer.step()
            metrics = reduce_metrics([one["statistics"] for one in losses])  # megarl
            if dist.get_rank() == 0:
                print(f"step {step}: loss {metrics['loss']:+.4f}, gradient norm {grad_norm:.4f}", flush=True)
    status = watch.report(batches, must_hold=None if args.replay == "none" else args.replay)
    toy.leave()
    return status


if __name__ == "__main__":
    sys.exit(main())
