"""Memory of one rank of the trainer: states that stay, activations of a step, buffers of an engine update.

Activations are those that megarl's local layers save for the backward pass. e is the size of an element of the training
dtype, H the hidden size, S the slots of a micro-batch on this rank (a share of 1/cp), S' = S / tp under sequence
parallelism. Transformer Engine and fused kernels save less, and other things.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megarl.config import Config, Layout
from megarl.errors import ConfigError
from megarl.megatron.passes.logprobs import COLUMNS, ROWS
from megarl.models.fit import wants_routes
from megarl.models.names import rules_of
from megarl.models.shapes import ModelShape
from megarl.plan.layout import RankCount, Stage, count_rank, longest_sequence, numel

ELEMENT = {"fp32": 4, "bf16": 2}
"""Bytes of a dtype of the configuration."""
BUCKET_BYTES = 256 << 20
"""As in ``rollout.sglang.fleet``."""
_OPTIMIZER = {"optimizer": "adam", "use_precision_aware_optimizer": False, "optimizer_cpu_offload": False}
"""Fields of Megatron with the values that the formulas assume."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank sees of a micro-batch."""

    slots: int  # S: token slots of the micro-batch on this context-parallel rank
    element: int  # e: bytes of a weight and an activation, 2 or 4
    tp: int = 1
    etp: int = 1
    cp: int = 1

    @property
    def rows(self) -> int:
        """S': slots that norms, routers and residuals of this rank see."""
        return self.slots // self.tp


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank of a pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int  # fp32 main weights (unless the weights are fp32) and Adam's two moments, after sharding
    reference: int  # weights of the reference policy; 0 unless the objective reads one
    activations: int  # what the micro-batches in flight keep for their backward passes
    working: int  # short-lived: a recomputed unit and gradients of its rows, or what the output layer needs
    sync: int  # what gathering for the engine takes at most, and two buckets
    exchange: int  # routes of a mini-batch, sent and received, while ranks exchange them
    recorded: int  # routes that the old-log-prob pass recorded (r2), of all mini-batches of the step
    host_routes: int  # routes of a step on the host: those that the rank sampled, those that its routers see

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def training(self) -> int:
        return self.states + self.activations + self.working + self.recorded

    @property
    def peak(self) -> int:
        """Of a step or of an update of the engine, without what CUDA and NCCL take."""
        return max(self.training, self.states + self.sync, self.states + self.exchange)


def rank_memory(config: Config, shape: ModelShape, layout: Layout, stage: Stage, micro_batches: int) -> RankMemory:
    """Memory of a rank of the stage when a step has ``micro_batches`` full micro-batches."""
    count, element = count_rank(shape, layout, stage), ELEMENT[config.model.dtype]
    weights, gradients, optimizer = state_bytes(config, layout, count)
    kept, unit = activation_bytes(config, shape, layout, stage, micro_batches)
    routes, routed = route_bytes(config, shape, layout, stage), wants_routes(config, shape)
    of_step, is_exchanged = routes * config.train.mini_batches, layout.tp * layout.cp * layout.pp > 1
    return RankMemory(
        stage=stage.rank,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=element * count.total if config.train.resolved_objective.needs_ref_logprobs else 0,
        activations=kept,
        working=max(unit + _row_gradients(config, shape, layout, stage), _head(config, shape, layout, stage)),
        sync=element * gathered_elements(shape) + (2 * BUCKET_BYTES if config.rollout.engine_kind.server else 0),
        exchange=2 * routes if routed and is_exchanged else 0,
        recorded=of_step if config.train.replay == "r2" else 0,
        host_routes=2 * of_step if routed else 0,
    )


def route_bytes(config: Config, shape: ModelShape, layout: Layout, stage: Stage) -> int:
    """Routes of a mini-batch that one rank's routers see: rows L_local K, in one byte for each expert up to 256."""
    rows = layout.sequences_per_rank * longest_sequence(config) // (layout.cp * layout.tp)
    local = sum(layer in shape.moe_layers for layer in stage.layers)
    return rows * local * shape.topk * (1 if shape.num_experts <= 256 else 2)


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


def activation_bytes(
    config: Config, shape: ModelShape, layout: Layout, stage: Stage, micro_batches: int
) -> tuple[int, int]:
    """(kept by layers for the backward passes, one recomputed unit), bytes; without ``head_bytes`` of the last."""
    cut = cut_of(config, layout)
    kept, units = zip(*(_chunk_bytes(config, shape, cut, chunk) for chunk in stage.chunks), strict=True)
    return sum(kept) * in_flight(layout, stage.rank, micro_batches) // len(kept), max(units)


def in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """The most forward passes of a stage's chunks that wait for their backward pass at once.

    1F1B: min(pp - p, m). Interleaved: min(2 (pp - p - 1) + (vpp - 1) pp + 1, m vpp).
    """
    if layout.vpp is None:
        return min(layout.pp - stage, micro_batches)
    ahead = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1
    return min(ahead, micro_batches * layout.vpp)


def _chunk_bytes(config: Config, shape: ModelShape, cut: Cut, layers: tuple[int, ...]) -> tuple[int, int]:
    """(kept, largest recomputed unit) of one micro-batch in one model chunk."""
    recompute = config.recompute
    if recompute.granularity != "full":
        modules = recompute.modules if recompute.modules is not None else ["core_attn"]
        chosen = modules if recompute.granularity == "selective" else []
        return sum(layer_bytes(shape, layer, cut, chosen) for layer in layers), 0
    of_layers, size = [layer_bytes(shape, layer, cut) for layer in layers], recompute.num_layers or 1
    if recompute.method == "uniform":
        units = [sum(of_layers[start : start + size]) for start in range(0, len(layers), size)]
        return len(units) * input_bytes(shape, cut), max(units, default=0)
    units, rest = of_layers[:size], of_layers[size:]
    return len(units) * input_bytes(shape, cut) + sum(rest), max(units, default=0)


def cut_of(config: Config, layout: Layout) -> Cut:
    """A full micro-batch: train.micro_batch_tokens slots on each context-parallel rank.

    Fewer where a mini-batch brings a rank no more than that, with all sequences as long as they may be.
    """
    slots = config.train.micro_batch_tokens
    if config.sampling.fixed:
        whole = -(-layout.sequences_per_rank * longest_sequence(config) // layout.cp)
        slots = min(slots, -(-whole // layout.tp) * layout.tp)
    return Cut(slots, ELEMENT[config.model.dtype], layout.tp, layout.etp, layout.cp)


def _row_gradients(config: Config, shape: ModelShape, layout: Layout, stage: Stage) -> int:
    """Gradients of the widest rows of a layer: e (2 H + 3 width) for each routed row. Computed, not measured."""
    cut, fields = cut_of(config, layout), shape.fields
    if any(layer in shape.moe_layers for layer in stage.layers):
        width, rows = 3 * (fields["moe_ffn_hidden_size"] // cut.etp), routed_rows(shape, cut)
    else:
        width, rows = 3 * fields["ffn_hidden_size"] // cut.tp, cut.slots
    return cut.element * (2 * fields["hidden_size"] + width) * rows


def _head(config: Config, shape: ModelShape, layout: Layout, stage: Stage) -> int:
    """``head_bytes``, gradients of hidden states and output layer, rows of that in fp32, three blocks of logits."""
    if not stage.is_last:
        return 0
    cut, hidden = cut_of(config, layout), shape.fields["hidden_size"]
    gradients = 4 * hidden * cut.slots + -(-shape.vocab_size // cut.tp) * hidden * cut.element
    return head_bytes(shape, cut) + gradients + 8 * hidden * COLUMNS + 3 * 4 * ROWS * COLUMNS


def gathered_elements(shape: ModelShape) -> int:
    """Elements that an export holds, at most: a layer's experts of one kind twice, a dense parameter thrice."""
    # Gathered parts and their whole; of a dense parameter then also the Hugging Face tensors.
    copies = {"expert": 2 * shape.num_experts}
    return max(numel(rule, shape) * copies.get(rule.scope, 3) for rule in rules_of(shape))


def layer_bytes(shape: ModelShape, layer: int, cut: Cut, recompute: Collection[str] = ()) -> int:
    """What one layer keeps; ``recompute`` are modules of selective recomputation, which keep their input only."""
    latent = shape.fields.get("multi_latent_attention")
    attention = (_latent_attention if latent else _grouped_attention)(shape, cut, recompute)
    if layer in shape.moe_layers:
        mlp = 0 if "moe" in recompute else _moe(shape, cut, recompute)
    else:
        mlp = 0 if "mlp" in recompute else _gated(shape.fields["ffn_hidden_size"], cut)
    # A norm keeps input and normalised value in fp32, a scale per row, and its output for the layer behind it.
    norm = 0 if "layernorm" in recompute else (8 * shape.fields["hidden_size"] + 4) * cut.rows
    return 2 * (norm + input_bytes(shape, cut)) + attention + mlp


def input_bytes(shape: ModelShape, cut: Cut) -> int:
    """e H S': the hidden state at the start of a layer, all that full recomputation keeps of it."""
    return cut.element * shape.fields["hidden_size"] * cut.rows


def head_bytes(shape: ModelShape, cut: Cut) -> int:
    """Final norm (8 H + 4) S', and what ``linear_logprobs`` keeps: hidden states and 17 bytes for each slot."""
    hidden = shape.fields["hidden_size"]
    return (8 * hidden + 4) * cut.rows + (cut.element * hidden + 17) * cut.slots


def _grouped_attention(shape: ModelShape, cut: Cut, recompute: Collection[str]) -> int:
    fields, e = shape.fields, cut.element
    width, heads, groups = fields["kv_channels"], fields["num_attention_heads"], fields["num_query_groups"]
    q, kv = heads * width // cut.tp, groups * width // cut.tp
    rotary = 4 * e * int(width * shape.rotary_percent)
    norms = 0
    if fields["qk_layernorm"]:
        # In fp32 no copy is cast: the norm keeps queries, keys and values together, of which its input is a view.
        keys = 8 * kv if e < 4 else 4 * kv + e * (q + 2 * kv)
        norms = 8 * q + 4 * heads // cut.tp + keys + 4 * groups // cut.tp
    if "core_attn" in recompute:  # queries, keys, and the projection of which values are a view
        held = 0 if e == 4 and fields["qk_layernorm"] else q + 2 * kv
        attention = e * (q + kv + held)
    else:
        attention = e * (2 * q + 2 * kv * cut.cp) + 4 * heads // cut.tp + 8
    return (rotary + norms + attention + e * q) * cut.slots


def _latent_attention(shape: ModelShape, cut: Cut, recompute: Collection[str]) -> int:
    fields, e = shape.fields, cut.element
    heads = fields["num_attention_heads"] // cut.tp
    key, value = fields["qk_head_dim"] + fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
    latents = [width for width in (fields["q_lora_rank"], fields["kv_lora_rank"]) if width]
    latent_norms = sum((8 + e) * width + 4 for width in latents) * cut.rows
    if "core_attn" in recompute:
        attention = e * heads * (2 * key + value)
    else:
        attention = e * heads * (key + value) * (1 + cut.cp) + 4 * heads + 8
    return latent_norms + (4 * e * fields["qk_pos_emb_head_dim"] + attention + e * heads * value) * cut.slots


def _gated(width: int, cut: Cut) -> int:
    """Both halves of the inner product, silu of the first, a copy of the second, and their product: 5 e width S."""
    return 5 * cut.element * width // cut.tp * cut.slots


def _moe(shape: ModelShape, cut: Cut, recompute: Collection[str]) -> int:
    fields, e = shape.fields, cut.element
    width = fields["moe_ffn_hidden_size"] // cut.etp
    dispatcher = (5 * shape.num_experts + 8 * shape.topk) * cut.rows
    # inputs, the five of a gated layer, and the product with the gate weight, for each row that comes to this rank
    experts = (e * fields["hidden_size"] + 6 * e * width + 4) * routed_rows(shape, cut)
    shared = fields.get("moe_shared_expert_intermediate_size")
    if not shared or "shared_experts" in recompute:
        return _router(fields, cut) + dispatcher + experts
    gate = (e * (fields["hidden_size"] + 1) + 4) * cut.rows if fields.get("moe_shared_expert_gate") else 0
    return _router(fields, cut) + dispatcher + experts + _gated(shared, cut) + gate


def routed_rows(shape: ModelShape, cut: Cut) -> int:
    """Rows that a rank's experts compute if all experts get equally many: S' K etp."""
    return cut.rows * shape.topk * cut.etp


def _router(fields: Mapping[str, int | None], cut: Cut) -> int:
    experts, topk = fields["num_moe_experts"] or 0, fields["moe_router_topk"] or 0
    if fields.get("moe_router_score_function") == "sigmoid":
        groups = fields.get("moe_router_num_groups") or 0
        grouped = 16 * groups + 8 * (fields.get("moe_router_group_topk") or 0) + experts if groups else 0
        return (4 * experts + 4 + 12 * topk + grouped) * cut.rows
    return ((4 * experts if fields.get("moe_router_pre_softmax") else 4 * topk) + 8 * topk) * cut.rows
