"""Sinks: where the records of a run go besides metrics.jsonl (``log.sinks``): TensorBoard, Weights & Biases, MLflow.

``package.module:sink`` names a sink of your own: a function or class of a ``SinkRun``, which says what a sink is.
Every sink has a process (``megarl.run.feed``), and no other process imports its package.
"""

import importlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.plugs import check_function, load_plug
from megarl.errors import ConfigError, refusal

Metrics = Mapping[str, float]
Samples = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SinkRun:
    """A run, for a sink: an object with ``id``, its name of the run, kept for the next start, and two methods.

    - ``log(step, kind, metrics, samples, verdicts)`` takes a record after ``step`` steps, in order and from a single
      thread. megarl repeats a call that raises. kind: "step" or "eval". metrics: numbers, also nan and infinities; of
      mini-batches "minibatch_0/loss"; and "health/CHECK", 1 for a warning of the check, 2 for an alarm, 0 once it has
      ended. samples: stored responses of the first rank, at most 64, with the fields of megarl/run/fields.toml and
      perhaps more. verdicts: lines of health checks, tripwires and the self-test.
    - ``close(state, error)`` flushes. state: "finished", "stopped" or "failed"; error: of a failed run, else empty.

    A sink with ``rewinds = True`` forgets what came after step ``done`` when it begins, and gets those steps again;
    a sink without keeps its records, and gets no step twice.
    """

    name: str
    """run.name."""
    folder: Path
    """run.dir."""
    run_id: str
    """The name that the run gave itself; the same after a resumption."""
    project: str | None
    """log.project."""
    config: Mapping[str, Any]
    """The resolved configuration: dotted key -> text, number or truth value. Lists are JSON, secrets "***"."""
    done: int
    """Finished steps at this start of the run."""
    id: str | None
    """The sink's ``id`` of an earlier start; None at the first."""


def load_sink(name: str) -> Callable[[SinkRun], Any]:
    """Return the maker of a sink of ``log.sinks``; ConfigError if its package is missing or cannot be imported."""
    if ":" in name:
        return check_function("log.sinks", name, load_plug("log.sinks", name), "run")
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of this name, such as the one that wandb writes
        extra = "train" if name == "tensorboard" else name
        raise ConfigError(refusal("no_sink_package", name=name, extra=extra))
    return {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}[name]


_NAMES = r"[\w-]*(?:api_?key|secret|passw|credential|token\b|_key\b|-key\b)[\w-]*"
_SECRET = re.compile(  # a value in JSON, an option of a command line, a password in a URL
    rf'''(?i)("{_NAMES}": ")(?:\\.|[^"\\])*|(--{_NAMES}(?:=|\s|", "))(?:\\.|[^\s"\\])+|(://)[^/@\s"]+(?=@)'''
)


def flatten(tables: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, text, number or truth value) of a configuration; lists and inner tables as JSON.

    Secrets are "***": texts whose key names a secret, values of options such as ``--api-key X``, passwords in URLs, and
    values of environment variables whose names name a secret.
    """
    hidden = [v for name, v in environment.items() if len(v) > 7 and re.fullmatch(f"(?i){_NAMES}", name)]
    for dotted, value in ((f"{table}.{key}", v) for table, inner in tables.items() for key, v in inner.items()):
        if isinstance(value, str | list | dict):
            key = dotted.rpartition(".")[2]
            text = _SECRET.sub(lambda match: f"{match[match.lastindex or 0]}***", json.dumps({key: value}, default=str))
            for secret in hidden:
                text = text.replace(json.dumps(secret)[1:-1], "***")
            value = shown if isinstance(shown := json.loads(text)[key], str) else json.dumps(shown)
        yield dotted, value


class TensorBoard:
    """Event files in run.dir/tensorboard; undone steps are hidden."""

    id, rewinds = "tensorboard", True

    def __init__(self, run: SinkRun) -> None:
        self._folder, self._step, self._writer = str(run.folder / "tensorboard"), run.done, None
        self._add({}, config=_to_markdown([{"key": key, "value": value} for key, value in run.config.items()]))

    def log(self, step: int, kind: str, metrics: Metrics, samples: Samples, verdicts: Sequence[str]) -> None:
        self._step = step
        self._add(metrics, samples=_to_markdown(samples), verdicts="\n\n".join(verdicts))

    def close(self, state: str, error: str) -> None:
        self._add({}, state=f"{state} {error}")

    def _add(self, metrics: Metrics, **texts: str) -> None:
        summaries: Any = importlib.import_module("tensorboard.plugins.text.summary_v2")
        values: list[Any] = [{"tag": tag, "simple_value": value} for tag, value in metrics.items()]
        values += [summaries.text_pb(tag, text).value[0] for tag, text in texts.items() if text]
        events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        files: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        writer, self._writer = self._writer or files.EventFileWriter(self._folder), None  # after an error: a new file
        if "config" in texts:  # at the start: hides the later steps of earlier files
            writer.add_event(events.Event(wall_time=time.time(), step=self._step + 1, session_log={"status": 1}))
        writer.add_event(events.Event(wall_time=time.time(), step=self._step, summary={"value": values}))
        writer.flush()
        self._writer = writer


class Wandb:
    """A run of Weights & Biases, online or as WANDB_MODE says; its files are in run.dir/wandb."""

    def __init__(self, run: SinkRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        # The console and the command line may show secrets, and are not sent.
        settings = wandb.Settings(console="off", silent=True, x_disable_meta=True)
        options: dict[str, Any] = {"project": run.project, "name": run.name, "id": run.run_id, "resume": "allow"}
        self._run = wandb.init(**options, dir=str(run.folder), config=dict(run.config), settings=settings)
        self._run.define_metric("*", step_metric="global_step")
        self._table, self.id = wandb.Table, f"{self._run.entity}/{self._run.project}/{self._run.id}"

    def log(self, step: int, kind: str, metrics: Metrics, samples: Samples, verdicts: Sequence[str]) -> None:
        row: dict[str, Any] = {**metrics, "global_step": step}
        for name, rows in {"samples": samples, "verdicts": [{"verdict": line} for line in verdicts]}.items():
            columns, *data = tabulate(rows)
            row |= {name: self._table(columns=columns, data=data, allow_mixed_types=True)} if rows else {}
        self._run.log(row, step=2 * step + (kind == "eval"))

    def close(self, state: str, error: str) -> None:
        self._run.summary.update({"state": state, "error": error})
        self._run.finish(exit_code=int(state == "failed"))


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI; the experiment is log.project, or MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: SinkRun) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities, self._client = importlib.import_module("mlflow.entities"), mlflow.MlflowClient()
        name, tags = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default"), {"megarl.run_id": run.run_id}
        if run.id is not None:
            self.id = run.id
            return self._client.update_run(self.id, "RUNNING")
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self.id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        self._send("params", 100, [self._entities.Param(key, str(value)) for key, value in allowed(run.config)])

    def log(self, step: int, kind: str, metrics: Metrics, samples: Samples, verdicts: Sequence[str]) -> None:
        columns, *rows = tabulate(samples)
        if rows:
            self._client.log_dict(self.id, {"columns": columns, "data": rows}, f"samples/step_{step:07d}.json")
        if verdicts:
            self._client.log_text(self.id, "\n".join(verdicts), f"verdicts/step_{step:07d}.txt")
            self._client.set_tag(self.id, "megarl.verdict", "\n".join(verdicts)[:5000])
        now = int(time.time() * 1000)
        self._send("metrics", 1000, [self._entities.Metric(key, value, now, step) for key, value in allowed(metrics)])

    def _send(self, kind: str, most: int, entities: list[Any]) -> None:
        for begin in range(0, len(entities), most):  # as many as a request may hold
            self._client.log_batch(self.id, **{kind: entities[begin : begin + most]})

    def close(self, state: str, error: str) -> None:
        self._client.set_tag(self.id, "megarl.state", f"{state} {error}"[:5000])
        self._client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


def allowed(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values under names that MLflow takes: letters, digits and " _-.:/", a relative path, at most 250 long.

    "/" is "." but for the first: in MLflow's files, "ess" cannot lie beside "ess/fraction". Of names that become equal,
    the later get a number.
    """
    used = dict[str, int]()
    for name, value in values.items():
        group, slash, rest = re.sub(r"[^\w\-. :/]", "_", name)[:240].partition("/")
        path = re.sub(r"(^|(?<=/))\.*(?=/|$)", "_", f"{group}{slash}{rest.replace('/', '.')}")
        used[path] = used.get(path, 0) + 1
        yield path if used[path] == 1 else f"{path}_{used[path]}", value


def tabulate(rows: Samples) -> list[list[Any]]:
    """Return the cells of a table, names of columns first; nested values as JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name) for name in columns] for row in rows]
    return [columns, *([json.dumps(v) if isinstance(v, list | dict) else v for v in row] for row in cells)]


def _to_markdown(rows: Samples) -> str:
    """Return a table in Markdown; empty without rows."""
    table = [[re.sub(r"([|<>&*_`\\])", r"\\\1", str(v)).replace("\n", "↵") for v in row] for row in tabulate(rows)]
    lines = [f"| {' | '.join(row)} |" for row in (table[0], ["---"] * len(table[0]), *table[1:])]
    return "\n".join(lines) if rows else ""
