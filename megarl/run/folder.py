"""The folder of a run: the resolved configuration, and whether a start is new, a resumption or a mistake."""

import os
import secrets
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.file import RUN_ID, SAVED, read_toml
from megarl.errors import ConfigError, DataError
from megarl.files.outputs import free_name
from megarl.files.writing import write_atomically
from megarl.megatron.checkpoints.folders import complete_checkpoints
from megarl.megatron.checkpoints.manifest import read_run
from megarl.run.audit import Audit
from megarl.run.inputs import INPUTS, bind_inputs
from megarl.run.metrics_log import iterate_metrics

_FREE_TABLES = {"checkpoint", "launch", "log", "health", "eval", "sft", "recompute"}
"""Tables that may change before a resumption."""
_FREE_KEYS = {
    *("run.dir", "run.steps", "run.collective_timeout_s", "train.micro_batch_tokens", "optim.decay_steps"),
    *(f"reward_model.{key}" for key in ("urls", "concurrency", "timeout_s", "attempts", "api_key_env")),
    *("data.train", "data.heldout", "model.path", "model.reference"),  # compared by content: ``inputs``
    "model.trust_remote_code",
}
_FIXED_KEY = {"sglang": "fp8", "parallel": "distributed_optimizer"}
"""All other keys of the tables may change."""
_WRITTEN = (
    *(SAVED, INPUTS, "metrics.jsonl", "samples.jsonl", "responses.jsonl.gz", "status.json"),
    *("checkpoints", "traces"),
)
"""Names that a run overwrites, cuts or removes."""


def claim(config: Config, tell: Callable[[str], None] = lambda _: None) -> None:
    """Prepare the run folder on the main rank and save the resolved configuration there.

    ConfigError if the configuration does not continue the run in the folder: with other settings or inputs, or with
    ``checkpoint.resume`` off; and if no run wrote the content. More steps than before are fine. A run without a
    finished step does not count. tell: gets a line per accepted difference.
    """
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    saved, metrics = folder / SAVED, folder / "metrics.jsonl"
    checkpoints = complete_checkpoints(folder / "checkpoints")
    has_trained = bool(checkpoints) or _has_step(metrics)
    run = read_run_id(folder) or next(filter(None, (read_run(path) for _, path in checkpoints[::-1])), "")
    if not run and (foreign := [name for name in _WRITTEN if os.path.lexists(folder / name)]):
        raise ConfigError(
            f"run.dir: {folder} holds {', '.join(foreign)}, but no {RUN_ID}: no run wrote it. Nothing was changed; "
            "choose another run.dir, or move it away"
        )
    if saved.exists() and has_trained:
        _require_same_settings(config, folder, saved)
    if not read_run_id(folder):
        write_atomically(folder / RUN_ID, (run or secrets.token_hex(8)).encode())
    if accepted := bind_inputs(config, folder, has_trained, tell):
        Audit(folder).record_inputs(accepted)
    write_atomically(saved, config.to_toml().encode())
    if has_trained and not checkpoints:
        # Without a checkpoint the run and the records begin again. Keep the earlier records.
        shutil.copy2(metrics, free_name(folder / "metrics.earlier.jsonl"))


def _require_same_settings(config: Config, folder: Path, saved: Path) -> None:
    if not config.checkpoint.resume:
        raise ConfigError(
            f"{folder} holds a run and checkpoint.resume is off; choose another run.dir or remove the folder"
        )
    if not (settings := read_toml(saved)):
        raise ConfigError(
            f"{saved} is empty: put the settings of the run back, or remove the file to go on with today's"
        )
    if difference := _first_difference(settings, config):
        key, old, new = difference
        raise ConfigError(
            f"{folder} holds a run with {key} = {old!r} (config.toml), this one has {new!r}; choose another "
            "run.dir, remove the folder, or set the old value to continue it"
        )


def _has_step(metrics: Path) -> bool:
    """Return whether a run has recorded a step, not only the evaluation before step 1; a broken file counts."""
    try:
        return metrics.is_file() and any(record["kind"] == "step" for record in iterate_metrics(metrics))
    except DataError:
        return True


def read_run_id(folder: Path) -> str:
    """Return the run's name, which also the checkpoints carry; empty for a folder without a run."""
    file = folder / RUN_ID
    return file.read_text(errors="replace").strip() if file.is_file() else ""


def _first_difference(earlier: dict[str, Any], config: Config) -> tuple[str, Any, Any] | None:
    """Return (key, earlier value, present value). A key without an earlier value has the default."""
    now, stated = tomllib.loads(config.to_toml()), config.model_dump(exclude_none=True, exclude_defaults=True)
    for table in sorted({*earlier, *now} - _FREE_TABLES):
        old, new = earlier.get(table, {}), now.get(table, {})
        for key in sorted({*old, *stated.get(table, {})}):
            name = f"{table}.{key}"
            is_free = name in _FREE_KEYS or _FIXED_KEY.get(table, key) != key
            if not is_free and old.get(key) != new.get(key):
                return name, old.get(key), new.get(key)
    return None
