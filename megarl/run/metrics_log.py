"""metrics.jsonl: one JSON object per record, appended while the run goes.

A record is ``{"kind": "step" | "minibatch" | "eval", "step": int, "minibatch": int | null, "wall_s": float, "<metric>":
float, ...}``, with ``"unjudged": str`` if responses have no reward. JSON knows no NaN and no infinity: the file has the
strings "nan", "inf" and "-inf", and readers get floats. Only ``wall_s`` and the prefixes ``time/`` and ``speed/``
depend on the clock: without them two runs can be compared bit for bit.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TextIO, get_args

from megarl.errors import DataError, reworded

Kind = Literal["step", "minibatch", "eval"]
Record = dict[str, Any]

HEADER = ("kind", "step", "minibatch", "wall_s")
"""Keys of every record that are no metrics."""
UNJUDGED = "unjudged"
"""Key of a record with responses without a reward: how many responses have one, and the first failure."""
_LARGEST = 10**15
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLog:
    """Appends the records of a run on the ``enabled`` rank, and does nothing elsewhere.

    Every record reaches the operating system at once; a "step" or "eval" record reaches the disk (fsync) before
    ``write`` returns, with all records before it. A kill costs at most the current step, and tears at most the last
    line, which the next start removes. ``wall_s`` counts seconds of training: a resumed run goes on from its last
    record.
    """

    def __init__(self, run_dir: str | Path, enabled: bool = True) -> None:
        """Make the folder."""
        self.path, self._enabled = Path(run_dir) / "metrics.jsonl", enabled
        self._file: TextIO | None = None
        if enabled:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._cut((math.inf, True))

    def write(
        self,
        kind: Kind,
        step: int,
        metrics: Mapping[str, float],
        minibatch: int | None = None,
        unjudged: str | None = None,
    ) -> None:
        """Append one record. metrics: numbers of Python or numpy, or one-element tensors; minibatch: its index.

        unjudged: how many responses have a reward, and the first failure.
        """
        if not self._enabled:
            return
        assert metrics.keys().isdisjoint(HEADER), f"metrics must not be named {', '.join(HEADER)}"
        wall_s = round(time.monotonic() - self._started_s, 3)
        values = {name: float(value) for name, value in metrics.items()}
        record: Record = {"kind": kind, "step": step, "minibatch": minibatch, "wall_s": wall_s}
        if self._file is None:
            self._file = self.path.open("a", buffering=1, encoding="utf-8")
        self._file.write(_to_json(record | values | ({UNJUDGED: unjudged} if unjudged else {})) + "\n")
        if kind != "minibatch":
            self.sync()

    def sync(self) -> None:
        """Force all records onto the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def truncate_after(self, step: int, evaluated: bool = True) -> int:
        """Drop all records with a larger step, and a torn last line, when a run resumes; return how many.

        evaluated: False drops the evaluation after the step too, because the run repeats it. A broken line before the
        records that stay is no error here. The cut is a single step: a kill leaves the old or
        the new file.
        """
        if not self._enabled:
            return 0
        self.close()
        return self._cut((step, evaluated))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sync()
        if self._file is not None:
            self._file.close()
        self._file = None

    def _cut(self, last: tuple[float, bool]) -> int:
        """Keep the records up to last, (step, whether its evaluation), and no torn line; return how many lines went."""
        dropped, end, wall_s, size = list[DataError | None](), 0, 0.0, 0
        if not self.path.is_file():
            self._started_s = time.monotonic()
            return 0
        with self.path.open("r+b") as file:
            for line in file:
                begin, size = size, size + len(line)
                if not line.strip():
                    continue
                try:
                    record = _from_json(line)
                except ValueError as error:
                    dropped.append(_broken(f"{self.path}: byte {begin}", error))
                    continue
                if (record["step"], record["kind"] == "eval") <= last:
                    dropped, end, wall_s = [], begin + len(line.rstrip(b"\n")) + 1, float(record["wall_s"])
                else:
                    dropped.append(None)
            if broken := next(filter(None, dropped[:-1]), None):
                raise broken
            if size != end:
                if end:
                    file.seek(end - 1)
                    file.write(b"\n")  # a kill may have cut off this byte alone
                file.truncate(end)
                os.fsync(file.fileno())
        self._started_s = time.monotonic() - wall_s
        return len(dropped)


def read_metrics(path: str | Path) -> list[Record]:
    """Return all records of a metrics.jsonl, in order; DataError as of ``iterate_metrics``."""
    return [*iterate_metrics(path)]


def iterate_metrics(path: str | Path) -> Iterator[Record]:
    """Yield all records of a metrics.jsonl, in order, with one record in memory.

    A broken last line is passed over: a kill leaves such a line. DataError with file and line for an earlier broken
    line, and without a file.
    """
    path, broken = Path(path), None
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; a run writes it into its run folder")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if broken is not None and line.strip():
                raise broken
            try:
                record = _from_json(line)
            except ValueError as error:
                broken = broken or _broken(f"{path}:{number}", error)
            else:
                yield record


def _broken(place: str, error: ValueError) -> DataError:
    return DataError(f"{place}: broken record ({error}); only the last line may be torn")


def describe_judged(record: Mapping[str, Any], of: str = "reward") -> str:
    """Return "N of M judged" for responses without a reward in a record, of training or "eval"; else nothing."""
    judged, responses = record.get(f"{of}/judged"), record.get(f"{of}/responses")
    return "" if judged is None or judged == responses else f"{judged:.0f} of {responses:.0f} judged"


def _to_json(record: Record) -> str:
    plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(plain, allow_nan=False)


def _from_json(line: bytes) -> Record:
    with reworded(RecursionError, ValueError, "nested too deeply: "):
        record = json.loads(line)
    if not isinstance(record, dict) or not all(name in record for name in HEADER):
        raise ValueError(f"expected a JSON object with {', '.join(HEADER)}")
    indices = [record["step"]] if record["kind"] != "minibatch" else [record["step"], record["minibatch"]]
    if record["kind"] not in get_args(Kind) or any(type(i) is not int or abs(i) > _LARGEST for i in indices):
        raise ValueError(f"found kind {record['kind']!r:.80}, step and mini-batch {indices!r:.80}")
    if not isinstance(record.get(UNJUDGED, ""), str):
        raise ValueError(f"{UNJUDGED} is {record[UNJUDGED]!r:.80}, expected a text")
    texts = (*HEADER[:3], UNJUDGED)
    return record | {name: _number(name, value) for name, value in record.items() if name not in texts}


def _number(name: str, value: object) -> float:
    value = _NON_FINITE.get(value, value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (type(value) is int and abs(value) > _LARGEST):
        raise ValueError(f"{name} is {value!r:.80}, expected a number")
    return value
