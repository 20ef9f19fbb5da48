"""What the examples need besides a loop: ranks, layers that run without a GPU, random rollouts in place of an engine.

It uses megarl for three things: ``megarl.enable_cpu()`` and a norm that sequence parallelism accepts, so that Megatron
runs on a CPU, and the advantages of the objective. With a GPU and Transformer Engine, the first two do nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megarl

megarl.enable_cpu()  # before Megatron is imported; a GPU with Transformer Engine needs nothing of it

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.core.objectives import advantages_of
from megarl.stand_ins.attention import RMSNorm

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None

VOCAB, EXPERTS, TOPK = 64, 8, 2
MOE_LAYERS = (1, 2, 3)
"""0-based layers with experts, as the columns of a recorded trace have them; layer 0 is dense."""
SEQ_LENGTH, GROUP_SIZE, MICRO_BATCH_SIZE, MICRO_BATCHES, MINI_BATCHES = 16, 4, 2, 4, 2

Batch = dict[str, torch.Tensor]
Step = Callable[[Iterator[Batch], torch.nn.Module], tuple[torch.Tensor, Any]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Arguments of the layout, and the number of steps."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("tp", "pp", "ep"):
        found.add_argument(f"--{name}", type=int, default=1)
    found.add_argument("--vpp", type=int, help="model chunks per pipeline rank (interleaved schedule)")
    found.add_argument("--recompute", action="store_true", help="recompute every layer in the backward pass")
    found.add_argument("--steps", type=int, default=2)
    return found


def join(args: argparse.Namespace) -> None:
    """Make the process groups: torchrun's ranks, or one rank without torchrun. Exits with 2 if they do not fit."""
    ranks, needed = int(os.environ.get("WORLD_SIZE", "1")), args.tp * args.pp * args.ep
    if ranks % needed:
        start = f"torchrun --nproc-per-node {needed} {sys.argv[0]} ..."
        expected = f"expected a multiple of tp * pp * ep = {needed}: {start}"
        print(f"error: found {ranks} ranks, {expected}", file=sys.stderr)
        sys.exit(2)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp,
        expert_model_parallel_size=args.ep,
    )
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def leave() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def named(vp_stage: int | None) -> dict[str, int | None]:
    """The argument that names a virtual pipeline stage; Megatron-Core 0.12 has none and reads its parallel state."""
    if "vp_stage" in inspect.signature(GPTModel).parameters:
        return {"vp_stage": vp_stage}
    if vp_stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    return {}


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Transformer Engine's layers where it is installed, else Megatron's local ones."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=HAVE_TE, normalization=config.normalization, **named(vp_stage)
    )
    if not HAVE_TE:
        for layer in spec.layer_specs or []:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        spec.layer_norm = RMSNorm if spec.layer_norm else None
    return spec


def sample(step: int, objective: str = "minirl") -> list[list[Batch]]:
    """Random rollouts of this rank: mini-batches of micro-batches [b, s], with the advantages of the objective.

    Position ``t`` of every column is about ``labels[:, t]``, the token that follows ``tokens[:, t]``. Only the routes
    are about ``tokens[:, t]`` itself, because that token goes through the routers there.
    """
    source = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    return [_mini_batch(source, objective) for _ in range(MINI_BATCHES)]


def _mini_batch(source: torch.Generator, objective: str) -> list[Batch]:
    n, s = MICRO_BATCH_SIZE * MICRO_BATCHES, SEQ_LENGTH
    lengths = torch.randint(s // 2, s + 1, (n,), generator=source)
    position = torch.arange(s).expand(n, s)
    advantages = advantages_of(objective, torch.rand(n, generator=source), torch.arange(n) // GROUP_SIZE)
    tokens = torch.randint(1, VOCAB, (n, s), generator=source).where(position < lengths[:, None], 0)
    loss_mask = (position >= 3) & (position < lengths[:, None] - 1)  # four tokens of prompt
    scores = torch.rand(n, s, len(MOE_LAYERS), EXPERTS, generator=source)
    columns = {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "position_ids": position,
        "loss_mask": loss_mask,
        "rollout_logprobs": -torch.rand(n, s, generator=source) - 3.5,
        "advantages": advantages[:, None].expand(n, s),
        "routed_experts": scores.argsort(-1)[..., :TOPK].to(torch.uint8),  # [n, s, MoE layers, top-k]
        "routed_mask": position < lengths[:, None] - 1,  # engines have no row for the last token, nor for padding
        "is_token": position < lengths[:, None],
    }
    device = torch.cuda.current_device()
    micros: list[Batch] = [{} for _ in range(MICRO_BATCHES)]
    for name, column in columns.items():
        for batch, rows in zip(micros, column.contiguous().split(MICRO_BATCH_SIZE), strict=True):
            batch[name] = rows if name.startswith("routed") else rows.to(device)  # routes can stay on the host
    return micros


def forward_backward(step: Step, chunks: Sequence[Any], micros: list[Batch], forward_only: bool) -> list[Any]:
    """One call of Megatron's schedule; the outputs of ``step`` on the last pipeline stage."""
    for chunk in chunks:
        chunk.train(not forward_only)
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micros) for _ in chunks],
            model=chunks,
            num_microbatches=len(micros),
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=forward_only,
        )


def model_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig for the toy model and the layout."""
    cuda = torch.cuda.is_available()
    return {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 32,
        "moe_layer_freq": [int(layer in MOE_LAYERS) for layer in range(4)],
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": not cuda,
        "batch_p2p_comm": cuda,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": args.tp,
        "sequence_parallel": args.tp > 1,
        "pipeline_model_parallel_size": args.pp,
        "virtual_pipeline_model_parallel_size": args.vpp,
        "expert_model_parallel_size": args.ep,
        "recompute_granularity": "full" if args.recompute else None,
        "recompute_method": "uniform" if args.recompute else None,
        "recompute_num_layers": 1 if args.recompute else None,
    }
