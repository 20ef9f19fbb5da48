"""Checks of what a RoutingReplay and its blocks are given, before a router is asked."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter

from megarl.core.replay_blockers import replay_blockers
from megarl.errors import ReplayError, refusal
from megarl.files.hf_config import MoeShape
from megarl.replay.hooks import Hook
from megarl.replay.megatron_state import RELEASE
from megarl.replay.records import MicroRoutes
from megarl.routes.trace import describe_wrong_row

_COUNTS = ("num_layers", "num_experts", "topk")
MOST_EXPERTS = 1 << 15
"""Expert numbers are stored as int16, because torch does not index uint16 on every device."""
_CHOOSING = ("forward", "routing", "aux_loss_load_balancing", "seq_aux_loss_load_balancing")
"""Methods of TopKRouter on the way to the hook; the latter two are of 0.12 and 0.13."""
_KNOWN = ("TopKRouter", "InferenceTopKRouter")
"""Megatron's own classes; the second, from 0.17 on, routes as the first outside of Megatron's inference engine."""


def find_routers(chunk: Any, shape: MoeShape | None = None) -> list[TopKRouter]:
    """Routers of the decoder layers in layer order, without exempt layers; ReplayError if the router of another MoE
    layer does not call the hook, or that of an exempt layer does. shape: None reads Megatron's config.
    """
    decoder = getattr(chunk, "decoder", None)
    if decoder is None:
        raise ReplayError(f"{type(chunk).__name__} has no decoder; expected a Megatron GPTModel")
    found_routers = []
    planned = MoeShape.of_megatron(decoder.config) if shape is None and isinstance(chunk, GPTModel) else shape
    for layer in decoder.layers:
        modules, number = list(layer.modules()), getattr(layer, "layer_number", 0)
        routers = [module for module in modules if isinstance(module, TopKRouter)]
        is_exempt = planned is not None and number - 1 in planned.exempt_layers
        for router in routers:
            _check_choice(router, number - 1, is_exempt)
        if is_exempt:
            continue
        expected, reason = sum(isinstance(module, BaseMoELayer) for module in modules), "its MoE layers"
        if planned is not None:
            reason = f"moe_layer_freq = {layer.config.moe_layer_freq!r}" if shape is None else "the MoeShape"
            expected = int(number - 1 in planned.moe_layers)
        if len(routers) != expected:
            facts = {"layer": number - 1, "routers": len(routers), "expected": expected, "reason": reason}
            raise ReplayError(refusal("routers_of_layer", release=RELEASE, **facts))
        found_routers += routers
    return found_routers


def _check_choice(router: TopKRouter, layer: int, is_exempt: bool) -> None:
    """ReplayError if the router chooses experts by code that replay does not know, unless it is exempt, and must."""
    name, code = type(router).__name__, _find_choice(router)
    if code and not is_exempt:
        facts = {"layer": layer, "name": name, "code": code, "release": RELEASE, "owner": code.partition(".")[0]}
        raise ReplayError(refusal("router_not_checked", **facts))
    if is_exempt and not code:
        raise ReplayError(refusal("exempt_by_states", layer=layer, name=name))


def _find_choice(router: TopKRouter) -> str:
    """Name the code by which a router chooses experts without the hook; "" if it always asks the hook."""
    if getattr(router, "is_hash_layer", False):  # Megatron-LM's own routers with a table, from its main branch
        return "TopKRouter.is_hash_layer"
    for method in _CHOOSING:
        owner = next((kind for kind in type(router).__mro__ if method in vars(kind)), TopKRouter)
        is_known = owner.__module__ == TopKRouter.__module__ and owner.__name__ in _KNOWN
        if not is_known and not vars(owner).get("asks_router_replay"):
            return f"{owner.__name__}.{method}"
    return ""


def check_routers(routers: Sequence[Any]) -> None:
    """ReplayError if a router would not call the hook, is in an open block, or has the layer number of another."""
    layers = [router.layer_number - 1 for router in routers]
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        raise ReplayError(f"found two routers of layer {twice[0]}, expected one; make one RoutingReplay per model")
    for router in routers:
        config = router.config
        if not hasattr(router, "router_replay"):
            raise ReplayError(refusal("no_replay_hook", release=RELEASE))
        if (config.num_moe_experts or 0) > MOST_EXPERTS:
            raise ReplayError(f"{config.num_moe_experts} experts, expected at most {MOST_EXPERTS}: rows are 16 bits")
        for blocker in replay_blockers(vars(config)):
            value = getattr(config, blocker.setting, None)
            raise ReplayError(f"{blocker.setting} = {value!r}: replay cannot hold, because {blocker.reason}")
        hook = router.router_replay
        if isinstance(hook, Hook) and hook.log.is_open:
            raise ReplayError(f"layer {hook.layer}: another RoutingReplay is recording or replaying; close its block")


def fitting_shape(config: Any, shape: MoeShape | None) -> MoeShape:
    """Return ``shape``, or that of Megatron's config; ReplayError if they are of different models."""
    read = MoeShape.of_megatron(config)
    if shape is not None and any(getattr(shape, name) != getattr(read, name) for name in _COUNTS):
        counts = [{name: getattr(one, name) for name in _COUNTS} for one in (shape, read)]
        raise ReplayError(f"the MoeShape has {counts[0]}, expected {counts[1]} as Megatron's config")
    return shape or read


def check_chunks(chunks: Sequence[Any]) -> None:
    """ReplayError unless these are all model chunks of this rank, and of one model."""
    expected = getattr(chunks[0].config if chunks else None, "virtual_pipeline_model_parallel_size", None)
    if expected is None and parallel_state.model_parallel_is_initialized():
        expected = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if len(chunks) != (expected or 1):
        raise ReplayError(refusal("chunks_of_model", chunks=len(chunks), at_least=expected or 1, expected=expected))


def check_routes(label: str, routes: MicroRoutes | torch.Tensor, hooks: Sequence[Hook], recorded: bool) -> MicroRoutes:
    """The routes of a micro-batch, ``present`` on the host; ReplayError if they cannot be replayed.

    ``recorded``: the experts are not checked, which costs one pass over them. experts: [tokens, L_local, K].
    """
    micro_routes = MicroRoutes(routes) if isinstance(routes, torch.Tensor) else routes
    if not isinstance(micro_routes, MicroRoutes):
        raise ReplayError(f"{label}: routes are a {type(micro_routes).__name__}, expected MicroRoutes or a Tensor")
    experts, present, token_ids = micro_routes.experts, micro_routes.present, micro_routes.token_ids
    topk = {hook.topk for hook in hooks} or {*experts.shape[2:]}
    if experts.dim() != 3 or experts.size(1) != len(hooks) or experts.size(2) not in topk:
        facts = {"label": label, "shape": tuple(experts.shape), "layers": len(hooks), "most": max(topk, default="k")}
        raise ReplayError(refusal("shape_of_routes", **facts))
    if (gates := micro_routes.gates) is not None and (gates.shape != experts.shape or not gates.is_floating_point()):
        form = f"{gates.dtype} {list(gates.shape)}"
        raise ReplayError(f"{label}: gates are {form}, expected floating {list(experts.shape)} as of experts")
    if not _holds_integers(experts):
        raise ReplayError(f"{label}: experts are {experts.dtype}, expected integers; convert them before the block")
    for name, column in (("present", present), ("token_ids", token_ids)):
        if column is not None and tuple(column.shape) != (len(experts),):
            raise ReplayError(f"{label}: {name} of shape {tuple(column.shape)}, expected [{len(experts)}], one per row")
    if present is not None and present.dtype is not torch.bool:
        raise ReplayError(f"{label}: present is {present.dtype}, expected bool")
    if token_ids is not None and not _holds_integers(token_ids):
        raise ReplayError(f"{label}: token_ids are {token_ids.dtype}, expected integers")
    # The caller may overwrite its memory while the block is open, also by numpy, which torch does not notice.
    present, token_ids = (None if column is None else column.detach().clone() for column in (present, token_ids))
    present = None if present is None else present.cpu()
    if experts.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has few operations for these
        experts = experts.to(torch.int64)
    if not recorded and hooks:
        mask, layers = None if present is None else present.numpy(), [hook.layer for hook in hooks]
        if error_text := describe_wrong_row(experts.detach().cpu().numpy(), hooks[0].num_experts, mask, layers):
            raise ReplayError(f"{label}, {error_text}; mark a row that is missing as not present instead of filling it")
        if gates is not None and not bool(gates.detach().cpu()[... if present is None else present].isfinite().all()):
            raise ReplayError(f"{label}: gates are not finite in a row that is present, expected the engine's weights")
    return MicroRoutes(experts, present, token_ids, gates)


def _holds_integers(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
