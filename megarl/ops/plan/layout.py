"""How a run divides: layers over stages, parameters over ranks, and the responses of a step over micro-batches."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from megarl.config import Config, Layout
from megarl.errors import ConfigError, refusal, refuse_if
from megarl.megatron.passes.blocks import round_up
from megarl.models.names import Rule, dimensions, is_fp32, rules_of
from megarl.models.shapes import ModelShape

_SPLITS = (f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss"))
_UNKNOWN = ("pipeline_model_parallel_layout", *_SPLITS)
"""Fields of Megatron that divide layers in ways outside of this plan."""
_WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")
"""Projections to latent space: column-parallel on paper, but whole on every rank."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Content of one pipeline rank: the first stage also has the embedding, the last stage the final norm and output
    layer."""

    rank: int
    chunks: tuple[tuple[int, ...], ...]  # 0-based global layers of each model chunk; vpp chunks, or one
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)


def stages_of(config: Config, shape: ModelShape) -> list[Stage]:
    """The pipeline stages; ConfigError if the layers do not come out even.

    Stage p has n_p layers, n_p / vpp in each chunk; chunk v of stage p follows chunk v of stage p - 1.
    """
    counts = _layers_per_stage(config, shape.num_layers)
    vpp = config.parallel.vpp or 1
    for count in counts:
        refuse_if(count % vpp, ConfigError, "vpp_of_layers", vpp=vpp, count=count)
    bounds = [0, *accumulate(count // vpp for _ in range(vpp) for count in counts)]
    layers = [tuple(range(*pair)) for pair in pairwise(bounds)]
    pp, indexers = len(counts), shape.indexer_layers
    if others := [chunk[0] for chunk in layers if chunk and indexers and chunk[0] not in indexers]:
        raise ConfigError(refusal("stage_without_indexer", pp=pp, layer=others[0], indexers=[*indexers]))
    return [Stage(rank, tuple(layers[rank::pp]), rank == 0, rank == pp - 1) for rank in range(pp)]


def _layers_per_stage(config: Config, num_layers: int) -> list[int]:
    pp, settings = config.parallel.pp, config.megatron
    for key in _UNKNOWN:
        refuse_if(settings.get(key), ConfigError, "plan_of_layers", key=key)
    ends = ((0, "num_layers_in_first_pipeline_stage"), (pp - 1, "num_layers_in_last_pipeline_stage"))
    fixed = {rank: settings[key] for rank, key in ends if pp > 1 and settings.get(key) is not None}
    open_layers, open_stages = num_layers - sum(fixed.values()), pp - len(fixed)
    if open_layers < open_stages or (open_layers % open_stages if open_stages else open_layers):
        facts = {"pp": pp, "layers": num_layers, "open_layers": open_layers, "open_stages": open_stages}
        raise ConfigError(refusal("layers_of_stages", **facts))
    return [fixed.get(rank, open_layers // open_stages if open_stages else 0) for rank in range(pp)]


def divide_step(config: Config, layout: Layout) -> int:
    """Return the micro-batches of a mini-batch if all sequences have the maximum length.

    ConfigError where the interleaved schedule has more micro-batches than sequences.
    """
    cp, multiple = layout.cp, config.parallel.micro_batch_multiple
    padded = round_up(config.longest_sequence, 2 * cp if cp > 1 else 1)  # two chunks of a sequence on each of cp ranks
    per_micro_batch = max(1, config.train.micro_batch_tokens * cp // padded)
    num_most = round_up(-(-layout.sequences_per_rank // per_micro_batch), multiple)
    if num_most > layout.sequences_per_rank:
        raise ConfigError(refusal("interleaved", multiple=multiple, most=num_most, num=layout.sequences_per_rank))
    return num_most


@dataclass(frozen=True, slots=True)
class ModelCount:
    """Parameters of a whole model."""

    total: int
    experts: int  # of routed experts, all layers
    embeddings: int  # of the embedding and, where it is apart, the output layer
    active: int  # parameters that a token uses, embeddings included: of the experts only the top k


@dataclass(frozen=True, slots=True)
class RankCount:
    """Parameters on one rank of a pipeline stage; every rank of the stage has as many."""

    stage: int
    dense: int  # replicated over data- and context-parallel ranks
    expert: int  # replicated over expert-data-parallel ranks
    frozen: int  # weights of indexers, which have no gradient
    buffers: int  # fp32 values without an optimizer: expert biases and counters

    @property
    def total(self) -> int:
        return self.dense + self.expert + self.frozen


def numel(rule: Rule, shape: ModelShape) -> int:
    """Elements of one parameter of the rule, whole."""
    sizes = dimensions(shape)
    return sum(prod(sizes[name] for name in dims.split()) for dims in rule.dims)


def count_model(shape: ModelShape) -> ModelCount:
    """Parameters of the checkpoint, without prediction layers (MTP), which megarl does not train."""
    sizes = {rule: numel(rule, shape) * sum(1 for _ in rule.places(shape)) for rule in rules_of(shape)}
    total = sum(sizes.values())
    experts = sum(size for rule, size in sizes.items() if rule.is_of_experts)
    embeddings = sum(size for rule, size in sizes.items() if rule.layout == "vocab")
    unused = experts - experts * shape.topk // shape.num_experts if experts else 0
    return ModelCount(total, experts, embeddings, total - unused)


def count_rank(shape: ModelShape, layout: Layout, stage: Stage) -> RankCount:
    """Parameters of one rank of the stage: dense parameters divided by tp, experts by ep and etp."""
    dense = expert = frozen = buffers = 0
    layers = set(stage.layers)
    for rule in rules_of(shape):
        if rule.scope == "model":
            is_here = stage.is_first if "embedding" in rule.megatron[0] else stage.is_last
            # With tied embeddings, the last stage holds a copy of the embedding as output layer.
            is_here |= shape.tied_embeddings and stage.is_last and rule.layout == "vocab"
            dense += _local(rule, shape, layout.tp) if is_here else 0
            continue
        num_layers = sum(1 for layer, _ in rule.places(shape) if layer in layers)
        if rule.is_of_experts:
            expert += _local(rule, shape, layout.etp) * num_layers // layout.ep
        elif rule.scope == "indexer":
            frozen += numel(rule, shape) * num_layers
        elif is_fp32(rule.megatron[0]):
            buffers += 2 * numel(rule, shape) * num_layers
        else:
            dense += _local(rule, shape, layout.tp) * num_layers
    return RankCount(stage.rank, dense, expert, frozen, buffers)


def _local(rule: Rule, shape: ModelShape, size: int) -> int:
    """Elements of one parameter on one of ``size`` tensor-parallel ranks."""
    if rule.layout == "vocab":  # padded to a multiple of the ranks
        return -(-shape.vocab_size // size) * shape.fields["hidden_size"]
    whole = rule.layout == "replicated" or any(name in rule.megatron[0] for name in _WHOLE)
    return numel(rule, shape) if whole else numel(rule, shape) // size
