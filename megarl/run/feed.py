"""How records reach the sinks of a run: through files, which a process per sink reads.

    <run>/sinks/0000007.0.json   a record that some sink has not taken: of step 7; 0000007.1.json of its evaluation
    <run>/sinks/NAME.state       how far a sink is, its id of the run, failures
    <run>/sinks/NAME.log         what the sink's package prints

The trainer waits for sinks at the end of the run alone, and not long. The next start of the run sends what is left.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.data.judge import WorkerContext, die_with_trainer
from megarl.errors import StopError, describe
from megarl.files.writing import read_record, write_atomically
from megarl.run.sinks import SinkRecord, SinkRun, flatten, load_sink

_POLL_S = 0.2
_HANG_S = 60.0
"""A call of a sink that takes longer counts as failing."""
_TRIES, _LAST_TRIES = 10, 3
"""Tries of a call, 1, 2, 4 ... at most 60 seconds apart; then the record is lost. After the end of the run it stays."""
_MOST_PENDING = 2000
"""Records that wait for a sink; more are lost, the oldest first."""
_MOST_SAMPLES = 64


class Feed(AbstractContextManager["Feed"]):
    """Feeds the sinks of a run on the ``enabled`` rank, and does nothing elsewhere."""

    def __init__(self, config: Config, say: Callable[[str], None], enabled: bool, deadline_s: float = 30.0) -> None:
        """deadline_s: the longest wait for sinks at the end of the run."""
        self._config, self._say, self._deadline_s = config, say, deadline_s
        self._names, self._folder = config.log.sinks if enabled else [], config.run_dir.absolute() / "sinks"
        self._processes, self._metrics, self._lines, self._lost = dict[str, Any](), dict[str, float](), list[str](), 0
        self.problems: dict[str, str] = {}
        """What fails now, by sink."""
        self.samples: Sequence[Mapping[str, Any]] = ()
        """Of the next record."""

    def begin(self, run_id: str, done: int, evaluated: bool) -> None:
        """Start the sinks of a run with ``done`` steps, the last ``evaluated`` or not; drop records of later steps."""
        if not self._names:
            return
        self._folder.mkdir(exist_ok=True)
        start = f"{done:07d}.{int(evaluated)}.json"
        for file in self._pending():
            file.unlink() if file.name > start else None
        (self._folder / "end").unlink(missing_ok=True)
        settings = self._config.model_dump(mode="json", exclude_none=True)
        run = SinkRun(
            self._config.run.name, self._folder.parent, run_id, self._config.log.project,
            dict(flatten(settings, os.environ)), done,
        )  # fmt: skip
        for name in self._names:
            self._processes[name] = WorkerContext().Process(target=follow, args=(name, run, start))
            self._processes[name].start()

    def note(self, line: str) -> None:
        """Say a verdict, and send it with the next record."""
        self._say(line)
        self._lines.append(line)

    def add(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        """Put metrics into the next record."""
        self._metrics |= {prefix + name: float(value) for name, value in metrics.items()}

    def publish(self, step: int, kind: str = "step") -> None:
        """Let the sinks have the record of a step or evaluation."""
        record = SinkRecord(step, kind, self._metrics, self.samples[:_MOST_SAMPLES], self._lines)
        self._metrics, self._lines, self.samples = {}, [], ()
        if self._processes:
            file = self._folder / f"{step:07d}.{int(kind == 'eval')}.json"
            try:
                write_atomically(file, json.dumps(asdict(record)).encode(), durable=False)
            except OSError:  # a full disk: metrics.jsonl decides whether the run can go on
                self._lost += 1

    def look(self) -> dict[str, float]:
        """Return metrics; say which sinks fail since the last call, and remove the records that all sinks have."""
        if not self._processes:
            return {}
        lost, sent, before, self.problems = self._lost, list[str](), self.problems, {}
        for name, process in self._processes.items():
            state = read_record(self._folder / f"{name}.state")
            lost, sent = lost + state.get("lost", 0), [*sent, state.get("sent", "")]
            silent_s = time.time() - (state.get("since") or time.time())
            problem = f"no answer for {silent_s:.0f} s" if silent_s > _HANG_S else state.get("error")
            if process.exitcode is not None:
                problem = f"its process has ended, see {self._folder / name}.log"
            self.problems |= {name: problem} if problem else {}
        for name in {*self.problems, *before} - ({*self.problems} & {*before}):
            problem = self.problems.get(name)
            self._say(
                f"warning: sink {name} fails: {problem}; its records wait" if problem else f"sink {name} works again"
            )
        files = self._pending()
        for file in (file for file in files if file.name <= min(sent) or file in files[:-_MOST_PENDING]):
            self._lost += file.name > min(sent)
            file.unlink()
        return {"sinks/failing": len(self.problems), "sinks/lost": lost}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Wait until the sinks have all records, at most ``deadline_s``."""
        state = "finished" if kind is None else "stopped" if issubclass(kind, StopError) else "failed"
        deadline = time.monotonic() + self._deadline_s
        if self._processes:
            end = {"state": state, "error": "" if error is None else describe(error)}
            write_atomically(self._folder / "end", json.dumps(end).encode(), durable=False)
        for name, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                self._say(f"warning: sink {name} lacks records; the next start of the run sends them")
                process.terminate()
        self.look()

    def _pending(self) -> list[Path]:
        return sorted(self._folder.glob("*.json"))


def follow(name: str, run: SinkRun, start: str) -> None:
    """Feed a sink, in its process, until the run ends. start: the last record of the run when it starts."""
    die_with_trainer()
    file = (run.folder / "sinks" / f"{name}.log").open("a")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    Follower(name, run, start).run()


class Follower:
    """Gives a sink the records of a run."""

    def __init__(self, name: str, run: SinkRun, start: str) -> None:
        self._folder, self._name, self._start = run.folder / "sinks", name, start
        blank = {"id": None, "sent": "", "failures": 0, "lost": 0, "error": None, "since": None}
        self._state: dict[str, Any] = blank | read_record(self._folder / f"{name}.state")
        self._run = replace(run, id=self._state["id"])

    def run(self) -> None:
        sink, sent, notes = None, self._state["sent"], list[str]()
        while sink is None:
            sink = self._try(lambda: load_sink(self._name)(self._run), sent)
        if sink.id != self._state["id"] or getattr(sink, "rewinds", False):
            sent = min(sent, self._start)
        if sent > self._start:
            notes = [f"the run went back to step {int(self._start[:7])}; steps up to {int(sent[:7])} are of before"]
        self._update(id=sink.id, sent=sent)
        is_last = False
        while not is_last:
            is_last = self._has_ended()
            for file in sorted(self._folder.glob("*.json")):
                if file.name > self._state["sent"] and (fields := read_record(file)):
                    record, notes = SinkRecord(**fields | {"verdicts": notes + fields["verdicts"]}), []
                    if self._try(lambda record=record: sink.log(record) or True, file.name) is None:
                        self._update(sent=file.name, lost=self._state["lost"] + 1)
            time.sleep(0 if is_last else _POLL_S)
        end = read_record(self._folder / "end")
        self._try(lambda: sink.close(end["state"], end["error"]) or True, self._state["sent"])

    def _try(self, call: Callable[[], Any], sent: str) -> Any:
        """Return the result of a call that sends the record ``sent``; None after too many failures.

        A record counts as sent during the call: a kill in the call must not send the record twice.
        """
        before = self._state["sent"]
        for number in range(_TRIES):
            self._update(sent=sent, since=time.time())
            try:
                result = call()
            except BaseException as error:  # of foreign code: SystemExit too
                traceback.print_exc()
                failures = self._state["failures"] + 1
                self._update(sent=before, since=None, error=describe(error), failures=failures)
            else:
                self._update(since=None, error=None)
                return result
            for _ in range(min(2**number, 60)):
                if self._has_ended() and number + 1 >= _LAST_TRIES:
                    sys.exit(1)
                time.sleep(1.0)
        return None

    def _has_ended(self) -> bool:
        return (self._folder / "end").exists()

    def _update(self, **fields: Any) -> None:
        self._state |= fields
        write_atomically(self._folder / f"{self._name}.state", json.dumps(self._state).encode(), durable=False)
