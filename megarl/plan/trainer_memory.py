"""Memory of one rank of the trainer: states that stay, activations of a step, buffers of an engine update."""

from dataclasses import dataclass

from megarl.config import Config, Layout
from megarl.errors import ConfigError
from megarl.models.fit import wants_routes
from megarl.models.names import Rule, rules_of
from megarl.models.shapes import ModelShape
from megarl.plan.activations import ELEMENT, activation_bytes
from megarl.plan.layout import RankCount, Stage, count_rank, longest_sequence, numel

BUCKET_BYTES = 256 << 20
"""As in ``rollout.sglang.fleet``, and as much as ``megatron.hf_weights`` gathers of a layer's experts at once."""
_OPTIMIZER = {"optimizer": "adam", "use_precision_aware_optimizer": False, "optimizer_cpu_offload": False}
"""Fields of Megatron with the values that the formulas assume."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank of a pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int  # fp32 main weights (unless the weights are fp32) and Adam's two moments, after sharding
    reference: int  # weights of the reference policy; 0 unless the objective reads one
    activations: int  # what the micro-batches in flight keep for their backward passes
    working: int  # held for a moment: a recomputed unit and rows on their way, or what the output layer needs
    sync: int  # what gathering for the engine takes at most, and two buckets
    exchange: int  # routes of a mini-batch, sent and received, while ranks exchange them
    recorded: int  # routes that the old-log-prob pass recorded (r2), of all mini-batches of the step
    compared: int  # hidden states of a mini-batch, routed natively, with which the update compares its own
    host_routes: int  # routes of a step on the host: those that the rank sampled, those that its routers see

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def training(self) -> int:
        return self.states + self.activations + self.working + self.recorded + self.compared

    @property
    def peak(self) -> int:
        """Of a step or of an update of the engine, without what CUDA and NCCL take."""
        return max(self.training, self.states + self.sync, self.states + self.exchange)


def rank_memory(config: Config, shape: ModelShape, layout: Layout, stage: Stage, micro_batches: int) -> RankMemory:
    """Memory of a rank of the stage when a step has ``micro_batches`` full micro-batches."""
    count, element = count_rank(shape, layout, stage), ELEMENT[config.model.dtype]
    weights, gradients, optimizer = state_bytes(config, layout, count)
    kept, moment = activation_bytes(config, shape, layout, stage, micro_batches)
    routes, routed = route_bytes(config, shape, layout, stage), wants_routes(config, shape)
    rows, compares = _rows(config, layout), config.train.replay_bias_every > 0
    of_step, is_exchanged = routes * config.train.mini_batches, layout.tp * layout.cp * layout.pp > 1
    return RankMemory(
        stage=stage.rank,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=element * count.total if config.train.resolved_objective.needs_ref_logprobs else 0,
        activations=kept,
        working=moment,
        sync=gathered_bytes(shape, element, layout.ep) + (2 * BUCKET_BYTES if config.rollout.engine_kind.server else 0),
        exchange=2 * routes if routed and is_exchanged else 0,
        recorded=of_step if config.train.replay == "r2" else 0,
        compared=element * shape.fields["hidden_size"] * rows if compares and stage.is_last else 0,
        host_routes=2 * of_step if routed else 0,
    )


def route_bytes(config: Config, shape: ModelShape, layout: Layout, stage: Stage) -> int:
    """Routes of a mini-batch that one rank's routers see: rows L_local K, in one byte for each expert up to 256."""
    local = sum(layer in shape.moe_layers for layer in stage.layers)
    return _rows(config, layout) * local * shape.topk * (1 if shape.num_experts <= 256 else 2)


def _rows(config: Config, layout: Layout) -> int:
    """Tokens of a mini-batch that one rank's routers see, all sequences as long as they may be."""
    return layout.sequences_per_rank * longest_sequence(config) // (layout.cp * layout.tp)


def state_bytes(config: Config, layout: Layout, count: RankCount) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) of a rank, bytes: e P, 4 P, and 8 or 12 per parameter after sharding."""
    for key, value in _OPTIMIZER.items():
        if config.megatron.get(key, value) != value:
            raise ConfigError(
                f"megarl plan assumes Adam in fp32 on the GPU: found megatron.{key} = {config.megatron[key]!r}, "
                f"expected {value!r}; remove it for the plan"
            )
    element = ELEMENT[config.model.dtype]
    gradients = (4 if config.megatron.get("grad_reduce_in_fp32", True) else element) * count.total
    dense, expert = (layout.dp * layout.cp, layout.edp) if config.parallel.distributed_optimizer else (1, 1)
    optimizer = (8 if element == 4 else 12) * (-(-count.dense // dense) + -(-count.expert // expert))
    return element * count.total + 4 * count.buffers, gradients, optimizer


def gathered_bytes(shape: ModelShape, element: int, ep: int) -> int:
    """Bytes that an export holds, at most: the experts that are gathered at once twice, a dense parameter thrice."""
    # Gathered parts and their whole; of a dense parameter then also the Hugging Face tensors.
    return max((2 if rule.scope == "expert" else 3) * whole_bytes(rule, shape, element, ep) for rule in rules_of(shape))


def whole_bytes(rule: Rule, shape: ModelShape, element: int, ep: int) -> int:
    """Bytes of what an export gathers at once: a dense parameter, or experts of a layer up to ``BUCKET_BYTES``."""
    one = element * numel(rule, shape)
    return min(shape.num_experts * one, max(BUCKET_BYTES, ep * one)) if rule.scope == "expert" else one
