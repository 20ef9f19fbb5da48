"""What the processes of a run leave in files about its state, and ``megarl status``, which reads them.

``megarl.run.vitals`` writes the signs of life; ``megarl launch``, which sees only exit codes, reads why a rank failed.
"""

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, MegarlError, printable
from megarl.files.foreign_files import read_object
from megarl.files.writing import read_record
from megarl.run.lock import is_held, read_holder
from megarl.watch.health import HealthVerdict

FAILURE_VARIABLE = "MEGARL_FAILURE"
"""The environment variable with the path of the file that ``write_failure`` writes."""
_QUIET_S = 30.0


_Fields = dict[str, tuple[type | None, ...]]
_STATUS: _Fields = {
    **dict.fromkeys(("state", "phase", "host"), (str,)),
    **dict.fromkeys(("step", "steps", "ranks", "pid"), (int,)),
    **dict.fromkeys(("phase_since", "updated"), (int, float)),
    **dict.fromkeys(("step_s", "tokens_per_s", "eta_s"), (int, float, None)),
    **dict.fromkeys(("last_error", "error_kind", "job", "restart"), (str, None)),
}
_SIGN: _Fields = {
    **{"host": (str,), "phase": (str,), "pid": (int,), "step": (int,)},
    **dict.fromkeys(("beat", "beat_s"), (int, float)),
}
_VERDICT: _Fields = {**dict.fromkeys(("check", "level", "found", "cause", "advice"), (str,)), "since": (int, None)}
_LARGEST = 1e12
_MOST_RANKS = 1 << 20


def show(run_dir: Path, as_json: bool = False) -> int:
    """Print the status; returns 0, or 1 for a run that has failed or is lost."""
    found = read_status(run_dir)
    print(json.dumps(found) if as_json else "\n".join(map(printable, _lines(found))))
    return int(found["state"] in ("failed", "lost"))


def read_status(run_dir: Path) -> dict[str, Any]:
    """Return status.json and more. "state" is "lost" if it says that the run goes on, but no process holds its lock.

    ConfigError if there is no run.
    """
    path = run_dir / "status.json"
    try:
        path.lstat()
        found = read_object(path)
        _require_fields(found, _STATUS)
        _require_verdicts(found.get("health"))
    except (FileNotFoundError, NotADirectoryError):
        begun = _read_launch(run_dir)
        if begun:
            raise ConfigError(f"{run_dir}: no rank has written a status; the launcher says: {begun['says']}") from None
        raise ConfigError(f"found no {path}: {run_dir} is no folder of a run that has begun") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} is damaged ({error}); a running run rewrites it every few seconds") from None
    now, lock = time.time(), run_dir / "lock"
    if found["state"] in ("starting", "running") and not is_held(lock):
        found["state"] = "lost"
    where = describe_ranks(read_signs(run_dir, found["ranks"]), now) if found["state"] != "finished" else None
    found |= {"silent_s": now - found["updated"], "checkpoint": newest_checkpoint(run_dir), "where": where}
    return found | {"holder": read_holder(lock), "launch": _read_launch(run_dir)}


def _require_fields(found: Any, fields: _Fields) -> None:
    """Raise ValueError unless it is an object with these fields, all numbers being finite and not absurd."""
    if not isinstance(found, dict):
        raise ValueError(f"found {type(found).__name__}, expected an object")
    for name, types in fields.items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        value = found[name]
        fits = type(value) in types or (value is None and None in types)
        if not fits or (isinstance(value, (int, float)) and not abs(value) < _LARGEST):
            raise ValueError(f"{name} is {value!r:.80}")
    if found.get("ranks", 0) > _MOST_RANKS:
        raise ValueError(f"ranks is {found['ranks']}")


def _require_verdicts(found: Any) -> None:
    """Raise ValueError unless it is a list of verdicts, or None: no step is judged."""
    for entry in [] if found is None else found if isinstance(found, list) else [found]:
        _require_fields(entry, _VERDICT)
        if len(entry) != len(_VERDICT):
            raise ValueError(f"a verdict has the fields {[*entry]!r:.80}")


def _read_launch(run_dir: Path) -> dict[str, Any] | None:
    """launch.json; None if there is none. If the launcher is gone, "says" tells so and what it wrote last."""
    found = read_record(run_dir / "launch.json")
    if not found:
        return None
    if not isinstance(found.get("says"), str):
        return found | {"says": "launch.json is damaged"}
    ended = found["says"].startswith(("finished", "stopped", "gave up"))
    if not ended and not is_held(run_dir / "launch.lock"):
        found["says"] = f"gone; its last word: {found['says']}"
    return found


def newest_checkpoint(run_dir: Path) -> str | None:
    """Return the name of the newest complete checkpoint; without importing Megatron."""
    return max((path.name for path in run_dir.glob("checkpoints/step_???????")), default=None)


def _lines(found: dict[str, Any]) -> list[str]:
    state, job, launch = found["state"], found["job"], found["launch"]
    runs, verdicts = state == "running", [HealthVerdict(**each) for each in found.get("health") or ()]
    tokens = f", {found['tokens_per_s']:.0f} tokens/s" if found["tokens_per_s"] is not None else ""
    gaps = {"k3": "k3 {:.1e}", "native_flip": "native flip {:.2%}", "dropped": "{:.0f} responses dropped"}
    engines = [text.format(found[name]) for name, text in gaps.items() if isinstance(found.get(name), float)]
    lines = {
        "state": state + (": its processes are gone, start it again to continue" if state == "lost" else ""),
        "step": f"{found['step']} of {found['steps']}",
        "phase": runs and f"{found['phase']}, for {format_duration(time.time() - found['phase_since'])}",
        "speed": found["step_s"] is not None and f"{found['step_s']:.1f} s per step{tokens}",
        "to go": runs and found["eta_s"] is not None and format_duration(found["eta_s"]),
        "engines": ", ".join(engines),
        "responses": isinstance(found.get("unjudged"), str) and found["unjudged"],
        "health": ("\n" + " " * 12).join(line for each in verdicts for line in each.lines())
        or (found.get("health") is not None and "no warnings"),
        "checkpoint": found["checkpoint"] or "none",
        "job": job and (f"{job}, restart {found['restart']}" if found["restart"] else job),
        "main rank": f"process {found['pid']} on {found['host']}",
        "launcher": launch and launch["says"],
        "silent": runs and found["silent_s"] > _QUIET_S and f"for {format_duration(found['silent_s'])}",
        "last error": found["last_error"] and f"{found['error_kind']}: {found['last_error']}",
        "ranks": found["where"],
    }
    return [f"{name + ':':<12}{text}" for name, text in lines.items() if text]


def format_duration(seconds: float, digits: int = 0) -> str:
    """Return seconds in the units that fit: 42 s, 3 min 20 s, 5 h 07 min; ``digits`` are those of seconds alone."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.{digits}f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def rank_file(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank:05d}.json"


def stop_file(folder: Path) -> Path:
    """A request to stop: it holds the name of the start of the trainer that should end."""
    return folder / "stop"


def stacks_file(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"{rank:05d}.stacks.txt"


def read_signs(folder: Path, ranks: int, attempt: str | None = None) -> list[dict[str, Any]]:
    """The last sign of each rank, of this start of the trainer if one is named; a rank without a sign has step -1."""
    signs = []
    for rank in range(ranks):
        sign = read_record(rank_file(folder, rank))
        try:
            _require_fields(sign, _SIGN)
        except ValueError:
            sign = {}
        if sign and (attempt is None or sign.get("attempt") == attempt):
            signs.append(sign | {"rank": rank})
        else:
            signs.append({"rank": rank, "host": "?", "pid": 0, "step": -1, "phase": "no sign of life", "beat": 0.0})
    return signs


def describe_ranks(signs: Sequence[Mapping[str, Any]], now: float | None) -> str:
    """Say where ranks are, e.g. "rank 1: gone in train after step 3; ranks 0, 2-3: sync after step 3".

    Most suspicious first: ranks that are gone, silent ones, the smallest group. ``now`` is None if all have ended.
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
    """Return what is wrong with a rank, as the beginning of a phrase, and its place in the order."""
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
    """Write kind and message of the error, unless another rank has already written one.

    An error that only says that another rank failed gives way to one that knows the cause, and all give way to
    ``is_cause``. Does nothing without ``megarl launch``, and on a file system that refuses.
    """
    if FAILURE_VARIABLE not in os.environ:
        return
    path = Path(os.environ[FAILURE_VARIABLE])
    record = {"kind": type(error).__name__, "message": " ".join(str(error).split()), "second_hand": error.second_hand}
    own = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    with suppress(OSError), ExitStack() as cleanup:
        cleanup.callback(own.unlink, missing_ok=True)
        own.write_text(json.dumps(record))
        try:
            os.link(own, path)  # the whole file at once, and never over that of another rank
        except FileExistsError:
            if is_cause or (not error.second_hand and read_record(path).get("second_hand")):
                own.replace(path)
        except OSError:  # a file system without links
            own.replace(path)
