"""Bytes on the fullest GPU of the trainer and of the servers, reserves included."""

from dataclasses import dataclass

from megarl.config import Config
from megarl.config.refusals.memory import for_gpus
from megarl.config.rows import refuse
from megarl.ops.plan.engine_memory import EngineMemory
from megarl.ops.plan.trainer_memory import RankMemory

TRAINER_RESERVE = SERVER_RESERVE = 3 << 30
"""Bytes for CUDA, NCCL, workspaces and fragmentation on a GPU, in addition to what is computed: a guess."""

_USE_LESS = (
    "raise parallel.tp, pp or ep or the number of GPUs, recompute more, or lower train.micro_batch_tokens "
    "(not below the longest sequence)"
)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on the fullest GPU, reserves included."""

    trainer: int  # a GPU of the trainer; the server's share included where both use the GPU
    server: int  # a GPU that only holds a server; 0 without such a GPU


def gpu_memory(config: Config, rank: RankMemory, engine: EngineMemory) -> GpuMemory:
    """Return what the fullest GPUs hold; ConfigError if launch.gpu_memory_gib is less."""
    name, trainer, server, remedy = f"a rank of stage {rank.stage}", rank.peak + TRAINER_RESERVE, 0, _USE_LESS
    if not config.rollout.engine_kind.server:
        name, trainer = f"{name} with its engine", trainer + engine.total
    elif not config.servers_share_gpus:
        server = engine.total + SERVER_RESERVE
    else:
        name, trainer = f"{name} with a server on its GPU", shared_gpu(rank, engine, config.sglang.release_memory)
        remedy = f"lower sglang.mem_fraction; {_USE_LESS}"
    needs = [(name, trainer, remedy)]
    if config.launch.apart or (server and config.sglang.gpus):
        needs.append(("a server's GPU", server, "raise sglang.tp, or lower sglang.mem_fraction"))
    refuse(for_gpus(config.launch.gpu_memory_gib, needs))
    return GpuMemory(trainer, server)


def shared_gpu(rank: RankMemory, engine: EngineMemory, handed_over: bool) -> int:
    """Bytes of a rank and a server on one GPU, reserves included.

    - Both resident: the sum.
    - Handed over: the largest of training without the server; sampling beside the weights of trainer and reference; and
      an update, with both copies of the weights and without cache or optimizer states.
    """
    reserves = TRAINER_RESERVE + SERVER_RESERVE
    if not handed_over:
        return rank.peak + engine.total + reserves
    update = rank.weights + rank.reference + rank.sync + engine.weights
    return max(rank.training, engine.total + rank.weights + rank.reference, update) + reserves
