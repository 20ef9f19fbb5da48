"""The plan of a run, from the configuration and the model's config.json; or the reason why the run cannot work."""

import os
from dataclasses import dataclass
from pathlib import Path

from megarl.config import Config, Layout
from megarl.errors import ConfigError
from megarl.files.hf_config import count_prediction_layers
from megarl.models.fit import check_fit
from megarl.models.hf_folder import read_json
from megarl.models.shapes import read_shape
from megarl.ops.plan import traffic
from megarl.ops.plan.checks import GpuMemory, check_division, check_engine, check_gpus, check_servers
from megarl.ops.plan.engine_memory import EngineMemory, engine_memory
from megarl.ops.plan.layout import ModelCount, RankCount, Schedule, count_model, count_rank, divide_step, stages_of
from megarl.ops.plan.traffic import SyncTraffic
from megarl.ops.plan.trainer_memory import RankMemory, rank_memory
from megarl.ops.shipped import MODELS


@dataclass(frozen=True, slots=True)
class Plan:
    """All numbers; bytes, unless a name says otherwise."""

    model_path: str  # where the shape was read
    family: str
    prediction_layers: int  # that config.json counts beyond the model's own; they are left out
    layout: Layout
    server_gpus: int  # GPUs that hold servers; those of the trainer where they share
    model: ModelCount
    rank: RankCount  # of the rank with the most memory; so are memory and traffic
    memory: RankMemory
    stages: tuple[RankMemory, ...]  # a rank of each pipeline stage
    engine: EngineMemory
    gpu: GpuMemory
    spare_weights: int  # on the host of each node's first rank: the weights for a server that restarts
    trace: traffic.Trace
    batches: Schedule
    step: traffic.StepTraffic
    traffic: traffic.RankTraffic
    sync: SyncTraffic  # not by its module, which the name of the field before hides


def plan(config: Config, model: Path | None = None) -> Plan:
    """Plan a run; ConfigError, one line, for what cannot divide or fit. ``model``: see ``find_model``."""
    folder = find_model(config, model)
    shape = read_shape(folder)
    check_fit(config, shape)
    layout = config.check_world_size(config.launch.ranks)
    check_division(config, shape, layout)
    check_servers(config, shape)
    stages, batches = stages_of(config, shape), divide_step(config, layout)
    memories = [rank_memory(config, shape, layout, stage, batches.most) for stage in stages]
    worst = max(range(len(stages)), key=lambda index: memories[index].peak)
    engine = engine_memory(config, shape, batches.longest)
    check_engine(engine, batches.longest)
    count = count_rank(shape, layout, stages[worst])
    nodes = config.launch.server_nodes or (config.launch.nodes if config.sglang.gpus else 0)
    sync = traffic.sync_traffic(config, shape, count)
    return Plan(
        model_path=str(folder),
        family=shape.family,
        prediction_layers=count_prediction_layers(read_json(folder / "config.json")),
        layout=layout,
        server_gpus=nodes * config.sglang.servers * config.sglang.tp if config.rollout.engine_kind.server else 0,
        model=count_model(shape),
        rank=count,
        memory=memories[worst],
        stages=tuple(memories),
        engine=engine,
        gpu=check_gpus(config, memories[worst], engine),
        spare_weights=sync.sent if config.sglang.spare_weights == "memory" else 0,
        trace=traffic.trace_of(shape),
        batches=batches,
        step=traffic.step_traffic(config, shape, layout, stages[worst], batches),
        traffic=traffic.rank_traffic(config, shape, layout, stages[worst], count),
        sync=sync,
    )


def find_model(config: Config, model: Path | None) -> Path:
    """The first folder with a config.json: ``model``, model.path, or one shipped for the model's or run's name."""
    if model is not None:
        return model
    named = Path(config.model.path)
    for folder in (named, MODELS / named.name, MODELS / config.run.name):
        if os.path.lexists(folder / "config.json"):
            return folder
    looked = ", ".join(str(folder) for folder in (named, MODELS / named.name))
    raise ConfigError(
        f"model.path: found no config.json in {looked}; give the folder of one with --model, a checkpoint is not needed"
    )
