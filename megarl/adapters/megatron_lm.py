"""Routing replay in the training script of a Megatron-LM checkout, whose files stay as they are.

    from megatron.training import training  # in pretrain_gpt.py, before pretrain(...)
    from megarl.adapters.megatron_lm import add_arguments, with_replay

    training.get_forward_backward_func = with_replay(training.get_forward_backward_func)
    pretrain(..., extra_args_provider=add_arguments)

A batch of the data iterator then has ``routed_experts`` [b, s, L, K] and ``routed_mask`` [b, s] beside ``tokens``: all
MoE layers, on the first rank of every model copy. ``megatron.training`` looks the function up in its own module, so the
assignment is enough.
"""

from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megarl.errors import ReplayError, refuse_if
from megarl.replay import RoutingReplay
from megarl.replay.routing_replay import MIN_AGREEMENT
from megarl.verify import RoutingWatch

COLUMNS = ("routed_experts", "routed_mask", "tokens")
Get = Callable[..., Callable[..., Any]]


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--routing-replay``, ``--min-route-agreement`` and ``--watch-routes``. An ``extra_args_provider``."""
    group = parser.add_argument_group(title="megarl")
    group.add_argument("--routing-replay", choices=("none", "r3"), default="none")
    group.add_argument("--min-route-agreement", type=float, default=MIN_AGREEMENT, help="0 switches the check off")
    group.add_argument("--watch-routes", action="store_true", help="compare at the dispatchers where tokens went")
    return parser


def with_replay(get_forward_backward_func: Get) -> Get:
    """Return the function that gives Megatron's schedule, with replay of the routes that its batches have.

    Passes of training need routes. Forward-only passes replay where their batches have routes, as those of old
    log-probabilities, and route natively without, as evaluation. A re-run of Megatron's rerun machine replays the same
    routes. ReplayError before the optimizer steps, if a route was not used once, or with ``--watch-routes`` if a token
    went to other experts.
    """
    replays: dict[int, RoutingReplay] = {}

    def run(schedule: Any, *, model: Any, data_iterator: Any, num_microbatches: int, **others: Any) -> Any:
        from megatron.training.global_vars import get_args  # pyright: ignore[reportMissingImports]

        args, chunks = get_args(), model if isinstance(model, list) else [model]
        others |= {"model": model, "num_microbatches": num_microbatches}
        if args.routing_replay == "none":
            return schedule(data_iterator=data_iterator, **others)
        data_iterator, columns = _read(data_iterator, num_microbatches)
        refuse_if(not columns and not others.get("forward_only"), ReplayError, "no_routes", columns=list(COLUMNS))
        if not columns:
            return schedule(data_iterator=data_iterator, **others)
        if id(chunks[0]) not in replays:
            replays[id(chunks[0])] = RoutingReplay(chunks, min_agreement=args.min_route_agreement)
        replay = replays[id(chunks[0])]
        routes = [replay.rows(*one) for one in columns]
        with RoutingWatch(chunks, on=args.watch_routes) as watch, replay.replay(routes):
            result = schedule(data_iterator=data_iterator, **others)
        watch.report(routes).require()
        return result

    return lambda *given, **named: partial(run, get_forward_backward_func(*given, **named))


def _read(data_iterator: Any, num_microbatches: int) -> tuple[Any, list[Any]]:
    """Return the iterator of a pass with its batches ahead, and their COLUMNS; collective for the ranks of a copy.

    data_iterator: None on ranks that read no data, or a list with one for each model chunk. No columns without routes.
    """
    group = parallel_state.get_model_parallel_group()
    found: list[Any] = [[]]
    if dist.get_rank(group) == 0:
        chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        batches = [next(chunks[0]) for _ in range(num_microbatches)]
        has_routes = all("routed_experts" in batch for batch in batches)
        found = [[tuple(batch[name] for name in COLUMNS) for batch in batches] if has_routes else []]
        ahead = [iter(batches), *chunks[1:]]
        data_iterator = ahead if isinstance(data_iterator, list) else ahead[0]
    dist.broadcast_object_list(found, src=dist.get_process_group_ranks(group)[0], group=group)
    return data_iterator, found[0]
