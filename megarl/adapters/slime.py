"""Rows of ``OBJECTIVES`` and the routing watch in slime and miles, by their hooks.

    # megarl.yaml
    megarl_objective: minirl

    --custom-config-path megarl.yaml --loss-type custom_loss --custom-loss-function-path megarl.adapters.slime.loss
    --custom-megatron-init-path megarl.adapters.slime.init
    --custom-megatron-before-train-step-hook-path megarl.adapters.slime.before_train_step
    --custom-megatron-before-log-prob-hook-path megarl.adapters.slime.before_log_prob

``loss`` leaves every division to the stack: to its ``sum_of_sample_mean``, and to its number of rollouts or tokens. The
stack's function gives the log-probabilities, so temperature, top-p and parallelism are the stack's. Neither stack has a
hook after a step: a watched step is reported, and raises, when the next hook is called.
"""

import logging
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megarl.adapters.columns import find_row, token_columns, token_losses, undivided
from megarl.core.choices.parts import Objective
from megarl.errors import ConfigError, ReplayError, refuse_if
from megarl.replay.records import MicroRoutes
from megarl.verify import RoutingWatch

MODULES = {
    "slime": ("backends.megatron_utils.loss", "backends.megatron_utils.cp_utils", "utils.routing_replay"),
    "miles": ("backends.training_utils.loss_hub.losses", "backends.training_utils.cp_utils", "utils.replay_base"),
}
"""By stack: its modules of log-probabilities, of context parallelism, and of lists of routes."""
COLUMNS = {"old_logprobs": "log_probs", "rollout_logprobs": "rollout_log_probs", "ref_logprobs": "ref_log_probs"}
DIVIDES = {False: ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"), True: ("token-mean",)}
"""Aggregations served, by ``calculate_per_token_loss``: the stack divides by rollouts, or by tokens."""
_open: list[tuple[RoutingWatch, list[tuple[Any, list[Tensor], int]]]] = []
"""The watch of the running step; for each router the stack's list of routes, and where the step begins in it."""


def init(args: Namespace) -> None:
    """Refuse a row before the model is built. A custom init function."""
    _find_row(args)


def loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the row ``args.megarl_objective`` for a micro-batch. A custom loss function.

    logits: fp32 [1, T, V] of this rank. batch: lists with one entry per response; mu is ``rollout_log_probs``, old is
    ``log_probs``. Under context parallelism both, and the advantages, are this rank's slices. ConfigError for a row
    that this batch or ``calculate_per_token_loss`` cannot serve.
    """
    row, module = _find_row(args), _module(0)
    named = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    if hasattr(module, "get_rollout_top_p_logprob_kwargs"):
        named |= module.get_rollout_top_p_logprob_kwargs(args, batch)
    found = module.get_log_probs_and_entropy(logits, args=args, **named)
    local = (found[1] if isinstance(found, tuple) else found)["log_probs"]
    columns = {name: batch[key] for name, key in COLUMNS.items() if batch.get(key)}
    values = _coefficients(row, batch, logprobs=local, advantages=batch["advantages"], **columns)
    losses = token_losses(values, torch.cat(local))
    # The mean over the tokens of a rollout, or of the step, is the stack's.
    is_mean = row.aggregation.endswith("-mean")
    total = sum_of_sample_mean(losses) if is_mean else losses.sum() / (row.norm_length or 1)
    metrics = {"loss": total.detach().clone(), "megarl/trained": sum_of_sample_mean((values != 0).float())}
    return total + 0 * logits.sum(), metrics  # a rank without a token of a response takes part in the backward pass


def tis(args: Namespace, *, pg_loss: Tensor, **batch: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Weigh and mask the stack's own loss, [T] of this rank, by the old/mu parts of the row. A custom TIS function.

    Denominators stay the stack's. ConfigError for a row without such parts, or whose parts depend on the advantage.
    """
    row, old = find_row(args.megarl_objective, _stack()), batch["train_log_probs"]
    masks, factors = (tuple(p for p in kind if p.policies == "old_mu") for kind in (row.records, row.factors))
    if not masks + factors or any(part.sign != "both" for part in masks + factors):
        raise ConfigError(f"{_stack()}: {args.megarl_objective!r} has no old/mu part that ignores the advantage")
    part = replace(row, masks=masks, factors=factors, gate=None, penalties=(), prefix_grad=False)
    columns = {"logprobs": old, "old_logprobs": old, "rollout_logprobs": batch["rollout_log_probs"]}
    values = _coefficients(part, batch, **columns, advantages=[torch.ones_like(one) for one in old])
    return pg_loss * values, batch["loss_masks"], {"megarl/tis": values, "megarl/tis_kept": (values != 0).float()}


def before_train_step(args: Namespace, rollout_id: int, step_id: int, model: Any, *_: Any) -> None:
    """Report on the step before, and watch this one. A custom before-train-step hook.

    The expected routes are those that the stack put into its own lists. ``args.megarl_watch_every`` (default 1): watch
    every n-th rollout. ReplayError, on all ranks, if a rank's tokens went to other experts in the step before.
    """
    finish()
    if rollout_id % getattr(args, "megarl_watch_every", 1) == 0:
        module = _module(2)
        manager = getattr(module, "routing_replay_manager", None)  # of miles
        replays = manager.replays if manager else module.RoutingReplay.all_routing_replays
        if not replays or not all(replay.top_indices_list for replay in replays):
            raise ReplayError(f"{_stack()} has no routes for this step, so nothing can be proven: replay is off")
        starts = [(replay, replay.top_indices_list, replay.forward_index) for replay in replays]
        _open.append((RoutingWatch(model).__enter__(), starts))


def before_log_prob(args: Namespace, model: Any, store_prefix: str) -> None:
    """Report on the last step of the rollout before. A custom before-log-prob hook."""
    finish()


def finish() -> None:
    """Report on the watched step, if any; a collective call of all ranks. ReplayError as in ``before_train_step``."""
    if not _open:
        return
    watch, starts = _open.pop()
    watch.__exit__(None, None, None)
    replay, routes, start = starts[0]
    is_running = replay.top_indices_list is routes and replay.forward_index > start
    stop = replay.forward_index if is_running else len(routes)  # after the last step of a rollout the list is new
    experts = [torch.stack([routes[micro] for _, routes, _ in starts], 1) for micro in range(start, stop)]
    # miles marks padding with -1.
    report = watch.report([MicroRoutes(one.clamp(min=0), (one >= 0).flatten(1).all(1)) for one in experts])
    logging.getLogger(__name__).info("%s", report)
    num_wrong = torch.tensor(int(not report.is_right), device="cuda" if torch.cuda.is_available() else "cpu")
    torch.distributed.all_reduce(num_wrong)
    report.require()
    refuse_if(num_wrong.item(), ReplayError, "wrong_on_other_ranks", num_wrong=num_wrong.item())


def _stack() -> str:
    for stack in MODULES:
        if stack in sys.modules:
            return stack
    raise ConfigError("neither slime nor miles is imported in this process, expected to be called by their trainer")


def _module(index: int) -> Any:
    return import_module(f"{_stack()}.{MODULES[_stack()][index]}")


def _find_row(args: Namespace) -> Objective:
    if getattr(args, "qkv_format", "thd") != "thd" or not hasattr(args, "megarl_objective"):
        raise ConfigError(f"{_stack()}: expected megarl_objective in the file of --custom-config-path, and thd")
    return find_row(args.megarl_objective, _stack(), DIVIDES[args.calculate_per_token_loss])


def _coefficients(row: Objective, batch: dict[str, Any], **columns: Sequence[Tensor]) -> Tensor:
    """Return the coefficients of this rank's tokens, not divided; columns by response, as this rank has them."""
    cp, (total_lengths, lengths) = _module(1), (batch["total_lengths"], batch["response_lengths"])
    whole = [  # one exchange for each response, with its columns side by side
        cp.all_gather_with_cp(torch.stack([part.detach().to(parts[0]) for part in parts], -1), total, length)
        for total, length, *parts in zip(total_lengths, lengths, *columns.values(), strict=True)
    ]
    packed = dict(zip(columns, torch.cat(whole).detach().unbind(-1), strict=True))
    bounds, mask = torch.tensor([0, *lengths], device=whole[0].device).cumsum(0), torch.cat(batch["loss_masks"])
    given = token_columns(row, _stack(), cu_seqlens=bounds, loss_mask=mask, **packed)
    values = undivided(row, given, by_token=True).values.split(lengths)
    return torch.cat([cp.slice_log_prob_with_cp(*one) for one in zip(values, total_lengths, lengths, strict=True)])
