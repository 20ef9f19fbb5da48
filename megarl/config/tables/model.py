"""The tables about the policy and the layout of ranks: [model], [parallel], [recompute]."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, PositiveInt

from megarl.config.tables.base import Dtype, Row, Table

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts"]


class ModelConfig(Table):
    """[model]: the policy."""

    path: str = Field(min_length=1)
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), which decides the architecture."""
    trust_remote_code: bool = False
    """Allow code in this folder to make the tokenizer; --trust sets this key: docs/trust.md."""
    dtype: Dtype = "bf16"
    """Precision of training weights and activations; the optimizer always keeps fp32."""
    reference: str | None = None
    """Checkpoint folder of the reference policy, of the policy's architecture; default path. Read only by objectives
    with a KL to a reference: kl_grpo, or any with the part kl."""


class ParallelConfig(Table):
    """[parallel]: how the model is spread over ranks; data parallelism uses the remaining ranks."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel ranks."""
    vpp: PositiveInt | None = None
    """Virtual pipeline stages per pipeline rank (interleaved schedule); needs pp > 1."""
    ep: PositiveInt = 1
    """Expert-parallel ranks, a division of the data-, context- and tensor-parallel ranks."""
    etp: PositiveInt | None = None
    """Tensor-parallel ranks inside an expert; default tp."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each holds an early and a late chunk of every sequence."""
    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens are sent to their experts; flex is DeepEP, needs GPUs, and is untested with megarl."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""

    @property
    def expert_tp(self) -> int:
        """etp with its default resolved."""
        return self.tp if self.etp is None else self.etp

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches is a multiple of this number: the interleaved schedule takes pp at a time."""
        return self.pp if self.vpp else 1

    def rows(self) -> Iterable[Row]:
        yield from self.only_with("pp > 1", self.pp > 1, "vpp")
        yield self.row("vpp_of_1", self.vpp == 1)
        expert_tp, reduces_wrongly = self.expert_tp, self.ep == 1 and self.expert_tp != self.tp
        yield self.row("etp", expert_tp > self.tp or reduces_wrongly, expert_tp=expert_tp)


class RecomputeConfig(Table):
    """[recompute]: activations that the backward pass recomputes to save memory; the names are Megatron's."""

    granularity: Literal["selective", "full"] | None = None
    """Modules to recompute: nothing, some modules of each layer, or whole layers."""
    method: Literal["uniform", "block"] | None = None
    """With full: recompute every num_layers layers as a unit, or only the first num_layers layers of a stage."""
    num_layers: PositiveInt | None = None
    """With full: see method; layers."""
    modules: list[RecomputeModule] | None = None
    """With selective: modules to recompute; default core_attn."""

    def rows(self) -> Iterable[Row]:
        is_full = self.granularity == "full"
        yield self.row("full_recompute", is_full and None in (self.method, self.num_layers))
        yield from self.only_with('granularity = "full"', is_full, "method", "num_layers")
        yield from self.only_with('granularity = "selective"', self.granularity == "selective", "modules")
