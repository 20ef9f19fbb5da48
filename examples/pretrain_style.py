"""A script in the manner of Megatron-LM's pretrain_gpt.py, and the three lines that switch megarl on in it.

    python examples/pretrain_style.py --routing-replay r3
    torchrun --nproc-per-node 2 examples/pretrain_style.py --routing-replay r3 --expert-model-parallel-size 2

The lines are marked ``# megarl``; docs/megatron_lm.md says where they go in a fork. ``megatron.training`` is not on
PyPI, so the second half of this file replaces it: functions with the names of megatron/training/arguments.py and
training.py that do only what a training step needs. Arguments have Megatron-LM's names; those that the random rollouts
fix accept one value. Exits with 1 if replay did not hold, with 2 for arguments that forbid it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
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

from megarl.core.replay_blockers import replay_blockers
from megarl.plugin import OBJECTIVES, MicroRoutes, RoutingReplay, StepLoss, TokenColumns

# ---- pretrain_gpt.py ----


def add_megarl_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """An ``extra_args_provider``."""
    # StepLoss weighs each micro-batch alone: without a reference, and without facts of the whole mini-batch.
    by_itself = sorted(
        name
        for name, row in OBJECTIVES.items()
        if not (row.needs_ref_logprobs or row.needs_topk or row.router_shift_floor or row.beforehand)
    )
    group = parser.add_argument_group(title="megarl")
    group.add_argument("--routing-replay", choices=("none", "r2", "r3"), default="none")
    group.add_argument("--min-route-agreement", type=float, default=0.5)
    group.add_argument("--policy-objective", choices=by_itself, default="minirl")
    return parser


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
    args = get_args()
    config = core_transformer_config_from_args(args)
    return GPTModel(
        config,
        toy.layer_spec(config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )


def loss_func(
    batch: toy.Batch, step_loss: StepLoss | None, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Two values, not three: Megatron would divide the loss by a third one, the number of tokens, again."""
    logprobs = -output_tensor  # [b, s]
    if step_loss is None:
        return logprobs.sum(), {"logprobs": logprobs.detach()}
    columns = TokenColumns.of_padded(logprobs, batch)
    loss, _ = step_loss(columns)  # megarl 3
    return loss, {"policy loss": loss.detach().clone()}


def forward_step(
    data_iterator: Iterator[toy.Batch], model: torch.nn.Module, step_loss: StepLoss | None = None
) -> tuple[torch.Tensor, Any]:
    batch = next(data_iterator)
    output_tensor = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
    )
    return output_tensor, partial(loss_func, batch, step_loss)


# ---- megatron/training/arguments.py ----

FIXED = {
    "--num-layers": 4,
    "--num-experts": toy.EXPERTS,
    "--moe-router-topk": toy.TOPK,
    "--seq-length": toy.SEQ_LENGTH,
    "--micro-batch-size": toy.MICRO_BATCH_SIZE,
    "--padded-vocab-size": toy.VOCAB,
}
"""What the random rollouts are made for."""
NUMBERS = {
    "--hidden-size": 32,
    "--ffn-hidden-size": 64,
    "--moe-ffn-hidden-size": 32,
    "--num-attention-heads": 4,
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--num-layers-per-virtual-pipeline-stage": None,
    "--recompute-num-layers": None,
    "--train-iters": 2,
}
SWITCHES = (
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--moe-router-fusion",
    "--moe-router-force-load-balancing",
    "--overlap-moe-expert-parallel-comm",
    "--enable-cuda-graph",
    "--external-cuda-graph",
)


@cache
def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, value in FIXED.items():
        parser.add_argument(name, type=int, default=value, choices=[value])
    for name, default in NUMBERS.items():
        parser.add_argument(name, type=int, default=default)
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", choices=("uniform", "block"))
    parser.add_argument("--moe-router-dtype", choices=("fp32", "fp64"), default="fp32")
    parser.add_argument("--moe-token-dispatcher-type", choices=("allgather", "alltoall", "flex"), default="alltoall")
    parser.add_argument("--moe-router-load-balancing-type", nargs="+", default=["none"])
    parser.add_argument("--moe-expert-capacity-factor", type=float)
    parser.add_argument("--cuda-graph-impl", choices=("none", "local", "transformer_engine"), default="none")
    parser.add_argument("--moe-router-force-biased", type=float)  # from 0.17 on
    parser.add_argument("--moe-expert-rank-capacity-factor", type=float)  # from 0.18 on
    parser.add_argument("--mlp-chunks-for-training", type=int, default=1)  # from 0.18 on
    args = add_megarl_args(parser).parse_args()
    args.min_route_agreement = 0.0  # of the toy alone: its routes are random
    if args.routing_replay != "none":
        for blocker in replay_blockers(vars(args)):  # the names of arguments are those of the config's fields
            name = blocker.setting.replace("_", "-")
            parser.error(f"--{name}: --routing-replay {args.routing_replay} cannot hold, because {blocker.reason}")
    per_stage = args.num_layers_per_virtual_pipeline_stage
    stages = args.pipeline_model_parallel_size
    args.virtual_pipeline_model_parallel_size = per_stage and args.num_layers // stages // per_stage
    return args


def toy_layout(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size,
        ep=args.expert_model_parallel_size,
        recompute=args.recompute_granularity is not None,
    )


def core_transformer_config_from_args(args: argparse.Namespace) -> TransformerConfig:
    """Every field that has an argument of its name, as in Megatron-LM; the rest from the toy."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    found = {name: value for name, value in vars(args).items() if name in names}
    if len(args.moe_router_load_balancing_type) == 1:
        found["moe_router_load_balancing_type"] = args.moe_router_load_balancing_type[0]
    return TransformerConfig(**{**toy.model_fields(toy_layout(args)), **found, "num_moe_experts": args.num_experts})


# ---- megatron/training/training.py ----

Model = list[DistributedDataParallel]


def setup_model_and_optimizer(provider: Callable[..., GPTModel]) -> tuple[Model, MegatronOptimizer]:
    args, model = get_args(), []
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    chunks = args.virtual_pipeline_model_parallel_size
    for stage in [None] if chunks is None else range(chunks):
        gpt = provider(
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            vp_stage=stage,
        )
        gpt.cuda(torch.cuda.current_device())
        model.append(DistributedDataParallel(gpt.config, ddp, gpt, disable_bucketing=bool(stage)))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=args.lr, use_distributed_optimizer=args.use_distributed_optimizer), model
    )
    for chunk in model:  # each provider call made a config of its own
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def compute_old_logprobs(
    step: toy.Step, batches: list[toy.Batch], model: Model, replay: RoutingReplay | None
) -> list[MicroRoutes] | None:
    """Add ``old_logprobs`` to the batches; return the routes for the update, None for native routing.

    pretrain_gpt.py has no such pass, but loops for reinforcement learning do.
    """
    routes = None
    if replay is not None and get_args().routing_replay == "r3":
        columns = ("routed_experts", "routed_mask", "tokens")
        routes = [replay.rows(*(batch[name] for name in columns)) for batch in batches]
    alone = nullcontext() if replay is None else replay.record()
    with replay.replay(routes) if routes else alone as recording:  # megarl 2, for the pass of old_logprobs
        outputs = toy.forward_backward(step, model, batches, forward_only=True)
    for batch, output in zip(batches, outputs, strict=False):  # only the last pipeline stage has outputs
        batch["old_logprobs"] = output["logprobs"]
    return routes if recording is None or routes else recording.routes


def train_step(step: toy.Step, batches: list[toy.Batch], model: Model, optimizer: MegatronOptimizer) -> str:
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = toy.forward_backward(step, model, batches, forward_only=False)
    _, grad_norm, _ = optimizer.step()
    loss = torch.stack([one["policy loss"] for one in losses]).mean() if losses else torch.nan
    return f"loss {loss:+.4f}, gradient norm {grad_norm:.4f}"


def train(step: toy.Step, model: Model, optimizer: MegatronOptimizer) -> int:
    args = get_args()
    off = args.routing_replay == "none"
    replay = None if off else RoutingReplay(model, min_agreement=args.min_route_agreement)  # megarl 1
    watch, seen = DispatchWatch(model), []
    for iteration in range(args.train_iters):
        rollouts = toy.sample(iteration, args.policy_objective)
        routes_of = [compute_old_logprobs(step, batches, model, replay) for batches in rollouts]
        for batches, routes in zip(rollouts, routes_of, strict=True):
            objective, loss_masks = OBJECTIVES[args.policy_objective], [batch["loss_mask"] for batch in batches]
            step_loss = StepLoss.of(objective, loss_masks)  # megarl 3
            with replay.replay(routes) if replay else nullcontext():  # megarl 2
                line = train_step(partial(step, step_loss=step_loss), batches, model, optimizer)
            if dist.get_rank() == dist.get_world_size() - 1:
                print(f"step {iteration}: {line}", flush=True)
            seen += batches
    return watch.report(seen, must_hold=args.routing_replay if replay else None)


def pretrain(provider: Callable[..., GPTModel], step: toy.Step) -> int:
    toy.join(toy_layout(get_args()))
    model, optimizer = setup_model_and_optimizer(provider)
    status = train(step, model, optimizer)
    toy.leave()
    return status


if __name__ == "__main__":
    sys.exit(pretrain(model_provider, forward_step))
