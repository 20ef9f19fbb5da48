"""``megarl status``, and further readers of the files about a run's state.

``megarl.run.vitals`` writes the signs of life. ``megarl launch`` sees exit codes only, and reads the cause here.
"""

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from megarl.errors import ConfigError, MegarlError, printable, refuse_if
from megarl.files.foreign_json import read_object
from megarl.files.writing import read_record
from megarl.run.fields import require_fields
from megarl.run.lock import is_held

FAILURE_VARIABLE = "MEGARL_FAILURE"
"""The environment variable with the path of the file that ``write_failure`` writes."""
_QUIET_S = 30.0
_LARGEST = 1e12
_MOST_RANKS = 1 << 20


def show(run_dir: Path, as_json: bool = False) -> int:
    """Print the status; returns 0, or 1 for a run that has failed or is lost. ConfigError if there is no run."""
    status = read_status(run_dir)
    print(json.dumps(status, default=asdict) if as_json else "\n".join(map(printable, _lines(status))))
    return int(status["state"] in ("failed", "lost"))


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return status.json and more. "state" is "lost" for a running state without a holder of the lock.

    ConfigError if there is no run, or if the file is damaged.
    """
    path = run_dir / "status.json"
    try:
        path.lstat()
        status = read_object(path)
        require_fields(status, "status", _LARGEST)
        refuse_if(status["ranks"] > _MOST_RANKS, ValueError, "ranks_of_status", status=status)
        status["health"] = _VERDICTS.validate_python(status.get("health"))  # None: no step is judged
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged: health: {error.errors()[0]['msg']}") from None
    except (FileNotFoundError, NotADirectoryError):
        if launch := _read_launch(run_dir):
            raise ConfigError(f"{run_dir}: no rank has written a status; the launcher says: {launch['says']}") from None
        raise ConfigError(f"found no {path}: {run_dir} is no folder of a run that has begun") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is damaged ({error}); a running run rewrites it every few seconds") from None
    now, lock = time.time(), run_dir / "lock"
    if status["state"] in ("starting", "running") and not is_held(lock):
        status["state"] = "lost"
    has_finished = status["state"] == "finished"
    return status | {
        "silent_s": now - status["updated"],
        "checkpoint": newest_checkpoint(run_dir),
        "where": None if has_finished else describe_ranks(read_signs(run_dir, status["ranks"]), now),
        "launch": _read_launch(run_dir),
    }


def _read_launch(run_dir: Path) -> dict[str, Any] | None:
    """Return launch.json or None. If the launcher is gone, "says" holds the launcher's last word."""
    record = read_record(run_dir / "launch.json")
    if not record:
        return None
    if not isinstance(record.get("says"), str):
        return record | {"says": "launch.json is damaged"}
    if not record["says"].startswith(("finished", "stopped", "gave up")) and not is_held(run_dir / "launch.lock"):
        record["says"] = f"gone; its last word: {record['says']}"
    return record


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the name of the newest complete checkpoint; without importing Megatron."""
    return max((path.name for path in run_dir.glob("checkpoints/step_???????")), default=None)


def _lines(status: dict[str, Any]) -> list[str]:
    state, job, launch = status["state"], status["job"], status["launch"]
    is_running, verdicts = state == "running", status["health"]
    tokens = f", {status['tokens_per_s']:.0f} tokens/s" if status["tokens_per_s"] is not None else ""
    gaps = {"k3": "k3 {:.1e}", "native_flip": "native flip {:.2%}", "dropped": "{:.0f} responses dropped"}
    engines = [text.format(status[name]) for name, text in gaps.items() if isinstance(status.get(name), float)]
    lines = {
        "state": state + (": its processes are gone, start it again to continue" if state == "lost" else ""),
        "step": f"{status['step']} of {status['steps']}",
        "phase": is_running and f"{status['phase']}, for {format_duration(time.time() - status['phase_since'])}",
        "speed": status["step_s"] is not None and f"{status['step_s']:.1f} s per step{tokens}",
        "to go": is_running and status["eta_s"] is not None and format_duration(status["eta_s"]),
        "engines": ", ".join(engines),
        "responses": isinstance(status.get("unjudged"), str) and status["unjudged"],
        "sinks": isinstance(status.get("sinks"), str) and status["sinks"],
        "health": ("\n" + " " * 12).join(line for verdict in verdicts or () for line in verdict.lines())
        or (verdicts is not None and "no warnings"),
        "checkpoint": status["checkpoint"] or "none",
        "job": job and (f"{job}, restart {status['restart']}" if status["restart"] else job),
        "main rank": f"process {status['pid']} on {status['host']}",
        "launcher": launch and launch["says"],
        "silent": is_running and status["silent_s"] > _QUIET_S and f"for {format_duration(status['silent_s'])}",
        "last error": status["last_error"] and f"{status['error_kind']}: {status['last_error']}",
        "ranks": status["where"],
    }
    return [f"{name + ':':<12}{text}" for name, text in lines.items() if text]


def format_duration(seconds: float, digits: int = 0) -> str:
    """Return seconds in the units that fit: 42 s, 3 min 20 s, 5 h 07 min; ``digits`` are those of seconds alone."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.{digits}f} s"
    minutes, remainder = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {remainder:02d} s"


def rank_file(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank:05d}.json"


def stop_file(folder: Path) -> Path:
    """Return the file of a request to stop, with the number of the trainer's start to end."""
    return folder / "stop"


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank:05d}.stacks.txt"


def read_signs(folder: Path, ranks: int, attempt: str | None = None) -> list[dict[str, Any]]:
    """Return the last sign of each rank; a rank without a sign has step -1. attempt: of this start of the trainer."""
    signs = []
    for rank in range(ranks):
        sign = read_record(rank_file(folder, rank))
        try:
            require_fields(sign, "sign", _LARGEST)
        except ValueError:
            sign = {}
        if sign and (attempt is None or sign.get("attempt") == attempt):
            signs.append(sign | {"rank": rank})
        else:
            signs.append({"rank": rank, "host": "?", "pid": 0, "step": -1, "phase": "no sign of life", "beat": 0.0})
    return signs


def describe_ranks(signs: Sequence[Mapping[str, Any]], now: float | None) -> str:
    """Return where ranks are, e.g. "rank 1: gone in train after step 3; ranks 0, 2-3: sync after step 3".

    Most suspicious first: dead ranks, silent ranks, the smallest group. ``now`` is None if all have ended.
    """
    places: dict[tuple[int, str], list[int]] = {}
    for sign in signs:
        state, rank = ("", 0) if now is None else _judge(sign, now)
        text = state + sign["phase"] + (f" after step {sign['step']}" if sign["step"] >= 0 else "")
        text += f" ({sign['error']})" if sign.get("error") else ""
        places.setdefault((rank, text), []).append(sign["rank"])
    ordered = sorted(places.items(), key=lambda item: (item[0][0], len(item[1])))
    return "; ".join(f"rank{'s' * (len(m) > 1)} {name_ranges(m)}: {text}" for (_, text), m in ordered)


def _judge(sign: Mapping[str, Any], now: float) -> tuple[str, int]:
    """Return a rank's problem, as the beginning of a phrase, and the rank's place in the order."""
    if sign["host"] == socket.gethostname() and sign["pid"] and not Path(f"/proc/{sign['pid']}").exists():
        return "gone in ", 0
    silent = now - sign["beat"]
    if silent > 2.5 * sign.get("beat_s", 2.0):
        return f"silent for {silent:.0f} s in " if sign["beat"] else "", 1
    return "", 2


def name_ranges(numbers: Sequence[int]) -> str:
    """Return 3, 4, 5, 9 as "3-5, 9"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda entry: entry[1] - entry[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def write_failure(error: MegarlError, *, is_cause: bool = False) -> None:
    """Write kind and message of the error, unless another rank has already written an error.

    An error that knows the cause replaces an error that only reports a failed rank, and ``is_cause`` replaces all
    errors. Does nothing without ``megarl launch``, or if the file system refuses.
    """
    if FAILURE_VARIABLE not in os.environ:
        return
    path = Path(os.environ[FAILURE_VARIABLE])
    record = {"kind": type(error).__name__, "message": " ".join(str(error).split()), "second_hand": error.second_hand}
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(OSError), ExitStack() as cleanup:
        cleanup.callback(draft.unlink, missing_ok=True)
        draft.write_text(json.dumps(record))
        try:
            os.link(draft, path)  # the whole file at once, and never over another rank's file
        except FileExistsError:
            if is_cause or (not error.second_hand and read_record(path).get("second_hand")):
                draft.replace(path)
        except OSError:  # a file system without links
            draft.replace(path)


Level = Literal["ok", "warning", "alarm"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "alarm")


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """What a check (``megarl.watch.health``) says about a run: a record of status.json."""

    check: str
    """The name of the check, also the key of the limits in [health]."""
    level: Level
    found: str
    """The latest observation, with numbers and limits."""
    since: int | None
    """The first step of the observation; None without an observation."""
    cause: str
    """The usual cause."""
    advice: str
    """What to try."""

    def lines(self) -> list[str]:
        """Return the verdict for a terminal."""
        head = self.level + ("" if self.since is None else f" since step {self.since}")
        return [f"{head}, {self.check}: {self.found}", f"  cause:  {self.cause}", f"  advice: {self.advice}"]


_VERDICTS = TypeAdapter(list[HealthVerdict] | None)
