"""The facts of a page about runs: short names, the line at the head, and the settings in which runs differ."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.files.writing import read_record
from megarl.run.starts import INPUTS, TIME_FORMAT, read_starts

NOT_RECORDED = "not recorded"
_ASIDE = ("run.dir", "run.name", "sft.out")
"""Keys that name a run or its output."""
Settings = dict[str, Any]
"""By dotted key."""


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a name of each folder: the fewest last parts that differ, without common ends."""
    paths = [folder.resolve().parts for folder in folders]
    while len(paths) > 1 and len({path[-1:] for path in paths}) == 1:
        paths = [path[:-1] for path in paths]
    count = next(n for n in range(1, 1 + max(map(len, paths))) if len({path[-n:] for path in paths}) == len(paths))
    return [str(Path(*path[-count:])) for path in paths]


def head_line(folder: Path, settings: Settings) -> list[str]:
    """Return megarl's version, seed, start, last resumption and last sign of a run, and its folder."""
    starts, status = read_starts(folder), read_record(folder / "status.json")
    versions = " then ".join(dict.fromkeys(start["version"] for start in starts)) or "(version not recorded)"
    times = [("started" if start["new"] else "resumed", start["time"]) for start in starts[:1] + starts[1:][-1:]]
    if isinstance(updated := status.get("updated"), int | float) and 0 < updated < 1e11:
        times.append((str(status.get("state")), time.strftime(TIME_FORMAT, time.localtime(updated))))
    texts = [f"{event} {time_of[:16]}{time_of[19:]}" for event, time_of in times]
    return [f"megarl {versions}", f"seed {settings.get('run.seed', NOT_RECORDED)}", *texts, str(folder.resolve())]


def differing_settings(folders: Sequence[Path], settings: Sequence[Settings]) -> dict[str, list[str]]:
    """Return the keys of the configuration in which runs differ, and the value in each run.

    Inputs differ if their contents do (inputs.json); for files and folders besides, the names count.
    """
    inputs, rows = [read_record(folder / INPUTS) for folder in folders], dict[str, list[str]]()
    for key in sorted({key for of_run in settings for key in of_run}.difference(_ASIDE)):
        contents = [of_run.get(key) for of_run in inputs]
        marks = contents if all(contents) else [_last_part(of_run.get(key)) for of_run in settings if of_run]
        if any(mark != marks[0] for mark in marks):
            rows[f"{key} (content)" if all(contents) else key] = [_to_text(of_run, key) for of_run in settings]
    return rows


def _last_part(value: Any) -> Any:
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) and ":" not in value else value


def _to_text(settings: Settings, key: str) -> str:
    value = settings.get(key, "not set" if settings else NOT_RECORDED)
    return value if isinstance(value, str) else json.dumps(value, default=str)
