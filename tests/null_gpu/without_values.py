"""Lets a training step run at real size on a device whose kernels leave no values: shapes, not results.

Where a shape follows from values, they are given: routers choose experts in turn, and every rank has the same counts.
Compiled functions and cuDNN's attention allocate what they return and nothing else. Call ``install`` before Megatron
and Transformer Engine are imported, then ``balance_routes``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map_only

LONG = 4096


def install() -> None:
    """Replace torch.compile, Triton's launches and TE's cuDNN calls."""
    torch.compile = _only_outputs
    jit = importlib.import_module("triton.runtime.jit")
    jit.JITFunction.run = lambda *_, **__: None
    importlib.import_module("triton.runtime.autotuner").Autotuner.run = lambda *_, **__: None
    importlib.import_module("transformer_engine.pytorch")
    extension: Any = importlib.import_module("transformer_engine_torch")
    extension.fused_attn_fwd, extension.fused_attn_bwd = _attend, _attend_backward
    extension.get_fused_attn_backend = lambda *_: extension.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


def _only_outputs(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """A compiled function: one kernel, whose intermediate values are never in memory."""
    if function is None:
        return _only_outputs

    def run(*arguments: Any, **named: Any) -> Any:
        given = (arguments, named)
        if tree_any(_is_state, given):
            return function(*arguments, **named)
        device = torch.device("cuda", torch.cuda.current_device())
        arguments, named = tree_map_only(torch.Tensor, lambda x: x.to("meta"), given)
        made = function(*arguments, **named)
        return tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device=device), made)

    return run


def _is_state(argument: Any) -> bool:
    """A module, whose buffers the function may change, or a tensor that autograd follows or that has no storage."""
    if isinstance(argument, torch.Tensor):
        return argument.is_meta or (argument.requires_grad and torch.is_grad_enabled())
    return isinstance(argument, torch.nn.Module)


def _attend(*arguments: Any) -> list[torch.Tensor]:
    """Output [T, heads, d_v], fp32 statistics [T, heads, 1], state of the generator, as TE's ``fused_attn_fwd``."""
    query, value = arguments[13], arguments[15]
    tokens, heads = query.shape[:2]
    output = query.new_empty(tokens, heads, value.size(-1))
    statistics = torch.empty(tokens, heads, 1, dtype=torch.float32, device=query.device)
    return [output, statistics, torch.empty(2, dtype=torch.int64, device=query.device)]


def _attend_backward(*arguments: Any) -> list[Any]:
    return [*(torch.empty_like(each) for each in arguments[13:16]), None, None]


def balance_routes(top_k: int) -> None:
    """Experts in turn for every row: Megatron's routers, what its dispatcher reads back, and ``masked_select``."""
    dispatchers = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher = dispatchers.MoEAlltoAllTokenDispatcher
    preprocess = dispatcher.preprocess

    def with_counts(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        per_expert = preprocess(self, routing_map)
        rows, experts = routing_map.shape
        counts = torch.full((experts,), rows * top_k // experts)
        counts[: rows * top_k % experts] += 1
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        here, ranks = counts[first:last], self.ep_size * self.tp_size
        per_expert.copy_(here * ranks)
        if ranks > 1:
            self.input_splits.copy_(counts.reshape(self.ep_size, -1).sum(1))
            self.output_splits.fill_(0).copy_(here.sum().expand(self.ep_size))
            self.output_splits_tp.copy_((here.sum() * self.ep_size).expand(self.tp_size))
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert.copy_(here.expand(ranks, -1))
        return per_expert

    dispatcher.preprocess = with_counts


class Observed(TorchDispatchMode):
    """Gives ``masked_select`` the size that balanced routes have."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self._top_k = top_k

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if operation is torch.ops.aten.masked_select.default:
            source, mask = arguments
            return source.new_empty(mask.size(1) * self._top_k)
        if operation is torch.ops.aten.index.Tensor:
            source, indices = arguments
            arguments = source, [each if each is None else _positions(each) for each in indices]
        result = operation(*arguments, **(named or {}))
        if operation.namespace == "aten" and not operation._schema.is_mutable and _is_index(result):
            _compute(operation, arguments, named or {}, result)
        return result


def _positions(index: torch.Tensor) -> torch.Tensor:
    """A mask [n] that was copied from the host, as the positions of its ones."""
    return index.cpu().nonzero()[:, 0].to(index.device) if index.dtype is torch.bool else index


def _is_index(tensor: Any) -> bool:
    """Whether it is a short column of integers, such as the bounds of sequences, which shapes are made from."""
    return (
        isinstance(tensor, torch.Tensor) and tensor.is_cuda and not tensor.is_floating_point() and tensor.numel() < LONG
    )


def _compute(operation: Any, arguments: Any, named: dict[str, Any], result: torch.Tensor) -> None:
    """Give a result the value that it has on a CPU, if it is made of indices only."""
    given = [each for each in tree_leaves((arguments, named)) if isinstance(each, torch.Tensor)]
    if given and all(map(_is_index, given)):
        on_host = tree_map_only(torch.Tensor, torch.Tensor.cpu, arguments)
        result.copy_(operation(*on_host, **{**named, **({"device": "cpu"} if "device" in named else {})}))
