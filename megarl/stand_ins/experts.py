"""Computes all experts of a layer together: two matrix products per expert, and one activation for all experts.

Without Transformer Engine, Megatron calls one MLP per expert. For small experts, Python and new memory for results take
most of the time. The products here are equal bit for bit. torch's ``_grouped_mm`` takes as long, needs the weights of a
layer in one tensor, and is missing in some releases of torch. Weights stay separate parameters, so checkpoints have the
same names.
"""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


def join_experts(model: torch.nn.Module, adds_gradients: bool) -> None:
    """Let the layers of a model compute their experts together, where each expert is a plain MLP without biases.

    adds_gradients: add the weights' gradients to Megatron's buffer at once, past the hooks that say when each is ready.
    """
    for module in model.modules():
        if isinstance(module, SequentialMLP) and len(module.local_experts) > 1 and _is_plain(module.config):
            layers = {name: _Layer(module, name, adds_gradients) for name in ("linear_fc1", "linear_fc2")}
            common = {name: getattr(module.local_experts[0], name) for name in ("config", "activation_func")}
            vars(module)["forward"] = partial(_forward, module.forward, SimpleNamespace(**common, **layers))


def _is_plain(config: Any) -> bool:
    special = ("add_bias_linear", "moe_apply_probs_on_input", "fp8", "fp4", "gradient_accumulation_fusion")
    return not any(getattr(config, name, None) for name in special)  # fp4 is a field from 0.15 on


def _forward(one_by_one: Any, mlp: Any, hidden: Tensor, counts: Tensor, probs: Tensor, **options: Any) -> Any:
    """``SequentialMLP.forward``: hidden [T, H] and probs [T] in the order of the experts, counts [E] on the host."""
    layers: tuple[_Layer, ...] = (mlp.linear_fc1, mlp.linear_fc2)
    # Megatron's hooks gather the weights of a module on a call, so call each module.
    if any(linear._forward_pre_hooks for layer in layers for linear in layer.parts):
        return one_by_one(hidden, counts, probs, **options)
    for layer in layers:
        layer.sizes = counts.tolist()
    return MLP.forward(mlp, hidden, probs)


class _Layer(torch.nn.Module):
    """One of the two linear layers, of all experts. The weights stay with the experts."""

    def __init__(self, experts: SequentialMLP, name: str, adds: bool) -> None:
        super().__init__()
        self.parts = tuple(getattr(expert, name) for expert in experts.local_experts)  # torch registers no tuples
        self.adds, self.sizes = adds, [0]

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return _Products.apply(rows, self.sizes, self.adds, *(linear.weight for linear in self.parts)), None


class _Products(torch.autograd.Function):
    """``rows[of expert e] @ weights[e].T``: [T, in], sizes of E consecutive shares of the rows, E x [out, in]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], adds: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        ctx.sizes, ctx.adds = sizes, adds
        out = rows.new_empty(len(rows), len(weights[0]))
        for expert_rows, weight, into in zip(rows.split(sizes), weights, out.split(sizes), strict=True):
            torch.mm(expert_rows, weight.t(), out=into)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        of_outputs = gradients[0].split(ctx.sizes)
        of_rows: Tensor | None = None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_rows = torch.empty_like(rows)
            for gradient, weight, into in zip(of_outputs, weights, of_rows.split(ctx.sizes), strict=True):
                torch.mm(gradient, weight, out=into)
        if any(ctx.needs_input_grad[3:]):
            sums: Sequence[Any] = [getattr(weight, "main_grad", None) for weight in weights]
            # Without a buffer of this precision, autograd adds the gradients.
            if not (ctx.adds and all(into is not None and into.dtype == rows.dtype for into in sums)):
                sums = of_weights = rows.new_zeros(len(weights), *weights[0].shape).unbind()
            trains = ctx.needs_input_grad[3:]
            for gradient, expert_rows, into, is_wanted in zip(
                of_outputs, rows.split(ctx.sizes), sums, trains, strict=True
            ):
                if is_wanted:
                    into.addmm_(gradient.t(), expert_rows)
        return of_rows, None, None, *of_weights
