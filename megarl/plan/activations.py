"""Bytes that a forward pass keeps for the backward pass, per layer, as megarl's local layers save them.

e is the size of an element of the training dtype, H the hidden size, S the slots of a micro-batch on this rank (a share
of 1/cp), S' = S / tp under sequence parallelism. Transformer Engine and fused kernels save less, and other things.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megarl.models.shapes import ModelShape


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
