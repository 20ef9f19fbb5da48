"""Megatron's gated delta net for packed sequences, with or without flash-linear-attention and Transformer Engine.

Megatron's class asks for flash-linear-attention when it is built, and takes packed sequences only in late releases. The
class here has the same parameters, computes on packed sequences in every layout, and uses the kernel on a GPU that has
it. In Megatron's checkpoints, the norm of the output is zero-centred like all others, and the model's is not: therefore
checkpoints name it ``out_norm.plain_weight`` here.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu, softplus

from megarl.errors import ConfigError, refuse_if
from megarl.stand_ins.attention import buckets_of, in_packed_order

_Megatron: Any = GatedDeltaNet
_MEGATRON: dict[str, Any] = GatedDeltaNet.__init__.__globals__
"""Of the module with the constructor, whose place differs between releases."""
_CHUNK = 64


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in fp32, in chunks: S_t = e^g_t S_t-1 + k_t^T beta_t (v_t - k_t e^g_t S_t-1), o_t = q_t S_t.

    Takes query, key [n, length, heads, d], value [n, length, heads, d_v], and decay g <= 0 and beta
    [n, length, heads]; returns fp32 [n, length, heads, d_v]. Every sequence starts with the state 0.
    """
    columns = [x.transpose(1, 2).float() for x in (query, key, value, decay, beta)]
    state = columns[2].new_zeros(*columns[1].shape[:2], key.size(-1), value.size(-1))
    outputs = []
    for q, k, v, g, b in zip(*(x.split(_CHUNK, 2) for x in columns), strict=True):
        since_start = g.cumsum(-1)
        between = (since_start[..., :, None] - since_start[..., None, :]).tril().exp().tril()
        b, kept = b[..., None], since_start.exp()[..., None]
        # What a token writes depends on what earlier tokens of the chunk write: a triangular system.
        system, values = b * (k @ k.mT) * between, b * (v - kept * (k @ state))
        mixed = torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
        outputs.append(kept * (q @ state) + ((q @ k.mT) * between) @ mixed)
        state = kept[..., -1:, :] * state + (k * between[..., -1, :, None]).mT @ mixed
    return torch.cat(outputs, 2).transpose(1, 2)


def _by_length(compute: Callable[..., Tensor], packing: PackedSeqParams, *columns: Tensor) -> Tensor:
    """Call ``compute`` with the rows [n, length, ...] of all sequences of one length; [T, ...] -> [T, ...]."""
    buckets = buckets_of(packing)
    return in_packed_order([compute(*(column[rows] for column in columns)) for rows in buckets], buckets)


class PackedDeltaNet(_Megatron):
    """Megatron's class, whose convolution and state begin anew with each packed sequence.

    Takes ``[tokens, 1, hidden]`` like attention. With context parallelism, projected tokens are gathered, so memory and
    computation of the rule grow with whole sequences.
    """

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int, **options: Any) -> None:
        heads, tp = config.linear_num_key_heads or 0, config.tensor_model_parallel_size
        refuse_if(heads % tp, ConfigError, "key_heads_of_tp", heads=heads, tp=tp)
        has_kernel, _MEGATRON["HAVE_FLA"] = _MEGATRON["HAVE_FLA"], True
        options.pop("cp_comm_type", None)  # of attention
        try:
            super().__init__(config, submodules, layer_number, **options)
        finally:
            _MEGATRON["HAVE_FLA"] = has_kernel
        self.out_norm.is_centred = False
        on_gpu = torch.cuda.is_available() and config.bf16  # the kernel takes no fp32
        self.kernel = _MEGATRON["chunk_gated_delta_rule"] if has_kernel and on_gpu else None
        self.cp_group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None

    def _setup_variant_attrs(self) -> None:
        """From 0.19 on, the constructor expects a kernel here."""
        super()._setup_variant_attrs()
        self.gated_delta_rule = delta_rule

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return ([tokens, 1, hidden], bias or None), see the class."""
        order: Any = getattr(packed_seq_params, "from_ranks", None)
        held: Any = ...
        if attention_mask is not None or packed_seq_params is None or (self.cp_group and order is None):
            raise NotImplementedError("megarl's gated delta net takes no mask, and sequences packed by megarl")
        projected = self.in_proj(hidden_states)[0].squeeze(1)
        if self.cp_group:
            held = torch.argsort(order).chunk(self.cp_group.size())[self.cp_group.rank()]
            projected = gather_from_sequence_parallel_region(projected, group=self.cp_group)[order]
        return self.out_proj(self._mix(projected, packed_seq_params)[held][:, None])

    def _mix(self, projected: Tensor, packing: PackedSeqParams) -> Tensor:
        """[tokens, q k v z b a of this rank] -> [tokens, value heads * d_v]: convolution, delta rule, gated norm."""
        qk, v, heads = self.qk_dim // self.tp_size, self.v_dim // self.tp_size, self.num_v_heads_local_tp
        mixed, gate, beta, step = projected.split([2 * qk + v, v, heads, heads], -1)
        mixed = _by_length(lambda rows: silu(self.conv1d(rows.mT)[..., : rows.size(1)]).mT, packing, mixed)
        *query_and_key, value = mixed.split([qk, qk, v], -1)
        by_head = (column.float().unflatten(-1, (-1, self.key_head_dim)) for column in query_and_key)
        normed = (column * torch.rsqrt(column.square().sum(-1, keepdim=True) + 1e-6) for column in by_head)
        query, key = (column.repeat_interleave(self.num_value_heads // self.num_key_heads, 1) for column in normed)
        value, gate = (column.unflatten(-1, (heads, -1)) for column in (value, gate))
        decay = -self.A_log.float().exp() * softplus(step.float() + self.dt_bias.float())
        heads_and_gates = query * self.key_head_dim**-0.5, key, value, decay, beta.float().sigmoid()
        if self.kernel is None:
            mixed = _by_length(delta_rule, packing, *heads_and_gates)
        else:
            batch = (column[None].to(value.dtype) if column.dim() == 3 else column[None] for column in heads_and_gates)
            mixed = self.kernel(*batch, scale=1.0, cu_seqlens=packing.cu_seqlens_q)[0][0]
        return (self.out_norm(mixed.to(value.dtype)) * silu(gate.float())).to(value.dtype).flatten(1)

    def sharded_state_dict(self, prefix: str = "", *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return Megatron's sharded tensors, in which the norm that is not zero-centred has a separate name."""
        state = super().sharded_state_dict(prefix, *arguments, **options)
        norm = state[f"{prefix}out_norm.weight"]
        norm.key = norm.key.removesuffix("weight") + "plain_weight"
        return state
