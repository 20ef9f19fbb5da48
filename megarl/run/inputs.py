"""``inputs.json`` in a run's folder: what the run reads, by content. A run goes on only with the same inputs.

An input is a set of files, with bytes and SHA-256. The place of a file does not matter.

- ``data.train``, ``data.heldout``, ``eval.sets.NAME``: the whole file; of a folder or hub name every record, in order.
- ``model.path``, ``model.reference``: config.json, generation_config.json, the index; of each file of weights the size
  and the SHA-256. Above 64 MiB the SHA-256 covers the header and 64 blocks of 64 KiB at even distances.
- ``tokenizer``: every file of the model's folder for tokenizer or chat template, code included.
- ``reward.function`` and the other keys of ``megarl.config.trust.PLUGS``: the file of the named module.
"""

import hashlib
import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.trust import PLUGS
from megarl.data.benchmarks import HELDOUT, choose
from megarl.data.records import read_records, require_file
from megarl.errors import ConfigError
from megarl.files.writing import read_record, sha256_of, write_atomically

INPUTS = "inputs.json"
Fingerprint = Mapping[str, str]
"""Bytes and SHA-256 of each file by name."""
_WEIGHTS = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json")
_TOKENIZER = (
    *("tokenizer*", "*token*.json", "vocab*", "merges*", "spiece*", "sentencepiece*", "*.model", "*.tiktoken"),
    *("chat_template*", "*.jinja", "*.py"),
)
_MODULE = re.compile(r"\b([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_WHOLE_BYTES, _HEADER_BYTES, _BLOCK_BYTES, _BLOCKS = 64 << 20, 100_000_000, 64 << 10, 64


def bind_inputs(config: Config, folder: Path, goes_on: bool, tell: Callable[[str], None]) -> list[str]:
    """Compare the inputs with the first inputs of the run in ``folder``, and record them; return accepted differences.

    goes_on: whether there is a run to continue. ConfigError naming each differing input, unless
    ``checkpoint.accept_inputs`` has "NAME:DIGEST".
    """
    now = fingerprint_inputs(config)
    record: Any = read_record(folder / INPUTS) if goes_on else {}
    recorded: Any = record.get("inputs") if isinstance(record.get("inputs"), dict) else {}
    # A benchmark of [eval] may come or go: a new benchmark has no earlier figures to be confused with.
    names = {name for name in {*recorded, *now} if not name.startswith("eval.sets.")} | ({*recorded} & {*now})
    differing = [name for name in sorted(names) if goes_on and recorded.get(name) != now.get(name)]
    changes = {name: f"{name} ({_describe(recorded.get(name), now.get(name))})" for name in differing}
    accepted = {name: f"{name}:{digest_of(now.get(name))}" for name in differing}
    if refused := [name for name in differing if accepted[name] not in config.checkpoint.accept_inputs]:
        raise ConfigError(
            f"{folder} holds a run that began with other inputs: {'; '.join(changes[name] for name in refused)}. "
            "Put back what the run began with, choose another run.dir, or go on with the new inputs by "
            "checkpoint.accept_inputs = "
            f"{json.dumps([*config.checkpoint.accept_inputs, *(accepted[name] for name in refused)])}"
        )
    for name in differing:
        tell(f"warning: {name} is not what the run began with{changes[name].removeprefix(name)}; accepted")
    history = record.get("accepted") if isinstance(record.get("accepted"), list) else []
    history += [{"input": accepted[name], "before": recorded.get(name), "time": time.time()} for name in differing]
    write_atomically(folder / INPUTS, json.dumps({"inputs": now, "accepted": history}, indent=1).encode())
    return [*accepted.values()]


def fingerprint_inputs(config: Config) -> dict[str, Fingerprint]:
    """Return the inputs of a run by name; DataError for a prompt file that is missing or broken."""
    inputs = {**fingerprint_model(config), "data.train": fingerprint_data(config.data.train, config.data.split)}
    if config.model.reference:
        inputs["model.reference"] = fingerprint_files(Path(config.model.reference), _WEIGHTS)
    for benchmark in choose((), config) if config.benchmarks else ():
        name = "data.heldout" if benchmark.name == HELDOUT else f"eval.sets.{benchmark.name}"
        inputs[name] = fingerprint_data(benchmark.source, benchmark.split)
    for key in PLUGS:
        table, _, name = key.partition(".")
        value = json.dumps(getattr(getattr(config, table), name), default=str)
        files = {module: _module_file(module) for module in _MODULE.findall(value)}
        if digests := {module: _digest_file(file) for module, file in files.items() if file is not None}:
            inputs[key] = digests
    return inputs


def fingerprint_model(config: Config) -> dict[str, Fingerprint]:
    """Return the initial model and tokenizer."""
    model = Path(config.model.path)
    return {"model.path": fingerprint_files(model, _WEIGHTS), "tokenizer": fingerprint_files(model, _TOKENIZER)}


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


def digest_of(fingerprint: Mapping[str, Any] | None) -> str:
    """Return a short name of an input's content."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:12]


def _describe(recorded: Any, now: Fingerprint | None) -> str:
    """Return the differences, file by file."""
    if not isinstance(recorded, dict) or now is None:
        return "there is none now" if now is None else "there was none, or no record of it, as of earlier releases"
    names = [name for name in sorted({*recorded, *now}) if recorded.get(name) != now.get(name)]
    changes = [f"{name}: {recorded.get(name, 'not there')} before, {now.get(name, 'not there')} now" for name in names]
    return ", ".join(changes[:2]) + (f" and {len(changes) - 2} more" if len(changes) > 2 else "")
