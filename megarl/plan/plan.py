"""The plan of a run: every number from the configuration and the model's config.json, or why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megarl.config import Config, Layout
from megarl.errors import ConfigError
from megarl.models.shapes import ModelShape, read_shape
from megarl.plan.batches import Batches, batches_of
from megarl.plan.checks import check_division, check_engine, check_servers
from megarl.plan.engine import EngineMemory, engine_memory, weight_bytes
from megarl.plan.gpus import GpuMemory, gpu_memory
from megarl.plan.layout import stages_of
from megarl.plan.parameters import ModelCount, RankCount, count_model, count_rank
from megarl.plan.traffic import (
    RankTraffic,
    StepTraffic,
    SyncTraffic,
    Trace,
    rank_traffic,
    step_traffic,
    sync_traffic,
    trace_of,
)
from megarl.plan.training import ELEMENT, RankMemory, rank_memory

SHIPPED = Path("launch/models")
"""Configs of public models, beside the recipes in launch/recipes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is reckoned; bytes, unless a name says otherwise."""

    model_path: str
    """Where the shape was read."""
    family: str
    layout: Layout
    server_gpus: int
    """GPUs that hold servers; those of the trainer where they share."""
    model: ModelCount
    rank: RankCount
    """Of the rank with the most memory."""
    memory: RankMemory
    """Of the same."""
    stages: tuple[RankMemory, ...]
    """A rank of each pipeline stage."""
    engine: EngineMemory
    gpu: GpuMemory
    spare_weights: int
    """In the memory of each node's first rank: what a server that comes back is given."""
    trace: Trace
    batches: Batches
    step: StepTraffic
    traffic: RankTraffic
    sync: SyncTraffic


def plan(config: Config, model: Path | None = None, source: Path | None = None) -> Plan:
    """Reckon a configuration through; ConfigError, one line, for what cannot divide or fit.

    ``model`` is a folder with a config.json; default model.path, then the shipped one of that name, or of the run's,
    beside ``source``, the configuration's file.
    """
    folder = find_model(config, model, source)
    shape = read_shape(folder)
    layout = config.check_world_size(config.launch.ranks)
    check_division(config, shape, layout)
    check_servers(config, shape)
    stages, batches = stages_of(config, shape), batches_of(config, layout)
    memories = [rank_memory(config, shape, layout, stage, batches.most) for stage in stages]
    worst = max(range(len(stages)), key=lambda index: memories[index].peak)
    engine = engine_memory(config, shape, batches.longest)
    check_engine(engine, batches.longest)
    count = count_rank(shape, layout, stages[worst])
    served = config.rollout.engine_kind.server
    return Plan(
        model_path=str(folder),
        family=shape.family,
        layout=layout,
        server_gpus=_server_gpus(config),
        model=count_model(shape),
        rank=count,
        memory=memories[worst],
        stages=tuple(memories),
        engine=engine,
        gpu=gpu_memory(config, memories[worst], engine),
        spare_weights=_spare(config, shape) if served and config.sglang.spare_weights == "memory" else 0,
        trace=trace_of(shape),
        batches=batches,
        step=step_traffic(config, shape, layout, stages[worst], batches),
        traffic=rank_traffic(config, shape, layout, stages[worst], count),
        sync=sync_traffic(config, shape, count),
    )


def find_model(config: Config, model: Path | None, source: Path | None) -> Path:
    """The folder whose config.json is read; ConfigError naming the places that have none."""
    if model is not None:
        return model
    named = Path(config.model.path)
    beside = [source.parent.parent / "models"] if source is not None else []
    names = dict.fromkeys((named.name, config.run.name))
    for folder in (named, *(folder / name for folder in (*beside, SHIPPED) for name in names)):
        if (folder / "config.json").is_file():
            return folder
    looked = ", ".join(str(folder) for folder in (named, SHIPPED / named.name))
    raise ConfigError(
        f"model.path: found no config.json in {looked}; give the folder of one with --model, a checkpoint is not needed"
    )


def _server_gpus(config: Config) -> int:
    settings = config.sglang
    if not config.rollout.engine_kind.server:
        return 0
    nodes = config.launch.server_nodes or (config.launch.nodes if settings.gpus else 0)
    return nodes * settings.servers * settings.tp


def _spare(config: Config, shape: ModelShape) -> int:
    return weight_bytes(shape, ELEMENT[config.rollout.dtype], fp8=config.sglang.fp8)
