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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

from megarl.config import Config
from megarl.data.judge import WorkerContext, die_with_trainer
from megarl.errors import StopError, describe
from megarl.files.writing import read_record, write_atomically
from megarl.run.sinks import Samples, SinkRun, flatten, load_sink

_POLL_S, _DEADLINE_S = 0.2, 30.0
"""The longest wait for all sinks at the end of a run is _DEADLINE_S."""
_HANG_S = 60.0
"""A call of a sink that takes longer counts as failing."""
_TRIES, _LAST_TRIES = 10, 3
"""Tries of a call, 1, 2, 4 ... at most 60 seconds apart; then the record is lost. After the end of the run it stays."""
_MOST_SAMPLES = 64


class Feed(AbstractContextManager["Feed"]):
    """Feeds the sinks of a run on the ``enabled`` rank, and does nothing elsewhere."""

    def __init__(self, config: Config, say: Callable[[str], None], enabled: bool) -> None:
        self._config, self._say, self._names = config, say, config.log.sinks if enabled else []
        self._folder = config.run_dir.absolute() / "sinks"
        self._processes, self._metrics, self._lines, self._lost = dict[str, Any](), dict[str, float](), list[str](), 0
        self.samples: Samples = ()
        """Of the next record."""
        self.problems: dict[str, str] = {}
        """What fails now, by sink."""

    def begin(self, run_id: str, done: int, evaluated: bool) -> None:
        """Start the sinks of a run with ``done`` steps, the last ``evaluated`` or not; drop records of later steps."""
        if not self._names:
            return
        self._folder.mkdir(exist_ok=True)
        last, log = f"{done:07d}.{int(evaluated)}.json", self._config.log
        for file in self._folder.glob("*.json"):
            file.unlink() if file.name > last else None
        (self._folder / "end").unlink(missing_ok=True)
        settings = dict(flatten(self._config.model_dump(exclude_none=True), os.environ))
        run = SinkRun(self._config.run.name, self._folder.parent, run_id, log.project, settings, done, None)
        for name in self._names:
            follower = Follower(name, run, last)
            if (sent := follower.state["sent"]) > last:
                self.note(f"sink {name} has steps up to {int(sent[:7])}, and the run goes on after step {done}")
            self._processes[name] = WorkerContext().Process(target=follower.run, daemon=True)
            self._processes[name].start()

    def note(self, line: str) -> None:
        """Say a verdict, and send it with the next record."""
        self._say(line)
        self._lines.append(line)

    def add(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        """Put metrics into the next record."""
        self._metrics |= {prefix + name: float(value) for name, value in metrics.items()}

    def publish(self, step: int, kind: str = "step") -> None:
        """Let the sinks have the record of a step or evaluation. A full disk loses it, and is counted."""
        record = {"step": step, "kind": kind, "metrics": self._metrics, "verdicts": self._lines}
        record["samples"], self._metrics, self._lines, self.samples = self.samples[:_MOST_SAMPLES], {}, [], ()
        if self._processes:
            try:
                file = self._folder / f"{step:07d}.{int(kind == 'eval')}.json"
                write_atomically(file, json.dumps(record).encode(), durable=False)
            except OSError:
                self._lost += 1

    def look(self) -> dict[str, float]:
        """Return metrics; say what has changed since the last call, and remove the records that all sinks have."""
        if not self._processes:
            return {}
        before, self.problems, lost, sent = self.problems, {}, self._lost, list[str]()
        for name, process in self._processes.items():
            state = read_record(self._folder / f"{name}.state")
            state = state if state.get("pid") == process.pid else {}  # of an earlier start
            silent_s = time.time() - (state.get("since") or time.time())
            problem = f"no answer for {silent_s:.0f} s" if silent_s > _HANG_S else state.get("error")
            if process.exitcode is not None:
                problem = f"its process has ended, see {self._folder / name}.log"
            self.problems |= {name: problem} if problem else {}
            lost += state.get("lost", 0)
            sent.append(state["sent"] if state.get("is_ready") else "")
        for name in self.problems.keys() ^ before.keys():
            problem = self.problems.get(name)
            self._say(f"warning: sink {name} fails: {problem}" if problem else f"sink {name} works again")
        for file in self._folder.glob("*.json"):
            file.unlink() if file.name <= min(sent) else None
        return {"sinks/failing": len(self.problems), "sinks/lost": lost}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Wait until the sinks have all records, at most _DEADLINE_S."""
        state = "finished" if kind is None else "stopped" if issubclass(kind, StopError) else "failed"
        end = {"state": state, "error": "" if error is None else describe(error)}
        with suppress(OSError):
            write_atomically(self._folder / "end", json.dumps(end).encode(), durable=False)
        deadline = time.monotonic() + _DEADLINE_S
        for name, process in self._processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                self._say(f"warning: sink {name} lacks records; the next start of the run sends them")
                process.terminate()


class Follower:
    """Gives a sink the records of a run, in a process of its own."""

    def __init__(self, name: str, run: SinkRun, last: str) -> None:
        """last: the newest record of the run when it starts."""
        self._folder, self._name, self._last = run.folder / "sinks", name, last
        state = {"sent": "", "trying": "", "failures": 0, "lost": 0} | read_record(self._folder / f"{name}.state")
        state["sent"] = state["trying"] or state["sent"]
        self.state: dict[str, Any] = state | {"trying": "", "error": None, "since": None, "is_ready": False}
        self._run = replace(run, id=state.get("id"))

    def run(self) -> None:
        """Follow the run to its end."""
        die_with_trainer()
        self.state["pid"] = os.getpid()
        sys.stdout = sys.stderr = (self._folder / f"{self._name}.log").open("a", buffering=1)
        while (sink := self._try(lambda: load_sink(self._name)(self._run), "")) is None:
            pass
        sent, has_ended = self.state["sent"], False
        sent = min(sent, self._last) if getattr(sink, "rewinds", False) else sent
        self._update(id=sink.id, sent=sent, is_ready=True)
        while not has_ended:
            has_ended = self._has_ended()
            for file in sorted(self._folder.glob("*.json")):
                fields = read_record(file) if file.name > self.state["sent"] else {}
                if fields and self._try(lambda fields=fields: sink.log(**fields) or True, file.name) is None:
                    self._update(sent=file.name, lost=self.state["lost"] + 1)
            time.sleep(0.0 if has_ended else _POLL_S)
        self._try(lambda: sink.close(**read_record(self._folder / "end")) or True, "")

    def _try(self, call: Callable[[], Any], sent: str) -> Any:
        """Return the result of a call that sends the record ``sent``; None after too many failures.

        A record in whose call the process was killed counts as sent: nobody knows, and no step goes out twice.
        """
        for number in range(_TRIES):
            self._update(trying=sent, since=time.time())
            try:
                result = call()
            except BaseException as error:  # of foreign code: SystemExit too
                traceback.print_exc()
                shown = next(flatten({"sink": {"error": describe(error)}}, os.environ))[1]  # console and status show it
                self._update(trying="", since=None, error=shown, failures=self.state["failures"] + 1)
            else:
                self._update(sent=sent or self.state["sent"], trying="", since=None, error=None)
                return result
            for _ in range(min(2**number, 60)):
                if number + 1 >= _LAST_TRIES and self._has_ended():
                    sys.exit(1)
                time.sleep(1.0)
        return None

    def _has_ended(self) -> bool:
        return (self._folder / "end").exists()

    def _update(self, **fields: Any) -> None:
        self.state |= fields
        write_atomically(self._folder / f"{self._name}.state", json.dumps(self.state).encode(), durable=False)
