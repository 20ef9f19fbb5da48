"""What a configuration can do with its model: the rules that need config.json. Doctor, plan and train all ask here."""

from dataclasses import fields
from pathlib import Path

from megarl.config import Config
from megarl.core.replay_blockers import replay_blockers
from megarl.errors import ConfigError
from megarl.models.shapes import ModelShape, read_shape


def check_fit(config: Config, shape: ModelShape) -> None:
    """ConfigError, naming the key, for a setting that needs what is not there: experts, routes, keys and values."""
    if config.rollout.fp8_kv_cache and shape.fields.get("multi_latent_attention"):
        raise ConfigError(
            f"rollout.fp8_kv_cache: found true with the {shape.family} model in model.path: FP8 engines keep its "
            "latents, the local engine keeps keys and values; set it to false"
        )
    train = config.train
    if shape.moe_layers:
        wishes = {
            "train.max_native_flip": isinstance(train.max_native_flip, float),
            "log.traces_every": config.log.traces_every,
        }
        for key in (key for key, is_set in wishes.items() if is_set and not can_compare(config, shape)):
            raise ConfigError(
                f"{key}: found without routes to compare or write: the engine returns none, or a setting in [megatron] "
                "hides the routers (see `megarl doctor`); remove it"
            )
        return
    replay, flip, every, ep = train.replay, train.max_native_flip, config.log.traces_every, config.parallel.ep
    watched = "no routers to watch; remove it (train.max_k3 watches the engines)"
    for is_wrong, found, lacking in (
        (replay != "none", f'train.replay: found "{replay}", expected "none"', "no routes to replay"),
        (isinstance(flip, float), f"train.max_native_flip: found {flip}", watched),
        (every, f"log.traces_every: found {every}, expected 0", "no routes to write"),
        (ep > 1, f"parallel.ep: found {ep}, expected 1", "no experts; remove it"),
    ):
        if is_wrong:
            raise ConfigError(f"{found}: the {shape.family} model in model.path is dense, and has {lacking}")


def check_reference(path: str | Path, policy: ModelShape) -> None:
    """ConfigError if the folder of model.reference holds no model of the policy's architecture."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.reference: {path} holds no config.json; expected a Hugging Face checkpoint folder")
    found = read_shape(path)
    for name in (field.name for field in fields(ModelShape) if field.name not in ("family", "max_sequence_length")):
        if getattr(found, name) != getattr(policy, name):
            raise ConfigError(
                f"model.reference: {path} has {name} {getattr(found, name)}, the policy {getattr(policy, name)}; "
                "expected the same architecture"
            )


def watches_routes(config: Config, shape: ModelShape) -> bool:
    """Whether training compares its routers with the engine's routes: the tripwire of native flip."""
    return can_compare(config, shape) and config.train.max_native_flip != "off"


def can_compare(config: Config, shape: ModelShape) -> bool:
    """Whether the routers of training can be compared with the engine's routes."""
    return bool(shape.moe_layers) and config.rollout.engine_kind.routes and not replay_blockers(config.megatron)


def wants_routes(config: Config, shape: ModelShape, done: int | None = None) -> bool:
    """Whether the engine is asked for routes: to replay (r3), to watch (``watches_routes``), or to write them.

    done: the number of the step, from 1; None asks about any step of the run.
    """
    if not shape.moe_layers or not config.rollout.engine_kind.routes:
        return False
    writes = config.log.traces_every > 0 if done is None else config.log.writes_traces(done)
    return config.train.replay == "r3" or writes or watches_routes(config, shape)


def servers_record(config: Config) -> bool:
    """Whether servers are to record routes; assumed of a model that is not on this machine."""
    is_here = (Path(config.model.path) / "config.json").is_file()
    return not is_here or wants_routes(config, read_shape(config.model.path))
