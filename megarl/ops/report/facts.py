"""What a page says about its runs: short names, the line at the head, and the settings in which runs differ."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megarl.files.writing import read_record
from megarl.run.starts import INPUTS, TIME_FORMAT, read_starts

_MOST_LETTERS = 48
"""Letters of a value in a table; a longer value is cut, and whole in the hover."""
_ASIDE = ("run.dir", "run.name", "sft.out")
"""Keys that name a run or its output."""


class Cell(NamedTuple):
    """A value in a table."""

    text: str
    whole: str = ""
    """For the hover, if the text is cut."""


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return a name of each folder: its last parts, the fewest that differ, without ends that all folders share."""
    parts = [folder.resolve().parts for folder in folders]
    while len(parts) > 1 and len({part[-1:] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    count = next(n for n in range(1, 1 + max(map(len, parts))) if len({part[-n:] for part in parts}) == len(parts))
    return [str(Path(*part[-count:])) for part in parts]


def head_line(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return name, megarl's version, seed, start and end of a run, and its folder."""
    run, starts = flatten(config), read_starts(folder)
    versions = " then ".join(dict.fromkeys(start["version"] for start in starts))
    begun = [("started" if start["new"] else "resumed", start["time"]) for start in starts[:1] + starts[1:][-1:]]
    status = read_record(folder / "status.json")
    updated, ends = status.get("updated"), {"starting": "last sign", "running": "last sign"}
    if isinstance(updated, int | float) and 0 < updated < 1e11:
        when = time.strftime(TIME_FORMAT, time.localtime(updated))
        begun.append((ends.get(str(status.get("state")), str(status.get("state"))), when))
    texts = [f"{how} {when[:16]}{when[19:]}" for how, when in begun]
    seed = f"seed {run.get('run.seed', 'not recorded')}"
    named = [f"run {run['run.name']}"] if "run.name" in run else []
    return [*named, f"megarl {versions or '(version not recorded)'}", seed, *texts, str(folder.resolve())]


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def differing_settings(folders: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Cell]]:
    """Return the keys of the configuration in which runs differ, and the value in each run.

    Inputs differ if their contents do (inputs.json); other files and folders, if their names do.
    """
    inputs, settings = [read_record(folder / INPUTS) for folder in folders], [*map(flatten, configs)]
    rows: dict[str, list[Cell]] = {}
    for key in sorted({key for of_run in settings for key in of_run}.difference(_ASIDE)):
        contents = [of_run.get(key) for of_run in inputs]
        label = f"{key} (content)" if all(contents) else key
        marks = contents if all(contents) else [_last_part(of_run.get(key)) for of_run in settings if of_run]
        if any(mark != marks[0] for mark in marks):
            rows[label] = [
                Cell("not recorded") if not of_run else _cell(of_run[key]) if key in of_run else Cell("not set")
                for of_run in settings
            ]
    return rows


def _last_part(value: Any) -> Any:
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) and ":" not in value else value


def _cell(value: Any) -> Cell:
    whole = value if isinstance(value, str) else json.dumps(value, default=str)
    text = str(_last_part(whole))
    text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
    return Cell(text, whole if whole != text else "")
