"""How many parameters a model has, how many a token uses, and how many a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megarl.config import Layout
from megarl.models.names import Rule, dimensions, rules_of
from megarl.models.shapes import ModelShape
from megarl.plan.layout import Stage

_WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")
"""Projections to latent space, which no layer cuts although they are column-parallel on paper."""


@dataclass(frozen=True, slots=True)
class ModelCount:
    """Parameters of a whole model."""

    total: int
    experts: int  # of routed experts, all layers
    embeddings: int  # of the embedding and, where it is apart, the output layer
    active: int  # what a token uses: everything, but only top-k of the experts; embeddings included


@dataclass(frozen=True, slots=True)
class RankCount:
    """Parameters on one rank of a pipeline stage; every rank of the stage has as many."""

    stage: int
    dense: int  # replicated over data- and context-parallel ranks
    expert: int  # replicated over expert-data-parallel ranks
    buffers: int  # fp32 values that no optimizer changes: expert biases and their counters

    @property
    def total(self) -> int:
        return self.dense + self.expert


def numel(rule: Rule, shape: ModelShape) -> int:
    """Elements of one parameter of the rule, whole."""
    sizes = dimensions(shape)
    return sum(prod(sizes[name] for name in dims.split()) for dims in rule.dims)


def count_model(shape: ModelShape) -> ModelCount:
    """Parameters of the checkpoint, without prediction layers (MTP), which megarl does not train."""
    total = experts = embeddings = 0
    for rule in rules_of(shape):
        size = numel(rule, shape) * sum(1 for _ in rule.places(shape))
        total += size
        experts += size if rule.scope == "expert" else 0
        embeddings += size if rule.layout == "vocab" else 0
    unused = experts - experts * shape.topk // shape.num_experts if experts else 0
    return ModelCount(total, experts, embeddings, total - unused)


def count_rank(shape: ModelShape, layout: Layout, stage: Stage) -> RankCount:
    """Parameters of one rank of the stage: dense ones cut by tp, experts by ep and etp."""
    dense = expert = buffers = 0
    layers = set(stage.layers)
    for rule in rules_of(shape):
        if rule.scope == "model":
            is_here = stage.is_first if "embedding" in rule.megatron[0] else stage.is_last
            # With tied embeddings, the last stage holds a copy of the embedding as output layer.
            is_here |= shape.tied_embeddings and stage.is_last and rule.layout == "vocab"
            dense += _local(rule, shape, layout.tp) if is_here else 0
            continue
        here = sum(1 for layer, _ in rule.places(shape) if layer in layers)
        if rule.scope == "expert":
            expert += _local(rule, shape, layout.etp) * here // layout.ep
        elif rule.megatron[0].endswith("expert_bias"):
            buffers += 2 * numel(rule, shape) * here
        else:
            dense += _local(rule, shape, layout.tp) * here
    return RankCount(stage.rank, dense, expert, buffers)


def _local(rule: Rule, shape: ModelShape, size: int) -> int:
    """Elements of one parameter on one of ``size`` tensor-parallel ranks."""
    if rule.layout == "vocab":  # padded to a multiple of the ranks
        return -(-shape.vocab_size // size) * shape.fields["hidden_size"]
    whole = rule.layout == "replicated" or any(name in rule.megatron[0] for name in _WHOLE)
    return numel(rule, shape) if whole else numel(rule, shape) // size
