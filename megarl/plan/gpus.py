"""What lies on one GPU: trainer and server together, one after the other, or each on GPUs of its own."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import Config
from megarl.plan.checks import SERVER_RESERVE, TRAINER_RESERVE, check_gpu
from megarl.plan.engine import EngineMemory
from megarl.plan.training import RankMemory

_LESS = (
    "raise parallel.tp, pp or ep or the number of GPUs, recompute more, or lower train.micro_batch_tokens "
    "(not below the longest sequence)"
)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on the fullest GPU, reserves included."""

    trainer: int
    """A GPU of the trainer; the server's part included where they share it."""
    server: int
    """A GPU that only holds a server; 0 if there is none."""


def gpu_memory(config: Config, rank: RankMemory, engine: EngineMemory) -> GpuMemory:
    """ConfigError if a GPU of launch.gpu_memory_gib does not hold it."""
    gib = config.launch.gpu_memory_gib
    if not config.rollout.engine_kind.server:
        found = GpuMemory(rank.peak + engine.total + TRAINER_RESERVE, 0)
        check_gpu(f"a rank of stage {rank.stage} with its engine", found.trainer, gib, _LESS)
        return found
    if config.launch.apart or not config.sglang.gpus:
        found = GpuMemory(rank.peak + TRAINER_RESERVE, engine.total + SERVER_RESERVE)
        check_gpu(f"a rank of stage {rank.stage}", found.trainer, gib, _LESS)
        if config.launch.apart:
            check_gpu("a server's GPU", found.server, gib, "raise sglang.tp, or lower sglang.mem_fraction")
        return found
    found = GpuMemory(shared_gpu(rank, engine, config.sglang.release_memory), 0)
    advice = "lower sglang.mem_fraction; " + _LESS
    check_gpu(f"a rank of stage {rank.stage} with a server on its GPU", found.trainer, gib, advice)
    return found


def shared_gpu(rank: RankMemory, engine: EngineMemory, handed_over: bool) -> int:
    """Bytes of a rank and a server on one GPU, reserves included.

    Both resident: their sum. Handed over: the largest of training without the server, sampling beside the weights of
    the trainer and its reference, and an update, when both have weights and neither cache nor optimizer states.
    """
    reserves = TRAINER_RESERVE + SERVER_RESERVE
    if not handed_over:
        return rank.peak + engine.total + reserves
    update = rank.weights + rank.reference + rank.sync + engine.weights
    return max(rank.training, engine.total + rank.weights + rank.reference, update) + reserves
