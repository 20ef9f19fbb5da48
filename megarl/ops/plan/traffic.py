"""Bytes that a rank receives: from the engine, from the trainer's ranks, and in an update of the weights.

Every sequence counts at maximum length, so the amounts are upper limits.
"""

from dataclasses import dataclass
from math import comb

from megarl.config import Config, Layout
from megarl.config.gpu_defaults import settings
from megarl.engines.buckets import BUCKET_BYTES
from megarl.models.fit import wants_routes
from megarl.models.hf_files import bucket_bytes
from megarl.models.names import rules_of
from megarl.models.shapes import ModelShape
from megarl.ops.plan.engine_memory import cache_bytes_per_token, weight_bytes
from megarl.ops.plan.layout import RankCount, Stage, count_model
from megarl.ops.plan.trainer_memory import ELEMENT, cut_of, route_bytes, routed_rows, whole_bytes

REWARD_BYTES = 88
"""What all ranks know of a response: the columns of ``megarl.trainer.sampling.step_rollouts``."""
TOKEN_BYTES = 14
"""What the ranks of a model copy know of a token of a rollout, without its routes; with them a byte more."""
PLACEMENT_BYTES = 16
"""Number and length of a sequence whose routes a rank has or needs."""


@dataclass(frozen=True, slots=True)
class TraceSize:
    """Routes, bytes of one token."""

    memory: int  # in the trainer: L K entries, of one byte up to 256 experts, otherwise two
    wire_short: int  # from servers that megarl starts: base64 of L ceil(log2 C(E, K)) bits
    wire_long: int  # from other servers: base64 of int32 for every layer, dense layers included


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Of a whole step."""

    columns: int  # tokens and log-probabilities from the engines, 8 bytes a token, before JSON makes text of them
    routes: int  # from the engines, in transport form; 0 unless replayed, watched or written
    routes_per_rank: int
    """Received by one rank's routers from the ranks of the model copy, each of which samples a share."""
    rollouts_per_rank: int
    """Received by one rank from the ranks of the model copy; with routes also the places of routes."""
    rewards_per_rank: int
    """Of all responses, received by every rank; the only amount that grows with the number of ranks."""


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Received by one rank: the first two per optimizer step, the remaining per micro-batch, in both directions."""

    gradients: int  # to their shards
    gathered_weights: int  # updated, from their shards
    experts: int  # rows to experts and back, over ep and etp
    tensor: int  # sequence-parallel gathers and scatters
    pipeline: int  # hidden states from the stage before, gradients from the one behind
    context: int  # keys and values of other context-parallel ranks, with gradients


@dataclass(frozen=True, slots=True)
class SyncTraffic:
    """Of one update of the engine."""

    gathered: int  # received by a rank until every tensor has been whole there
    sent: int  # sent by the leader to each server: the weights in the engine's form
    tensors_at_once: int  # the largest thing that is gathered whole
    buckets: int  # at most


def trace_of(shape: ModelShape) -> TraceSize:
    """Bytes of a token's routes; all 0 for a dense model."""
    layers, experts, topk = len(shape.moe_layers), shape.num_experts, shape.topk
    if not layers:
        return TraceSize(0, 0, 0)
    bits = layers * (comb(experts, topk) - 1).bit_length()
    return TraceSize(
        memory=layers * topk * (1 if experts <= 256 else 2),
        wire_short=-(-bits // 6),
        wire_long=-(-4 * shape.num_layers * topk * 4 // 3),
    )


def step_traffic(config: Config, shape: ModelShape, layout: Layout, stage: Stage, longest: float) -> StepTraffic:
    """Return the traffic of a step whose sequences all have ``longest`` tokens."""
    responses, trace = config.responses_per_step, trace_of(shape)
    tokens = round(responses * longest)
    short = config.sglang.compact_routes and not config.sglang.urls
    routed, remote = wants_routes(config, shape), config.rollout.engine_kind.server
    of_step = config.train.mini_batches * route_bytes(config, shape, layout, stage)
    ranks, of_copy = layout.world_size // layout.dp, -(-responses // layout.dp)
    rollouts = round(of_copy * longest) * (TOKEN_BYTES + routed)
    placements = (ranks - 1) * (of_copy + of_copy // ranks) * PLACEMENT_BYTES if routed else 0
    return StepTraffic(
        columns=8 * tokens if remote else 0,
        routes=tokens * (trace.wire_short if short else trace.wire_long) if routed and remote else 0,
        routes_per_rank=_over(ranks, of_step) if routed else 0,
        rollouts_per_rank=_over(ranks, rollouts) + placements,
        rewards_per_rank=_over(layout.world_size, REWARD_BYTES * responses),
    )


def rank_traffic(config: Config, shape: ModelShape, layout: Layout, stage: Stage, count: RankCount) -> RankTraffic:
    """Of a rank of the stage, with full micro-batches."""
    element, hidden = ELEMENT[config.model.dtype], shape.fields["hidden_size"]
    once = _over(layout.dp * layout.cp, count.dense) + _over(layout.edp, count.expert)
    sharded = config.parallel.distributed_optimizer
    passes = 3 if config.recompute.granularity == "full" else 2  # forward, backward, and forward once more
    cut, moe = cut_of(config, layout), sum(layer in shape.moe_layers for layer in stage.layers)
    exchanged = _over(layout.ep, cut.rows * shape.topk) + _over(layout.etp, routed_rows(shape, cut))
    keys_and_values = cache_bytes_per_token(shape, element, layout.tp, expanded=True) // shape.num_layers
    crossings = len(stage.chunks) * 2 - stage.is_first - stage.is_last
    return RankTraffic(
        gradients=4 * once * (1 if sharded else 2),
        gathered_weights=element * once * _gathers(config, count) if sharded else 0,
        experts=passes * moe * (2 * element * hidden + 4) * exchanged,  # with the weight of each row's gate
        tensor=_over(layout.tp, cut.slots * _tensor_widths(shape, stage, element, passes)),
        pipeline=crossings * element * hidden * cut.rows if layout.pp > 1 else 0,
        context=passes * len(stage.layers) * (layout.cp - 1) * keys_and_values * cut.slots,
    )


def _gathers(config: Config, count: RankCount) -> int:
    """Number of gathers of the weights in an update: the optimizers of dense and expert weights each gather all
    weights."""
    beside_passes = settings(config, on_gpu=True, has_te=True).get("overlap_param_gather", False)
    return 1 if beside_passes or not count.expert else 2


def _tensor_widths(shape: ModelShape, stage: Stage, element: int, passes: int) -> int:
    """Bytes of a slot that sequence parallelism gathers and scatters in one micro-batch.

    Around attention, a dense MLP and shared experts: forward passes gather the input and scatter the output; a backward
    pass gathers the output's gradient and the input again, and scatters the input's gradient. The embedding scatters
    once and gathers once; the output layer likewise, in fp32.
    """
    fields, hidden = shape.fields, shape.fields["hidden_size"]
    inputs = outputs = 0
    for layer in stage.layers:
        if fields.get("multi_latent_attention"):
            inputs += (fields["q_lora_rank"] or hidden) + fields["kv_lora_rank"]
            outputs += hidden + fields["qk_pos_emb_head_dim"]
        else:
            inputs, outputs = inputs + hidden, outputs + hidden
        if layer not in shape.moe_layers or fields.get("moe_shared_expert_intermediate_size"):
            inputs, outputs = inputs + hidden, outputs + hidden
    ends = 2 * hidden * (element * stage.is_first + 4 * stage.is_last)
    return element * ((passes + 1) * inputs + passes * outputs) + ends


def sync_traffic(config: Config, shape: ModelShape, count: RankCount) -> SyncTraffic:
    """Return the traffic of one update of the weights; a rank receives all tensors that the rank does not hold."""
    element = ELEMENT[config.model.dtype]
    fp8 = config.rollout.engine_kind.server and config.sglang.fp8
    sent = weight_bytes(shape, ELEMENT[config.rollout.dtype], fp8=fp8)
    return SyncTraffic(
        gathered=max(0, element * (count_model(shape).total - count.total)),
        sent=sent if config.rollout.engine_kind.server else 0,
        tensors_at_once=max(whole_bytes(rule, shape, element, config.parallel.ep) for rule in rules_of(shape)),
        buckets=-(-2 * sent // bucket_bytes(count_model(shape).total, BUCKET_BYTES)),
    )


def _over(ranks: int, amount: int) -> int:
    """Amount received by one of ``ranks`` of an amount shared by all: (n - 1) / n."""
    return amount * (ranks - 1) // ranks
