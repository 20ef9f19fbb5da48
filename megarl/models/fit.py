"""Whether a configuration fits the model's config.json; asked by doctor, plan, init and the trainer."""

from dataclasses import fields
from pathlib import Path

from megarl.config import Config
from megarl.config.refusals.model import for_model, for_reference
from megarl.config.tables.base import refuse, row
from megarl.core.fp8_names import is_known_precision
from megarl.core.replay_blockers import replay_blockers
from megarl.errors import some
from megarl.models.names import rules_of
from megarl.models.shapes import ModelShape, read_shape


def check_fit(config: Config, shape: ModelShape) -> None:
    """ConfigError, naming the key, for a setting that needs absent experts, routes, keys or values, and for FP8
    engines of a model with matrices of which megarl does not know whether engines hold them in FP8."""
    refuse(for_model(config, shape, can_compare(config, shape)))
    keys = {"sglang.fp8": config.sglang.fp8, "rollout.fp8_rounding": config.rollout.fp8_rounding}
    for key in (key for key, is_set in keys.items() if is_set):
        unknown = unknown_precisions(shape)
        refuse([row("fp8_unknown", unknown, key=key, family=shape.family, matrices=some(unknown))])


def unknown_precisions(shape: ModelShape) -> list[str]:
    """Return the names of matrices that FP8 engines are not known to hold in FP8 or in high precision."""
    tensors = ((name, dims) for rule in rules_of(shape) for name, dims in zip(rule.hf, rule.dims, strict=True))
    return [name for name, dims in tensors if " " in dims and not is_known_precision(name)]


def check_reference(path: str | Path, policy: ModelShape) -> None:
    """ConfigError if the folder of model.reference holds no model of the policy's architecture."""
    names = [field.name for field in fields(ModelShape) if field.name not in ("family", "max_sequence_length")]
    reference = read_shape(path) if (Path(path) / "config.json").is_file() else None
    values = None if reference is None else {name: getattr(reference, name) for name in names}
    refuse(for_reference(str(path), values, {name: getattr(policy, name) for name in names}))


def watches_routes(config: Config, shape: ModelShape) -> bool:
    """Whether training compares its routers with the engine's routes: the tripwire of native flip."""
    return can_compare(config, shape) and config.train.max_native_flip != "off"


def can_compare(config: Config, shape: ModelShape) -> bool:
    """Whether the routers of training can be compared with the engine's routes."""
    return bool(shape.moe_layers) and config.rollout.engine_kind.routes and not replay_blockers(config.megatron)


def wants_routes(config: Config, shape: ModelShape, done: int | None = None) -> bool:
    """Whether the engine is asked for routes: to replay (r3), to watch (``watches_routes``), or to write routes.

    done: the number of the step, from 1; None: any step of the run.
    """
    if not shape.moe_layers or not config.rollout.engine_kind.routes:
        return False
    writes = config.log.traces_every > 0 if done is None else config.log.writes_traces(done)
    return config.train.replay == "r3" or writes or watches_routes(config, shape)


def servers_record(config: Config) -> bool:
    """Whether servers record routes; assumed of a model on another machine."""
    is_here = (Path(config.model.path) / "config.json").is_file()
    return not is_here or wants_routes(config, read_shape(config.model.path))
