"""slime's side of its hooks, written from the signatures at commit 624b824a and put in the place of the package.

``install`` makes the modules that ``megarl.adapters.slime`` imports. A checkout named by ``MEGARL_SLIME`` is used
instead: the same tests then run slime's own functions (its list of routes and ``train_one_step`` stay the driver's).
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.nn.functional import pad

from megarl.core.parallel import zigzag_indices
from megarl.stand_ins.attention import PackedSequences

Batch = dict[str, Any]
CHECKOUT = os.environ.get("MEGARL_SLIME")


def _slots(total: int) -> torch.Tensor:
    """int64: the positions of this rank in a sequence, which is padded to a multiple of 2 cp."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    padded = total if size == 1 else -(-total // (2 * size)) * 2 * size
    return zigzag_indices(torch.tensor([0, padded]), size, rank)


def _kept(total: int, response: int) -> torch.Tensor:
    """int64: the tokens of a response that this rank's logits predict, in the order of its slots."""
    token = _slots(total) + 1 - (total - response)
    return token[(token >= 0) & (token < response)]


def slice_log_prob_with_cp(column: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    return column[_kept(total_length, response_length)]


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    whole = tensor.new_zeros(response_length, *tensor.shape[1:])
    whole[_kept(total_length, response_length)] = tensor
    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
    return whole


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **_: Any,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    start, found = 0, []
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        slots = _slots(total)
        is_kept = (slots + 1 >= total - response) & (slots + 1 < total)
        own = logits[0, start : start + len(slots)][is_kept] / args.rollout_temperature
        found.append(own.log_softmax(-1).gather(1, tokens[slots[is_kept] + 1][:, None])[:, 0])
        start += len(slots)
    return torch.empty(0), {"log_probs": found}


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    lengths = list(zip(total_lengths, response_lengths, strict=True))
    masks = [mask[_kept(*pair)] for mask, pair in zip(loss_masks, lengths, strict=True)]
    denominators = sample_denoms if sample_denoms is not None else [mask.sum() for mask in loss_masks]

    def reduce(x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.split([len(mask) for mask in masks]), masks, denominators, strict=True)
        return sum((part * mask).sum() / (1 if calculate_per_token_loss else max(d, 1)) for part, mask, d in parts)  # type: ignore[return-value]

    return reduce


def loss_function(
    args: Namespace, batch: Batch, num_microbatches: int, step_global_batch_size: int, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """The dispatch of a custom loss, and the scale on top of it."""
    reducer = get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        batch["rollout_mask_sums"],
        args.calculate_per_token_loss,
    )
    module, _, name = args.custom_loss_function_path.rpartition(".")
    loss, log = getattr(importlib.import_module(module), name)(args, batch, logits, reducer)
    if args.calculate_per_token_loss:
        count = sum(mask.sum().clamp(min=1) for mask in batch["loss_masks"])
        return loss * parallel_state.get_context_parallel_world_size(), count, log  # type: ignore[return-value]
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return loss * num_microbatches / step_global_batch_size * ranks, torch.tensor(1), log


class RoutingReplay:
    """Routes of one router in a list; forward passes and recomputations each walk through it."""

    all_routing_replays: ClassVar[list[RoutingReplay]] = []
    is_on = True

    def __init__(self) -> None:
        self.top_indices_list: list[torch.Tensor] = []
        self.forward_index = self.backward_index = 0
        RoutingReplay.all_routing_replays.append(self)

    def get_replay_topk(self, scores: torch.Tensor, topk: int, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_on:
            return others[-1](scores, topk, *others[:-1])
        cursor = "forward_index" if torch._C._current_graph_task_id() == -1 else "backward_index"
        experts = self.top_indices_list[getattr(self, cursor)].long()
        setattr(self, cursor, getattr(self, cursor) + 1)
        return scores.gather(1, experts), experts

    @classmethod
    def clear_all(cls) -> None:
        for one in cls.all_routing_replays:
            one.top_indices_list, one.forward_index, one.backward_index = [], 0, 0


def call_hook(name: str, args: Namespace, model: Any, rollout_id: int, step_id: int) -> None:
    given = (model, "") if name == "before_log_prob" else (rollout_id, step_id, model, None, None)
    getattr(importlib.import_module("megarl.adapters.slime"), name)(args, *given)


def train_one_step(args: Namespace, model: Any, micros: Sequence[Batch], step_global_batch_size: int) -> None:
    """A step as slime runs it after its hook, up to the optimizer."""
    for chunk in model:
        chunk.zero_grad_buffer()
    dispatch = sys.modules["slime.backends.megatron_utils.loss"].loss_function

    def forward_step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        size = parallel_state.get_context_parallel_world_size()
        parts, bounds = [], [0]
        for tokens in batch["unconcat_tokens"]:
            slots = _slots(len(tokens))
            parts.append(pad(tokens, (0, size * len(slots) - len(tokens)))[slots])
            bounds.append(bounds[-1] + size * len(slots))
        ids = torch.cat(parts)[None]
        packing = PackedSequences.of(torch.tensor(bounds), size)
        logits = chunk(ids, torch.zeros_like(ids), None, packed_seq_params=packing)
        return logits, partial(dispatch, args, batch, len(micros), step_global_batch_size)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micros)],
        model=model,
        num_microbatches=len(micros),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )


def install() -> None:
    """Make the modules of slime, or import the checkout's."""
    for name in ("backends.megatron_utils.loss", "backends.megatron_utils.cp_utils", "utils.routing_replay"):
        if CHECKOUT and not name.startswith("utils"):
            sys.path.insert(0, CHECKOUT)
            importlib.import_module(f"slime.{name}")
            continue
        parts = f"slime.{name}".split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1])).__dict__.update(__path__=[])
        vars(sys.modules[f"slime.{name}"]).update(globals())
