"""starts.jsonl: when a run was started or resumed, and with which megarl. inputs.json: what each start reads."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.run.fields import require_fields

INPUTS = "inputs.json"
"""Written by ``megarl.run.folder``."""
TIME_FORMAT = "%Y-%m-%d %H:%M:%S %z"


def record_start(folder: Path, is_new: bool) -> None:
    """Append a start, on one rank only; is_new: nothing of an earlier start goes on."""
    start = {"time": time.strftime(TIME_FORMAT), "version": __version__, "new": is_new}
    with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(("\n" if file.tell() else "") + json.dumps(start))  # apart from a line that a kill has cut


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the starts of the run (fields.toml), oldest first. Damaged lines are skipped.

    The first is not "new" if an earlier megarl, without this file, began the run.
    """
    file, starts = folder / "starts.jsonl", list[dict[str, Any]]()
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        with suppress(ValueError, RecursionError):
            start = json.loads(line)
            require_fields(start, "start")
            starts = [start] if start["new"] else [*starts, start]
    return starts
