"""``megarl status``: the state of a run, from its files, whether or not it still runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megarl.data.files import read_record
from megarl.errors import ConfigError
from megarl.run.lock import is_held, read_holder
from megarl.run.signs import describe_ranks, read_signs

ALIVE, DEAD = 0, 1
_QUIET_S = 30.0


def show(run_dir: Path, as_json: bool = False) -> int:
    """Print the status; returns 0, or 1 for a run that has failed or is lost."""
    found = read_status(run_dir)
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))
    return DEAD if found["state"] in ("failed", "lost") else ALIVE


def read_status(run_dir: Path) -> dict[str, Any]:
    """status.json and more: "checkpoint" is the newest complete one, "where" says where the ranks are. "state" is
    "lost" if the file says that the run goes on, but no process holds its lock. ConfigError if there is no run."""
    path = run_dir / "status.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        begun = _read_launch(run_dir)
        if begun:
            raise ConfigError(f"{run_dir}: no rank has written a status; the launcher says: {begun['says']}") from None
        raise ConfigError(f"found no {path}: {run_dir} is no folder of a run that has begun") from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); a running run rewrites it every few seconds") from None
    now = time.time()
    lock = run_dir / "lock"
    if found["state"] in ("starting", "running") and not is_held(lock):
        found["state"] = "lost"
    found["silent_s"] = now - found["updated"]
    found["checkpoint"] = newest_checkpoint(run_dir)
    found["holder"] = read_holder(lock)
    found["where"] = describe_ranks(read_signs(run_dir, found["ranks"]), now) if found["state"] != "finished" else None
    found["launch"] = _read_launch(run_dir)
    return found


def _read_launch(run_dir: Path) -> dict[str, Any] | None:
    """launch.json; None if there is none. If the launcher is gone, "says" tells so and what it wrote last."""
    found = read_record(run_dir / "launch.json")
    if not found:
        return None
    ended = found["says"].startswith(("finished", "stopped", "gave up"))
    if not ended and not is_held(run_dir / "launch.lock"):
        found["says"] = f"gone; its last word: {found['says']}"
    return found


def newest_checkpoint(run_dir: Path) -> str | None:
    """Name of the newest complete checkpoint of a run, found without importing Megatron."""
    return max((path.name for path in run_dir.glob("checkpoints/step_???????")), default=None)


def _lines(found: dict[str, Any]) -> list[str]:
    state = {"lost": "lost: its processes are gone, start it again to continue"}.get(found["state"], found["state"])
    lines = [("state", state), ("step", f"{found['step']} of {found['steps']}")]
    if found["state"] == "running":
        lines.append(("phase", f"{found['phase']}, for {_duration(time.time() - found['phase_since'])}"))
    if found["step_s"] is not None:
        tokens = f", {found['tokens_per_s']:.0f} tokens/s" if found["tokens_per_s"] is not None else ""
        lines.append(("speed", f"{found['step_s']:.1f} s per step{tokens}"))
    if found["eta_s"] is not None and found["state"] == "running":
        lines.append(("to go", _duration(found["eta_s"])))
    lines.append(("checkpoint", found["checkpoint"] or "none"))
    if found["job"]:
        again = f", restart {found['restart']}" if found["restart"] else ""
        lines.append(("job", f"{found['job']}{again}"))
    lines.append(("main rank", f"process {found['pid']} on {found['host']}"))
    if found["launch"]:
        lines.append(("launcher", found["launch"]["says"]))
    if found["silent_s"] > _QUIET_S and found["state"] == "running":
        lines.append(("silent", f"for {_duration(found['silent_s'])}"))
    if found["last_error"]:
        lines.append(("last error", f"{found['error_kind']}: {found['last_error']}"))
    if found["where"]:
        lines.append(("ranks", found["where"]))
    return [f"{name + ':':<12}{text}" for name, text in lines]


def _duration(seconds: float) -> str:
    """E.g. "2 h 05 min", "3 min 20 s", "12 s"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
