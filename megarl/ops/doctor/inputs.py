"""What a configuration names, examined without torch: model, data, keys, disk, servers, [launch]."""

import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from megarl.config import Config
from megarl.config.tables.data import FILES
from megarl.data.records import get_field, read_records
from megarl.data.rewards import BUILT_IN_REWARDS
from megarl.errors import CheckpointError, ConfigError, DataError, MegarlError, reason_of
from megarl.files.foreign_json import read_object
from megarl.files.hf_config import MoeShape
from megarl.files.writing import model_files
from megarl.models.hf_folder import weight_files
from megarl.models.shapes import ModelShape, read_shape
from megarl.ops.doctor.report import Finding, find
from megarl.ops.launch import steps
from megarl.run.sinks import load_sink

_WAIT_S = 5.0
_SIGNAL_S = 300
"""--signal=B:USR1@300 in the scripts."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt", "spiece.model")


def read_model(config: Config) -> tuple[list[Finding], ModelShape | None]:
    """Return (checks, shape); the shape is None without a readable config.json."""
    folder = Path(config.model.path)
    if not os.path.lexists(folder / "config.json"):
        problem = f"{folder} has no config.json" if folder.is_dir() else f"there is no folder {folder}"
        return [find("no_config_json", problem=problem, folder=folder, here=Path.cwd())], None
    try:
        shape = read_shape(folder)
    except (MegarlError, OSError, ValueError) as error:
        checks = [Finding("model.path", "failed", str(error), advice="" if ";" in str(error) else "mend the file")]
        with suppress(MegarlError, OSError, ValueError):
            if (moe := MoeShape.of(read_object(folder / "config.json"))).moe_layers:
                checks.append(Finding("routes", "ok", f"{moe}: verify and the plug-in take the model"))
        return checks, None
    checks = [Finding("model.path", "ok", shape.family)]
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        checks.append(find("no_tokenizer", folder=folder, files=", ".join(_TOKENIZERS)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        try:
            if os.path.lexists(folder / name):
                read_object(folder / name)
        except DataError as error:
            checks.append(find("damaged_tokenizer", error=error))
    try:
        weight_files(folder)
        list(model_files(folder))
    except (CheckpointError, ConfigError) as error:
        checks.append(Finding("weights", "failed", str(error)))
    return checks, shape


def require_inputs(config: Config, stage: Literal["rl", "sft", "eval"] = "rl") -> None:
    """ConfigError for files, keys and functions without which a stage cannot begin.

    Takes less than a second, before torch and Megatron are imported. The data of an evaluation are checked with the
    evaluation's request.
    """
    checks = [*read_model(config)[0], *_check_keys(config)]
    if stage != "eval":
        checks += [check for check in _check_data(config) if (check.name == "sft.data") == (stage == "sft")]
    checks += [*_check_reward(config), *_check_sinks(config)] if stage == "rl" else []
    if failed := [f"{check.name}: {check.says()}" for check in checks if check.status == "failed"]:
        raise ConfigError("; ".join(failed))


def check_inputs(config: Config, shape: ModelShape | None) -> Iterator[Finding]:
    """Yield checks of data, reward, keys, disk, running servers and [launch]."""
    for check in (_check_data, _check_reward, _check_keys, _check_sinks, _check_urls, _check_launch):
        yield from check(config)
    yield _check_disk(config, shape)


def _check_data(config: Config) -> Iterator[Finding]:
    data, fields, sft = config.data, (config.data.prompt_field, config.data.answer_field), config.sft
    yield _check_source("data.train", data.train, data.split, fields)
    if data.heldout is not None:
        yield _check_source("data.heldout", data.heldout, data.resolved_heldout_split, fields)
    if sft is not None:
        yield _check_source("sft.data", sft.data, None, (sft.prompt_field, sft.response_field), sft.messages_field)
    for name, source in config.eval.sets.items():
        if source.endswith(FILES):
            yield _check_source(f"eval.sets.{name}", source, None, ())


def _check_source(key: str, source: str, split: str | None, fields: Sequence[str], chat: str | None = None) -> Finding:
    """Read the first record of a file, and look for the fields, or for ``chat`` where the first is absent."""
    path = Path(source)
    if path.is_dir():
        return find("data_folder", key=key, source=source)
    if not path.is_file() and path.suffix not in FILES:
        return find("data_of_hub", key=key, source=source)
    try:
        place, record = next(read_records(source, split=split, limit=1))
        fields = (chat,) if chat in record and fields[0] not in record else fields
        for field in fields:
            get_field(record, field, place)
    except ImportError as error:
        return find("data_needs_package", key=key, source=source, package=error.name)
    except (MegarlError, OSError) as error:
        return Finding(key, "failed", str(error))
    return find("data", key=key, source=source, fields=", ".join(fields) or "fields")


def _check_reward(config: Config) -> Iterator[Finding]:
    try:
        if config.reward.function not in (*BUILT_IN_REWARDS, "reward_model"):
            from megarl.data.judge import load_reward  # takes pebble

            with redirect_stdout(sys.stderr):  # the report has stdout for itself
                load_reward(config.reward.function, config.reward_model)
    except (ConfigError, ImportError) as error:
        yield _refused("reward.function", error)


def _refused(key: str, error: Exception) -> Finding:
    """Return the finding of an error about a key, which the message names too."""
    return Finding(key, "failed", str(error).removeprefix(f"{key}: "))


def _check_keys(config: Config) -> Iterator[Finding]:
    for table in ("sglang", "reward_model"):
        variable = getattr(config, table).api_key_env
        if variable is not None and not os.environ.get(variable):
            yield find("no_key", table=table, variable=variable)


def _check_sinks(config: Config) -> Iterator[Finding]:
    for name in config.log.sinks:
        try:
            load_sink(name)
        except ConfigError as error:
            yield _refused("log.sinks", error)
    signed_in = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") not in ("online", "run")
    if "wandb" in config.log.sinks and not signed_in and not Path("~/.netrc").expanduser().is_file():
        yield find("wandb")


def _check_disk(config: Config, shape: ModelShape | None) -> Finding:
    folder = config.run_dir.absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return find("run_dir_unwritable", folder=existing)
    free = shutil.disk_usage(existing).free
    room = f"{free / 2**30:.1f} GiB free in {existing}"
    try:
        from megarl.ops.plan.layout import count_model

        parameters = 0 if shape is None else count_model(shape).total
    except ImportError:  # no torch
        parameters = 0
    if not parameters:
        return find("run_dir_without_size", room=room)
    element = 4 if config.model.dtype == "fp32" else 2
    # Adam keeps two fp32 moments of each weight, and an fp32 main weight unless the weights are fp32.
    checkpoint = parameters * (element + (8 if element == 4 else 12))
    number = 1 + config.checkpoint.keep if config.checkpoint.every else 1
    on_disk = (config.weight_sync == "disk") + (config.sglang.spare_weights == "disk")
    copies = 2 * on_disk * element * parameters if config.rollout.engine_kind.server else 0
    total = checkpoint * number + copies
    needed = f"{total / 2**30:.1f} GiB: {number} checkpoints of {checkpoint / 2**30:.1f} GiB"
    needed += f", {copies / 2**30:.1f} GiB of weights for servers" if copies else ""
    return find("run_dir_full" if free < total else "run_dir", room=room, needed=needed)


def _check_urls(config: Config) -> Iterator[Finding]:
    """Connect to each reward server; ``megarl.engines.sglang.server`` examines SGLang's servers."""
    for url in config.reward_model.urls:
        address = urlsplit(url)
        try:
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), _WAIT_S).close()
            yield find("reward_server", url=url)
        except (OSError, ValueError) as error:
            yield find("no_reward_server", url=url, error=reason_of(error))


def _check_launch(config: Config) -> Iterator[Finding]:
    launch = config.launch
    for variable in ("MEGARL_SETUP", "MEGARL_PYTHON"):
        program = os.environ.get(variable)
        if program and not (Path(program).is_file() or shutil.which(program)):
            yield find("no_program", variable=variable, program=program)
    if launch.layout != "local":
        if absent := [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name) is None]:
            yield find("no_slurm", layout=launch.layout, programs=", ".join(absent))
        if launch.stop_grace_s >= _SIGNAL_S:
            yield find("long_grace", grace_s=launch.stop_grace_s, signal_s=_SIGNAL_S)
        try:
            steps.srun([])
            if "SLURM_JOB_ID" in os.environ:
                steps.find(config, os.environ)
        except ConfigError as error:
            yield Finding("launch", "failed", str(error))
            return
    yield find("launch", **dict(launch))


def check_gpus(config: Config, gpus: int) -> Iterator[Finding]:
    """Yield checks that a local run has enough GPUs on this machine; no checks on a machine without GPUs."""
    if config.launch.layout != "local" or not gpus:
        return
    if config.launch.ranks_per_node > gpus:
        yield find("few_gpus", ranks=config.launch.ranks_per_node, gpus=gpus)
    if config.sglang.gpus and max(config.sglang.gpus) >= gpus and config.rollout.engine_kind.server:
        yield find("absent_gpus", named=config.sglang.gpus, last=gpus - 1)
