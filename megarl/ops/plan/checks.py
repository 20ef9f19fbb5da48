"""Refusals, before a job waits in a queue: layouts that do not divide the model, memory that a GPU does not have."""

from dataclasses import dataclass

from megarl.config import Config, Layout
from megarl.core.fp8 import BLOCK
from megarl.errors import ConfigError
from megarl.models.shapes import ModelShape
from megarl.ops.plan.engine_memory import EngineMemory, cut_widths, fp8_widths
from megarl.ops.plan.layout import longest_sequence
from megarl.ops.plan.trainer_memory import RankMemory

TRAINER_RESERVE = 3 << 30
SERVER_RESERVE = 3 << 30
"""Bytes for CUDA, NCCL, workspaces and fragmentation on a GPU, beside what is computed: a guess, not measured."""

_USE_LESS = (
    "raise parallel.tp, pp or ep or the number of GPUs, recompute more, or lower train.micro_batch_tokens "
    "(not below the longest sequence)"
)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on the fullest GPU, reserves included."""

    trainer: int  # a GPU of the trainer; the server's part included where they share it
    server: int  # a GPU that only holds a server; 0 if there is none


def check_division(config: Config, shape: ModelShape, layout: Layout) -> None:
    """Refuse a layout that cuts heads, experts or widths into unequal parts, and sequences beyond the positions."""
    fields = shape.fields
    _require_divisor("num_attention_heads", fields["num_attention_heads"], "parallel.tp", layout.tp)
    if not fields.get("multi_latent_attention"):
        _require_divisor("num_key_value_heads", fields["num_query_groups"], "parallel.tp", layout.tp)
    _require_divisor("experts", shape.num_experts, "parallel.ep", layout.ep)
    for name, width in cut_widths(shape):
        key, parts = ("parallel.etp", layout.etp) if name.startswith("the experts") else ("parallel.tp", layout.tp)
        _require_divisor(name, width, key, parts)
    longest = longest_sequence(config)
    if longest > shape.max_sequence_length:
        raise ConfigError(
            f"rollout.max_response_tokens: found prompts and responses of up to {longest} tokens, expected at most the "
            f"model's max_position_embeddings = {shape.max_sequence_length}; lower it or data.max_prompt_tokens"
        )


def check_servers(config: Config, shape: ModelShape) -> None:
    """Refuse servers that cannot cut the model, or whose GPUs CUDA IPC does not reach."""
    if not config.rollout.engine_kind.server:
        return
    settings, fields, tp = config.sglang, shape.fields, config.sglang.tp
    _require_divisor("num_attention_heads", fields["num_attention_heads"], "sglang.tp", tp)
    groups = fields.get("num_query_groups") or 0
    if groups % tp and tp % groups:
        raise ConfigError(
            f"sglang.tp: found {tp} for {groups} key-value heads, expected a divisor or a multiple of them"
        )
    for name, width in cut_widths(shape):
        _require_divisor(name, width, "sglang.tp", tp)
    for name, width in fp8_widths(shape, tp) if settings.fp8 else ():
        if width % BLOCK[0]:
            raise ConfigError(
                f"sglang.tp: found {tp} with sglang.fp8 = true, which leaves a GPU {width} of {name}, expected a "
                f"multiple of {BLOCK[0]}; lower sglang.tp, or set sglang.fp8 = false"
            )
    last, ranks = max(settings.gpus, default=0), config.launch.ranks_per_node
    if last >= ranks and config.weight_sync == "ipc":  # never apart
        raise ConfigError(
            f"sglang.gpus: found {last} on nodes with launch.ranks_per_node = {ranks} GPUs of the trainer and weights "
            f'sent by CUDA IPC, expected 0 to {ranks - 1}; set sglang.sync = "distributed" if they share no GPU'
        )


def _require_divisor(name: str, size: int, key: str, parts: int) -> None:
    if size % parts:
        raise ConfigError(f"{key}: found {parts}, expected a divisor of the model's {name} = {size}")


def check_engine(engine: EngineMemory, longest: int) -> None:
    if engine.sequences < 1:
        raise ConfigError(
            f"sglang.mem_fraction: a server's GPU holds {engine.weights / 2**30:.1f} GiB of weights and then "
            f"{engine.tokens} tokens of cache, expected at least one sequence of {longest}; raise sglang.mem_fraction, "
            "sglang.tp or sglang.max_total_tokens"
        )


def check_gpus(config: Config, rank: RankMemory, engine: EngineMemory) -> GpuMemory:
    """What the fullest GPUs hold; ConfigError if a GPU of launch.gpu_memory_gib does not have that much."""
    name, trainer, server, advice = f"a rank of stage {rank.stage}", rank.peak + TRAINER_RESERVE, 0, _USE_LESS
    if not config.rollout.engine_kind.server:
        name, trainer = f"{name} with its engine", trainer + engine.total
    elif not config.servers_share_gpus:
        server = engine.total + SERVER_RESERVE
    else:
        name, trainer = f"{name} with a server on its GPU", shared_gpu(rank, engine, config.sglang.release_memory)
        advice = f"lower sglang.mem_fraction; {_USE_LESS}"
    _check_gpu(config, name, trainer, advice)
    if config.launch.apart or (server and config.sglang.gpus):
        _check_gpu(config, "a server's GPU", server, "raise sglang.tp, or lower sglang.mem_fraction")
    return GpuMemory(trainer, server)


def shared_gpu(rank: RankMemory, engine: EngineMemory, handed_over: bool) -> int:
    """Bytes of a rank and a server on one GPU, reserves included.

    Both resident: their sum. Handed over: the largest of training without the server, sampling beside the weights of
    trainer and reference, and an update, when both have weights and neither cache nor optimizer states.
    """
    reserves = TRAINER_RESERVE + SERVER_RESERVE
    if not handed_over:
        return rank.peak + engine.total + reserves
    update = rank.weights + rank.reference + rank.sync + engine.weights
    return max(rank.training, engine.total + rank.weights + rank.reference, update) + reserves


def _check_gpu(config: Config, what: str, found: int, advice: str) -> None:
    gib = config.launch.gpu_memory_gib
    if gib is not None and found > gib * 2**30:
        raise ConfigError(
            f"launch.gpu_memory_gib: {what} needs {found / 2**30:.1f} GiB, expected at most {gib:g}; {advice}"
        )
