"""Sinks: where the records of a run go besides metrics.jsonl (``log.sinks``): TensorBoard, Weights & Biases, MLflow.

``package.module:sink`` names a sink of your own: a function or class that takes a ``SinkRun`` and returns a ``Sink``.
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
from typing import Any, Protocol

from megarl.config.plugs import check_function, load_plug
from megarl.errors import ConfigError
from megarl.files.texts import refusal


@dataclass(frozen=True, slots=True)
class SinkRun:
    """A run, for a sink."""

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
    id: str | None = None
    """``Sink.id`` of an earlier start; None at the first."""


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """What a sink gets of a step, or of an evaluation after a step."""

    step: int
    """Finished steps."""
    kind: str
    """"step" or "eval"."""
    metrics: Mapping[str, float]
    """Numbers, also nan and infinities. Metrics of mini-batches are "minibatch_0/loss"; "health/CHECK" is 1 for a
    warning of the check, 2 for an alarm, and 0 once it has ended."""
    samples: Sequence[Mapping[str, Any]]
    """Stored responses of the first rank, at most 64, with the fields of megarl/run/fields.toml and perhaps more."""
    verdicts: Sequence[str]
    """Lines of health checks, tripwires and the self-test."""


class Sink(Protocol):
    """Takes the records of a run, in order and from a single thread. An exception of ``log`` repeats the call later.

    A sink with an attribute ``rewinds = True`` forgets records after step ``SinkRun.done`` when it begins, and gets
    them again; another sink keeps what it has and gets no step twice.
    """

    id: str
    """The run's name in the sink, kept for the next start."""

    def log(self, record: SinkRecord) -> None: ...

    def close(self, state: str, error: str) -> None:
        """Flush. state: "finished", "stopped" or "failed"; error: of a failed run, else empty."""


def load_sink(name: str) -> Callable[[SinkRun], Sink]:
    """Return the maker of a sink of ``log.sinks``; ConfigError if its package is missing or cannot be imported."""
    if ":" in name:
        return check_function("log.sinks", name, load_plug("log.sinks", name), "run")
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # a folder of this name, such as the one that wandb writes
        raise ConfigError(refusal("no_sink_package", name=name))
    return {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}[name]


_SECRET = re.compile(r"(?i)(api|access|private)_?key|secret|passw|credential|token$|_key$")


def flatten(value: Any, environment: Mapping[str, str], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, text or number) of nested tables, with "***" for secrets.

    Secrets are texts whose key names a secret, values of options such as ``--api-key X``, passwords in URLs, and values
    of environment variables whose names name a secret.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from flatten(inner, environment, f"{key}.{name}" if key else str(name))
        return
    if not isinstance(value, int | float):
        value = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        for secret in (v for name, v in environment.items() if len(v) > 7 and _SECRET.search(name)):
            value = value.replace(secret, "***")
        value = re.sub(r'(--[\w-]*(?:key|token|secret|password)(?:=|\s|", "))[^\s"]+', r"\1***", value)
        value = "***" if _SECRET.search(key) else re.sub(r"://[^/@\s]+@", "://***@", value)
    yield key, value


class TensorBoard:
    """Event files in run.dir/tensorboard; undone steps are hidden."""

    id, rewinds = "tensorboard", True

    def __init__(self, run: SinkRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text, self._writer = event_pb2, summary_pb2.Summary, text_pb, None
        self._open, self._step = lambda: EventFileWriter(str(run.folder / "tensorboard")), run.done
        # Hides what earlier files say of later steps.
        self._write(run.done + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        self._add({}, config=_to_markdown([("key", "value"), *run.config.items()]))

    def log(self, record: SinkRecord) -> None:
        self._step, samples = record.step, _to_markdown(tabulate(record.samples))
        self._add(record.metrics, samples=samples, verdicts="\n\n".join(record.verdicts))

    def close(self, state: str, error: str) -> None:
        self._add({}, state=f"{state} {error}")
        self._writer.close()

    def _add(self, metrics: Mapping[str, float], **texts: str) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        values += [self._text(tag, text).value[0] for tag, text in texts.items() if text]
        self._write(self._step, summary=self._summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        writer, self._writer = self._writer or self._open(), None  # a writer that has failed fails for ever
        writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))
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

    def log(self, record: SinkRecord) -> None:
        row: dict[str, Any] = {**record.metrics, "global_step": record.step}
        tables = {"samples": tabulate(record.samples), "verdicts": [["verdict"], *([v] for v in record.verdicts)]}
        for name, (columns, *rows) in tables.items():
            row |= {name: self._table(columns=columns, data=rows, allow_mixed_types=True)} if rows else {}
        self._run.log(row, step=2 * record.step + (record.kind == "eval"))

    def close(self, state: str, error: str) -> None:
        self._run.summary.update({"state": state, "error": error})
        self._run.finish(exit_code=int(state == "failed"))


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI; the experiment is log.project, or MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: SinkRun) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities, self._client = importlib.import_module("mlflow.entities"), mlflow.MlflowClient()
        try:
            self.id = run.id or self._create(run)
            self._client.update_run(self.id, "RUNNING")
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self.id = self._create(run)  # another MLFLOW_TRACKING_URI than before

    def _create(self, run: SinkRun) -> str:
        name, tags = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default"), {"megarl.run_id": run.run_id}
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        created = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
        self._send(created, params=[self._entities.Param(key, str(value)) for key, value in allowed(run.config)])
        return created

    def _send(self, run: str, most: int = 100, **kinds: list[Any]) -> None:
        for kind, entities in kinds.items():
            for begin in range(0, len(entities), most):  # as many as a request may hold
                self._client.log_batch(run, **{kind: entities[begin : begin + most]})

    def log(self, record: SinkRecord) -> None:
        columns, *rows = tabulate(record.samples)
        if rows:
            table = {"columns": columns, "data": rows}
            self._client.log_dict(self.id, table, f"samples/step_{record.step:07d}.json")
        if record.verdicts:
            text = "\n".join(record.verdicts)
            self._client.log_text(self.id, text, f"verdicts/step_{record.step:07d}.txt")
            self._client.set_tag(self.id, "megarl.verdict", text[:5000])
        now, step = int(time.time() * 1000), record.step
        metrics = [self._entities.Metric(name, value, now, step) for name, value in allowed(record.metrics)]
        self._send(self.id, 1000, metrics=metrics)

    def close(self, state: str, error: str) -> None:
        self._client.set_tag(self.id, "megarl.state", f"{state} {error}"[:5000])
        self._client.set_terminated(self.id, {"finished": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


def allowed(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values under names that MLflow takes: letters, digits and " _-.:/", a relative path, at most 250 long.

    Of names that become equal, the later get a number.
    """
    used = dict[str, int]()
    for name, value in values.items():
        parts = re.sub(r"[^\w\-. :/]", "_", name)[:240].split("/")
        path = "/".join(part if part.strip(".") else "_" for part in parts)
        used[path] = used.get(path, 0) + 1
        yield path if used[path] == 1 else f"{path}_{used[path]}", value


def tabulate(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the rows of a table, names of columns first; nested values as JSON."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    cell = lambda v: json.dumps(v, ensure_ascii=False) if isinstance(v, list | dict) else v  # noqa: E731
    return [columns, *([cell(sample.get(name)) for name in columns] for sample in samples)]


def _to_markdown(table: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown; empty without a row below the names."""
    head, *rows = ([re.sub(r"([|<>&*_`\\])", r"\\\1", str(v)).replace("\n", "↵") for v in row] for row in table)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) if rows else ""
