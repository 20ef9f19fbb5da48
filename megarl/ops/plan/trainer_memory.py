"""Memory of one rank of the trainer: resident states, activations of a step, buffers of an engine update.

Activations are tensors kept for the backward pass, and temporary tensors. Layers are Transformer Engine's with fused
attention; saved tensors were read from the allocator (docs/plan.md). e is the size of an element of the training dtype,
H the hidden size, S the slots of a micro-batch on this rank (a share of 1/cp), S' = S / tp under sequence parallelism,
R the rows computed by a rank's experts.
"""

from collections.abc import Collection
from dataclasses import dataclass

from megarl.config import Config, Layout
from megarl.engines import BUCKET_BYTES
from megarl.errors import ConfigError, refusal
from megarl.megatron.passes.blocks import fused_shape
from megarl.models.fit import wants_routes
from megarl.models.names import Rule, rules_of
from megarl.models.shapes import ModelShape
from megarl.ops.plan.layout import RankCount, Stage, count_rank, numel

ELEMENT = {"fp32": 4, "bf16": 2}
"""Bytes of a dtype of the configuration."""
_OPTIMIZER = {"optimizer": "adam", "use_precision_aware_optimizer": False, "optimizer_cpu_offload": False}
"""Fields of Megatron with the values that the formulas assume."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    stage: int
    weights: int
    gradients: int
    optimizer: int  # fp32 main weights (unless the weights are fp32) and Adam's two moments, after sharding
    reference: int  # weights of the reference policy; 0 unless the objective reads one
    activations: int  # kept by the micro-batches in flight for the backward passes
    working: int  # temporary: a recomputed unit and rows in transit, or the needs of the output layer
    sync: int  # what gathering for the engine takes at most, a bucket's tensors, and two buckets
    exchange: int  # routes of a mini-batch, sent and received, while ranks exchange them
    recorded: int  # routes in use, of a mini-batch; and those that the old-log-prob pass recorded (r2), of the step
    host_routes: int  # routes of a step on the host: routes sampled by the rank, and routes of its routers

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
    activations, moment = activation_bytes(config, shape, layout, stage, micro_batches)
    routes, routed = route_bytes(config, shape, layout, stage), wants_routes(config, shape)
    is_r2 = config.train.replay == "r2"
    of_step, is_exchanged = routes * config.train.mini_batches, layout.tp * layout.cp * layout.pp > 1
    return RankMemory(
        stage=stage.rank,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        reference=element * count.total if config.train.resolved_objective.needs_ref_logprobs else 0,
        activations=activations,
        working=moment,
        sync=gathered_bytes(shape, element, layout.ep) + (3 * BUCKET_BYTES if config.rollout.engine_kind.server else 0),
        exchange=2 * routes if routed and is_exchanged else 0,
        recorded=routes * (routed or is_r2) + of_step * is_r2,
        host_routes=2 * of_step if routed else 0,
    )


def route_bytes(config: Config, shape: ModelShape, layout: Layout, stage: Stage) -> int:
    """Bytes of the routes of a mini-batch for one rank's routers: rows L_local K, one byte per expert up to 256
    experts."""
    rows = layout.sequences_per_rank * config.longest_sequence // (layout.cp * layout.tp)  # all at maximum length
    local = sum(layer in shape.moe_layers for layer in stage.layers)
    return rows * local * shape.topk * (1 if shape.num_experts <= 256 else 2)


def state_bytes(config: Config, layout: Layout, count: RankCount) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) of a rank, bytes: e P, 4 P, and 8 or 12 per parameter after sharding; frozen
    parameters have weights alone.

    ConfigError for an optimizer that is not Adam in fp32 on the GPU.
    """
    for key, value in _OPTIMIZER.items():
        if config.megatron.get(key, value) != value:
            raise ConfigError(refusal("plan_of_adam", key=key, value=config.megatron[key], expected=value))
    element = ELEMENT[config.model.dtype]
    gradients = (4 if config.megatron.get("grad_reduce_in_fp32", True) else element) * (count.dense + count.expert)
    dense, expert = (layout.dp * layout.cp, layout.edp) if config.parallel.distributed_optimizer else (1, 1)
    optimizer = (8 if element == 4 else 12) * (-(-count.dense // dense) + -(-count.expert // expert))
    return element * count.total + 4 * count.buffers, gradients, optimizer


def gathered_bytes(shape: ModelShape, element: int, ep: int) -> int:
    """Bytes held by an export, at most: gathered experts twice, a dense parameter three times."""
    # Gathered parts and the whole; for a dense parameter also the Hugging Face tensors.
    return max((3 - rule.is_of_experts) * whole_bytes(rule, shape, element, ep) for rule in rules_of(shape))


def whole_bytes(rule: Rule, shape: ModelShape, element: int, ep: int) -> int:
    """Bytes of what an export gathers at once: a dense parameter, or experts of a layer up to ``BUCKET_BYTES``."""
    tensor = element * numel(rule, shape)
    return min(shape.num_experts * tensor, max(BUCKET_BYTES, ep * tensor)) if rule.scope == "expert" else tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank sees of a micro-batch."""

    slots: int  # S: token slots of the micro-batch on this context-parallel rank
    element: int  # e: bytes of a weight and an activation, 2 or 4
    tp: int = 1
    etp: int = 1
    longest: int = 0  # tokens of the longest sequence, for masks

    @property
    def rows(self) -> int:
        """S': slots of norms, routers and residuals on this rank."""
        return self.slots // self.tp


def activation_bytes(
    config: Config, shape: ModelShape, layout: Layout, stage: Stage, micro_batches: int
) -> tuple[int, int]:
    """Return (bytes kept by the layers of all micro-batches in flight, largest temporary bytes).

    Temporary: a recomputed unit with the tensors of its layers, or the needs of the output layer. A micro-batch has
    train.micro_batch_tokens slots on each context-parallel rank, fewer if all sequences of a rank's mini-batch, at
    maximum length, need no more.
    """
    slots = config.train.micro_batch_tokens
    if config.sampling.fixed:
        whole = -(-layout.sequences_per_rank * config.longest_sequence // layout.cp)
        slots = min(slots, -(-whole // layout.tp) * layout.tp)
    cut = Cut(slots, ELEMENT[config.model.dtype], layout.tp, layout.etp, config.longest_sequence)
    activations, units = zip(*(_chunk_bytes(config, shape, cut, chunk) for chunk in stage.chunks), strict=True)
    moment = max(max(units) + _moment(shape, cut, stage), head_bytes(shape, cut) if stage.is_last else 0)
    return sum(activations) * in_flight(layout, stage.rank, micro_batches) // len(activations), moment


def in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Largest number of forward passes of a stage's chunks that wait for the backward pass at once.

    1F1B: min(pp - p, m). Interleaved: min(2 (pp - p - 1) + (vpp - 1) pp + 1, m vpp).
    """
    if layout.vpp is None:
        return min(layout.pp - stage, micro_batches)
    return min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, micro_batches * layout.vpp)


def _chunk_bytes(config: Config, shape: ModelShape, cut: Cut, layers: tuple[int, ...]) -> tuple[int, int]:
    """Return (bytes kept, bytes of the largest recomputed unit) of one micro-batch in one model chunk."""
    recompute, whole = config.recompute, [layer_bytes(shape, layer, cut) for layer in layers]
    if recompute.granularity != "full":
        modules = recompute.modules if recompute.modules is not None else ["core_attn"]
        recomputed = modules if recompute.granularity == "selective" else []
        sizes = [layer_bytes(shape, layer, cut, recomputed) for layer in layers]
        return sum(sizes), max((full - size for full, size in zip(whole, sizes, strict=True)), default=0)
    size = recompute.num_layers or 1
    if recompute.method == "uniform":
        units = [sum(whole[start : start + size]) for start in range(0, len(layers), size)]
        return len(units) * input_bytes(shape, cut), max(units, default=0)
    units = whole[:size]
    return len(units) * input_bytes(shape, cut) + sum(whole[size:]), max(units, default=0)


def _moment(shape: ModelShape, cut: Cut, stage: Stage) -> int:
    """Temporary bytes of a layer in addition to kept bytes, and the gradient of the output: e H S'.

    MoE: rows as permuted, sent, computed and sorted back, 2 e H (S' K + R), and the output of shared experts. Dense:
    gradients of the widest rows, e (2 H + 3 width / tp) S.
    """
    fields, hidden = shape.fields, cut.element * shape.fields["hidden_size"]
    if not any(layer in shape.moe_layers for layer in stage.layers):
        return (2 * hidden + 3 * cut.element * fields["ffn_hidden_size"] // cut.tp) * cut.slots + hidden * cut.rows
    num_shared = 1 if fields.get("moe_shared_expert_intermediate_size") else 0
    return 2 * hidden * (cut.rows * shape.topk + routed_rows(shape, cut)) + (1 + num_shared) * hidden * cut.rows


def head_bytes(shape: ModelShape, cut: Cut) -> int:
    """End of the last stage: the final norm, tensors kept by ``linear_logprobs`` with gradients, and a block of logits
    with the gradient of its weights.

    (e H + 4) S' + (e H + 21 + 4 H) S + e H V / tp + 4 (R + H) C for a block of R rows and C columns.
    """
    hidden, vocabulary = shape.fields["hidden_size"], -(-shape.vocab_size // cut.tp)
    activations = (cut.element * hidden + 4) * cut.rows + (cut.element * hidden + 21) * cut.slots
    gradients = 4 * hidden * cut.slots + vocabulary * hidden * cut.element
    rows, columns = fused_shape(cut.slots, vocabulary)
    return activations + gradients + 4 * (rows + hidden) * columns


def layer_bytes(shape: ModelShape, layer: int, cut: Cut, recompute: Collection[str] = ()) -> int:
    """Bytes kept by one layer; ``recompute`` names modules of selective recomputation, which keep only the input."""
    latent, is_moe = shape.fields.get("multi_latent_attention"), layer in shape.moe_layers
    softmax = _latent_attention if latent else _grouped_attention
    attention = (_linear_attention if layer in shape.linear_layers else softmax)(shape, cut, recompute)
    if is_moe:
        mlp = 0 if "moe" in recompute else _moe(shape, cut, recompute)
    else:
        mlp = 0 if "mlp" in recompute else _gated(shape.fields["ffn_hidden_size"], cut)
    # Two residuals, and output and scales of each norm. A norm inside a linear layer is not recomputed alone.
    norms = bool(latent) + is_moe if "layernorm" in recompute else 0
    norms += 0 if is_moe or "mlp" not in recompute else 1
    return (4 - norms) * input_bytes(shape, cut) + 8 * cut.rows + attention + mlp


def input_bytes(shape: ModelShape, cut: Cut) -> int:
    """e H S': the hidden state at the start of a layer; full recomputation keeps nothing more."""
    return cut.element * shape.fields["hidden_size"] * cut.rows


def _grouped_attention(shape: ModelShape, cut: Cut, recompute: Collection[str]) -> int:
    """Queries and keys before the norms, rotated queries and keys, values, output and fp32 statistics."""
    fields = shape.fields
    heads, groups = fields["num_attention_heads"] // cut.tp, fields["num_query_groups"] // cut.tp
    q, kv = heads * fields["kv_channels"], groups * fields["kv_channels"]
    normed = cut.element * (q + kv) + 4 * (heads + groups) if fields["qk_layernorm"] else 0
    # Recomputed, the values are a view of the projection, which is kept whole.
    output = q + 2 * kv if "core_attn" in recompute else kv
    gate = (cut.element + 4) * q if fields.get("attention_output_gate") else 0
    return (normed + cut.element * (2 * q + kv + output) + 4 * heads + gate) * cut.slots


def _linear_attention(shape: ModelShape, cut: Cut, _: Collection[str] = ()) -> int:
    """Rows around projection and convolution, and fp32 heads, decays and states of the gated delta rule in plain torch.

    Chunks have 64 tokens. Kernels keep less.
    """
    fields = shape.fields
    keys, values = fields["linear_num_key_heads"] // cut.tp, fields["linear_num_value_heads"] // cut.tp
    k, v = fields["linear_key_head_dim"], fields["linear_value_head_dim"]
    rule = 2 * keys * k + values * (4 * k + 6 * v + 8 * 64 + 2 * k * v // 64)
    return (cut.element * (6 * keys * k + 5 * values * v) + 4 * rule) * cut.slots


def _latent_attention(shape: ModelShape, cut: Cut, recompute: Collection[str]) -> int:
    """Latents with the norms' outputs, rotations, then queries, keys, values, output and fp32 statistics.

    Sparse attention to sequences of more than top-k tokens: a mask of all keys; recomputed, the selected keys.
    """
    fields, e = shape.fields, cut.element
    heads, rope, value = fields["num_attention_heads"] // cut.tp, fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
    latents = sum(2 * e * width + 4 for width in (fields["q_lora_rank"], fields["kv_lora_rank"]) if width)
    output = fields["qk_head_dim"] if "core_attn" in recompute else 0
    attention = e * heads * (2 * (fields["qk_head_dim"] + rope + value) + output) + 4 * heads
    topk = fields.get("dsa_indexer_topk") or cut.longest
    attention += (4 * topk if "core_attn" in recompute else e * cut.longest) * (cut.longest > topk)
    return latents * cut.rows + ((4 * e + 4) * rope + attention) * cut.slots


def _gated(width: int, cut: Cut) -> int:
    """Both halves of the inner product, and the product of one half with silu of the other: 3 e width S."""
    return 3 * cut.element * width // cut.tp * cut.slots


def _moe(shape: ModelShape, cut: Cut, recompute: Collection[str]) -> int:
    """Router and dispatcher (13 E + 28 K) S'; rows, both halves, the product, gate weights: (e (H + 3 W) + 8) R."""
    fields, e = shape.fields, cut.element
    router = (13 * shape.num_experts + 28 * shape.topk) * cut.rows
    inner = (2 if "moe_act" in recompute else 3) * (fields["moe_ffn_hidden_size"] // cut.etp)
    experts = (e * (fields["hidden_size"] + inner) + 8) * routed_rows(shape, cut)
    shared_width = fields.get("moe_shared_expert_intermediate_size")
    if not shared_width or "shared_experts" in recompute:
        return router + experts
    gate = (e * (fields["hidden_size"] + 1) + 4) * cut.rows if fields.get("moe_shared_expert_gate") else 0
    return router + experts + _gated(shared_width, cut) + gate


def routed_rows(shape: ModelShape, cut: Cut) -> int:
    """R: rows that a rank's experts compute if all experts get equally many: S' K etp."""
    return cut.rows * shape.topk * cut.etp
