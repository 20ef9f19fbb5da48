"""The plan of a run, from the configuration and the model's config.json; or the reason why the run cannot work."""

import os
from dataclasses import dataclass
from pathlib import Path

from megarl.config import Config, Layout
from megarl.config.refusals.model import for_cache, for_gpus, for_layout, for_servers
from megarl.config.tables.base import refuse
from megarl.core.fp8_names import BLOCK
from megarl.errors import ConfigError, refusal
from megarl.files.hf_config import count_prediction_layers
from megarl.models.fit import check_fit
from megarl.models.hf_folder import read_json
from megarl.models.shapes import read_shape
from megarl.ops.plan.engine_memory import EngineMemory, engine_memory, weight_bytes
from megarl.ops.plan.layout import ModelCount, RankCount, count_model, count_rank, divide_step, stages_of
from megarl.ops.plan.trainer_memory import ELEMENT, RankMemory, rank_memory
from megarl.ops.shipped import MODELS

TRAINER_RESERVE = SERVER_RESERVE = 3 << 30
"""Bytes for CUDA, NCCL, workspaces and fragmentation on a GPU, in addition to what is computed: a guess."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """All numbers; bytes, unless a name says otherwise."""

    model_path: str  # where the shape was read
    family: str
    prediction_layers: int  # prediction layers in config.json, which are left out
    layout: Layout
    server_gpus: int  # GPUs that hold servers; the trainer's GPUs if shared
    model: ModelCount
    rank: RankCount  # of the rank with the most memory; so is memory
    memory: RankMemory
    stages: tuple[RankMemory, ...]  # a rank of each pipeline stage
    engine: EngineMemory
    trainer_gpu: int  # on the trainer's fullest GPU, reserves included; with the server's share where both use it
    server_gpu: int  # on a GPU that only holds a server, reserves included; 0 without such a GPU
    spare_weights: int  # on the host of each node's first rank: the weights for a restarted server
    micro_batches: int  # of a mini-batch, at most


def plan(config: Config, model: Path | None = None) -> Estimate:
    """Plan a run; ConfigError, one line, for sizes that do not divide or fit. ``model``: see ``find_model``."""
    folder = find_model(config, model)
    shape = read_shape(folder)
    check_fit(config, shape)
    layout = config.check_world_size(config.launch.ranks)
    refuse(for_layout(config, shape, layout))
    refuse(for_servers(config, shape, BLOCK[0]))
    stages, micro_batches = stages_of(config, shape), divide_step(config, layout)
    memories = [rank_memory(config, shape, layout, stage, micro_batches) for stage in stages]
    worst = max(range(len(stages)), key=lambda index: memories[index].peak)
    engine = engine_memory(config, shape)
    refuse(for_cache(engine.weights, engine.tokens, engine.sequences, config.longest_sequence))
    trainer_gpu, server_gpu = gpu_memory(config, memories[worst], engine)
    nodes = config.launch.server_nodes or (config.launch.nodes if config.sglang.gpus else 0)
    sent = weight_bytes(shape, ELEMENT[config.rollout.dtype], fp8=config.sglang.fp8)
    has_spare = config.rollout.engine_kind.server and config.sglang.spare_weights == "memory"
    return Estimate(
        model_path=str(folder),
        family=shape.family,
        prediction_layers=count_prediction_layers(read_json(folder / "config.json")),
        layout=layout,
        server_gpus=nodes * config.sglang.servers * config.sglang.tp if config.rollout.engine_kind.server else 0,
        model=count_model(shape),
        rank=count_rank(shape, layout, stages[worst]),
        memory=memories[worst],
        stages=tuple(memories),
        engine=engine,
        trainer_gpu=trainer_gpu,
        server_gpu=server_gpu,
        spare_weights=sent if has_spare else 0,
        micro_batches=micro_batches,
    )


def find_model(config: Config, model: Path | None) -> Path:
    """The first folder with a config.json: ``model``, model.path, or one shipped for the model's or run's name.

    ConfigError if there is none.
    """
    if model is not None:
        return model
    model_path = Path(config.model.path)
    for folder in (model_path, MODELS / model_path.name, MODELS / config.run.name):
        if os.path.lexists(folder / "config.json"):
            return folder
    looked = ", ".join(str(folder) for folder in (model_path, MODELS / model_path.name))
    raise ConfigError(refusal("no_config_to_plan", looked=looked))


def gpu_memory(config: Config, rank: RankMemory, engine: EngineMemory) -> tuple[int, int]:
    """Return the bytes on the trainer's fullest GPU and on a GPU of servers alone.

    ConfigError if launch.gpu_memory_gib is less.
    """
    name, trainer, server, remedy = f"a rank of stage {rank.stage}", rank.peak + TRAINER_RESERVE, 0, refusal("use_less")
    if not config.rollout.engine_kind.server:
        name, trainer = f"{name} with its engine", trainer + engine.total
    elif not config.servers_share_gpus:
        server = engine.total + SERVER_RESERVE
    else:
        name, trainer = f"{name} with a server on its GPU", shared_gpu(rank, engine, config.sglang.release_memory)
        remedy = f"lower sglang.mem_fraction; {remedy}"
    needs = [(name, trainer, remedy)]
    if config.launch.apart or (server and config.sglang.gpus):
        needs.append(("a server's GPU", server, "raise sglang.tp, or lower sglang.mem_fraction"))
    refuse(for_gpus(config.launch.gpu_memory_gib, needs))
    return trainer, server


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
