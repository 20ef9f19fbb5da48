"""The folder of a run: the resolved configuration, and whether a start is new, a resumption or a mistake.

``inputs.json`` holds what the run reads, by content: bytes and SHA-256 of files, whose places do not matter. A run goes
on only with the same inputs:

- ``data.train``, ``data.heldout``, ``eval.sets.NAME``: the whole file; of a folder or hub name every record, in order.
- ``model.path``, ``model.reference``: config.json, generation_config.json, the index; of each file of weights the size
  and the SHA-256. Above 64 MiB the SHA-256 covers the header and 64 blocks of 64 KiB at even distances.
- ``tokenizer``: every file of the model's folder for tokenizer or chat template, code included.
- ``reward.function`` and the other keys of ``megarl.config.trust.PLUGS``, not ``log.sinks``: the file of the
  named module.
"""

import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.file import RUN_ID, SAVED, read_toml
from megarl.config.trust import PLUGS
from megarl.data.benchmarks import HELDOUT, choose
from megarl.data.records import read_records, require_file
from megarl.errors import ConfigError, DataError, refusal, refuse_if
from megarl.files.outputs import free_name
from megarl.files.texts import read_table
from megarl.files.writing import read_record, sha256_of, write_atomically
from megarl.megatron.checkpoints.folders import complete_checkpoints, read_run
from megarl.run.metrics_log import iterate_metrics
from megarl.run.starts import INPUTS, record_start

_NAMES = read_table(__file__)


def claim(config: Config) -> None:
    """Prepare the run folder on the main rank and save the resolved configuration there.

    ConfigError if the configuration does not continue the run in the folder: with other settings or inputs, or with
    ``checkpoint.resume`` off; and if no run wrote the content. More steps than before are fine. A run without a
    finished step does not count.
    """
    folder = config.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    saved, metrics = folder / SAVED, folder / "metrics.jsonl"
    checkpoints = complete_checkpoints(folder / "checkpoints")
    has_trained = bool(checkpoints) or _has_step(metrics)
    run = read_run_id(folder) or next(filter(None, (read_run(path) for _, path in checkpoints[::-1])), "")
    if not run and (foreign := [name for name in _NAMES["written"] if os.path.lexists(folder / name)]):
        raise ConfigError(refusal("foreign_run_dir", folder=folder, foreign=", ".join(foreign), run_id=RUN_ID))
    if saved.exists() and has_trained:
        _require_same_settings(config, folder, saved)
    if not read_run_id(folder):
        write_atomically(folder / RUN_ID, (run or secrets.token_hex(8)).encode())
    bind_inputs(config, folder, has_trained)
    write_atomically(saved, config.to_toml().encode())
    record_start(folder, not checkpoints)
    if has_trained and not checkpoints:
        # Without a checkpoint the run and the records begin again. Keep the earlier records.
        shutil.copy2(metrics, free_name(folder / "metrics.earlier.jsonl"))


def _require_same_settings(config: Config, folder: Path, saved: Path) -> None:
    refuse_if(not config.checkpoint.resume, ConfigError, "no_resume", folder=folder)
    if not (settings := read_toml(saved)):
        raise ConfigError(refusal("empty_config", saved=saved))
    if difference := _first_difference(settings, config):
        key, old, new = difference
        raise ConfigError(refusal("other_settings", folder=folder, key=key, old=old, new=new))


def _has_step(metrics: Path) -> bool:
    """Return whether a run has recorded a step, not only the evaluation before step 1; a broken file counts."""
    with suppress(DataError):
        return metrics.is_file() and any(record["kind"] == "step" for record in iterate_metrics(metrics))
    return True


def read_run_id(folder: Path) -> str:
    """Return the run's name, which also the checkpoints carry; empty for a folder without a run."""
    file = folder / RUN_ID
    return file.read_text(errors="replace").strip() if file.is_file() else ""


def _first_difference(earlier: dict[str, Any], config: Config) -> tuple[str, Any, Any] | None:
    """Return (key, earlier value, present value). A key without an earlier value has the default."""
    now, stated = tomllib.loads(config.to_toml()), config.model_dump(exclude_none=True, exclude_defaults=True)
    for table in sorted({*earlier, *now} - {*_NAMES["free_tables"]}):
        old, new = earlier.get(table, {}), now.get(table, {})
        for key in sorted({*old, *stated.get(table, {})}):
            name = f"{table}.{key}"
            is_free = name in _NAMES["free_keys"] or _NAMES["fixed_key"].get(table, key) != key
            if not is_free and old.get(key) != new.get(key):
                return name, old.get(key), new.get(key)
    return None


Fingerprint = Mapping[str, str]
"""Bytes and SHA-256 of each file by name."""
_MODULE = re.compile(r"\b([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_WHOLE_BYTES, _HEADER_BYTES, _BLOCK_BYTES, _BLOCKS = 64 << 20, 100_000_000, 64 << 10, 64


def bind_inputs(config: Config, folder: Path, goes_on: bool) -> None:
    """Compare the inputs with the first inputs of the run in ``folder``, and record them.

    goes_on: whether there is a run to continue. ConfigError naming each differing input; without the record, the run
    goes on with the present inputs.
    """
    now = fingerprint_inputs(config)
    recorded: Any = read_record(folder / INPUTS) if goes_on else {}
    # A benchmark of [eval] may come or go: a new benchmark has no earlier figures to be confused with.
    names = {name for name in {*recorded, *now} if not name.startswith("eval.sets.")} | ({*recorded} & {*now})
    differing = [name for name in sorted(names) if recorded and recorded.get(name) != now.get(name)]
    if differing:
        changes = "; ".join(f"{name} ({_describe(recorded.get(name), now.get(name))})" for name in differing)
        raise ConfigError(refusal("other_inputs", folder=folder, changes=changes, inputs=folder / INPUTS))
    write_atomically(folder / INPUTS, json.dumps(now, indent=1).encode())


def fingerprint_inputs(config: Config) -> dict[str, Fingerprint]:
    """Return the inputs of a run by name; DataError for a prompt file that is missing or broken."""
    inputs = {**fingerprint_model(config), "data.train": fingerprint_data(config.data.train, config.data.split)}
    if config.model.reference:
        inputs["model.reference"] = fingerprint_files(Path(config.model.reference), _NAMES["weights"])
    for benchmark in choose((), config) if config.benchmarks else ():
        name = "data.heldout" if benchmark.name == HELDOUT else f"eval.sets.{benchmark.name}"
        inputs[name] = fingerprint_data(benchmark.source, benchmark.split)
    for key in PLUGS:
        table, _, name = key.partition(".")
        if table in _NAMES["free_tables"]:
            continue
        value = json.dumps(getattr(getattr(config, table), name), default=str)
        files = {module: _module_file(module) for module in _MODULE.findall(value)}
        if digests := {module: _digest_file(file) for module, file in files.items() if file is not None}:
            inputs[key] = digests
    return inputs


def fingerprint_model(config: Config) -> dict[str, Fingerprint]:
    """Return the initial model and tokenizer."""
    kinds = {"model.path": "weights", "tokenizer": "tokenizer"}
    return {name: fingerprint_files(Path(config.model.path), _NAMES[kind]) for name, kind in kinds.items()}


def fingerprint_data(source: str, split: str | None = None) -> Fingerprint:
    """Return the content of a source of records; sources and errors as of ``megarl.data.records.read_records``."""
    require_file(source)
    if Path(source).is_file():
        return {"content": _digest_file(Path(source))}
    digest, count = hashlib.sha256(), 0
    for _, row in read_records(source, split=split):
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode())
        count += 1
    return {"content": f"{count} records, sha256 {digest.hexdigest()}"}


def fingerprint_files(folder: Path, patterns: Iterable[str]) -> Fingerprint:
    """Return the files of a folder whose names fit; large files by samples."""
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    with ThreadPoolExecutor(8) as pool:
        return dict(zip((file.name for file in files), pool.map(_digest_file, files), strict=True))


def _digest_file(file: Path) -> str:
    size = file.stat().st_size
    if file.suffix != ".safetensors" or size <= _WHOLE_BYTES:
        return f"{size} bytes, sha256 {sha256_of(file)}"
    digest = hashlib.sha256()
    for block in _sample(file, size):
        digest.update(block)
    return f"{size} bytes, sha256 of samples {digest.hexdigest()}"


def _sample(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        length = stream.read(8)
        yield length
        yield stream.read(min(int.from_bytes(length, "little"), _HEADER_BYTES))
        for number in range(_BLOCKS):
            stream.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
            yield stream.read(_BLOCK_BYTES)


def _module_file(module: str) -> Path | None:
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module)
        return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None
    return None


def _describe(recorded: Any, now: Fingerprint | None) -> str:
    """Return the differences, file by file."""
    if not isinstance(recorded, dict) or now is None:
        return "there is none now" if now is None else "there was none"
    names = [name for name in sorted({*recorded, *now}) if recorded.get(name) != now.get(name)]
    changes = [f"{name}: {recorded.get(name, 'not there')} before, {now.get(name, 'not there')} now" for name in names]
    return ", ".join(changes[:2]) + (f" and {len(changes) - 2} more" if len(changes) > 2 else "")
