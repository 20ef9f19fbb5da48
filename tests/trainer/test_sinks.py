"""Sinks of metrics: TensorBoard, MLflow's file store and Weights & Biases offline, for real, and sinks of a user."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_configs import parsed, refusal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config import Config
from megarl.errors import ConfigError, StopError
from megarl.files.writing import read_record
from megarl.ops.doctor.inputs import check_inputs
from megarl.run import feed
from megarl.run.feed import Feed
from megarl.run.sinks import SinkRun, allowed, flatten, load_sink

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
from environments import sinks_release  # noqa: E402

RECORDER = '''
import json, os, time
from pathlib import Path


class Recorder:
    rewinds = False

    def __init__(self, run):
        self.id, self.path = "run 7", run.folder / f"{type(self).__name__}.jsonl"
        self.write(begin=run.done, id=run.id, run_id=run.run_id, config=run.config)

    def write(self, **facts):
        with self.path.open("a") as file:
            file.write(json.dumps(facts) + "\\n")

    def log(self, step, kind, metrics, samples, verdicts):
        self.write(step=step, kind=kind, metrics=metrics, samples=len(samples), verdicts=verdicts)

    def close(self, state, error):
        self.write(state=state, error=error)


class Rewinder(Recorder):
    rewinds = True


class Moody(Recorder):
    """Raises until a file appears."""

    def log(self, step, **rest):
        if not (self.path.parent / "well").exists():
            raise RuntimeError("no http://me:hunter2@host/")
        super().log(step, **rest)


class Stuck(Recorder):
    def log(self, step, **rest):
        if step == 2:
            time.sleep(3600)
        super().log(step, **rest)


class Leaver(Recorder):
    def log(self, step, **rest):
        os._exit(3)
'''


@pytest.fixture
def plugs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plugs"
    folder.mkdir()
    (folder / "recorder.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def config_of(folder: Path, *sinks: str, **settings: Any) -> Config:
    return parsed(run__dir=str(folder / "run"), log__sinks=list(sinks), **settings)


def feed_run(config: Config, steps: range, done: int = 0, stops: bool = False, evaluated: bool = True) -> list[str]:
    """Run these steps after ``done``; returns what was said."""
    said: list[str] = []
    config.run_dir.mkdir(exist_ok=True)
    with contextlib.suppress(StopError), Feed(config, said.append, enabled=True) as sinks:
        sinks.begin("run-id", done, evaluated)
        for step in steps:
            sinks.add({"loss": step + 0.25, "tis/ess": 2.0, "tis/ess/fraction": 0.5}, "minibatch_0/")
            sinks.samples = [
                {"step": step, "prompt": "1|2", "response": "<b>\n", "parts": [["a", "b"]], "reward": None}
            ]
            if step == 1:
                sinks.note("self-test: k3 0")
            sinks.add({"reward/mean": 1 / step, "odd name@8": math.nan, "eval/../x": math.inf})
            sinks.publish(step)
            sinks.add({"eval/pass_rate": step / 10})
            sinks.publish(step, "eval")
            sinks.look()  # which removes records, while the process may not have begun
        if stops:
            raise StopError("asked to stop")
    return said


def until(holds: Callable[[], object]) -> None:
    while not holds():
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to start a process."""
    monkeypatch.setattr(feed, "_DEADLINE_S", 600.0)


def lines_of(folder: Path, name: str = "Recorder") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]


def records_of(folder: Path, name: str = "Recorder") -> list[tuple[int, str]]:
    return [(line["step"], line["kind"]) for line in lines_of(folder, name) if "step" in line]


def test_a_sink_gets_every_record_once_in_order_and_how_the_run_ended(tmp_path: Path, plugs: Path) -> None:
    config = config_of(tmp_path, "recorder:Recorder")
    assert feed_run(config, range(1, 3)) == ["self-test: k3 0"]
    begin, first, evaluation, *_, end = lines_of(tmp_path)
    assert (begin["begin"], begin["id"], begin["run_id"]) == (0, None, "run-id")
    assert begin["config"]["rollout.group_size"] == 8
    assert records_of(tmp_path) == [(step, kind) for step in (1, 2) for kind in ("step", "eval")]
    assert first["metrics"]["minibatch_0/loss"] == 1.25
    assert math.isnan(first["metrics"]["odd name@8"])
    assert first["metrics"]["eval/../x"] == math.inf
    assert (first["samples"], first["verdicts"]) == (1, ["self-test: k3 0"])
    assert evaluation["metrics"] == {"eval/pass_rate": 0.1}
    assert end == {"state": "finished", "error": ""}


@pytest.mark.parametrize(
    ("name", "records"),
    [("Recorder", [1, 2, 3, 4]), ("Rewinder", [1, 2, 3, 3, 4])],
    ids=["keeps what it has", "forgets undone steps"],
)
def test_a_resumed_run_goes_on_in_the_sink(tmp_path: Path, plugs: Path, name: str, records: list[int]) -> None:
    """Step 3 was not in the checkpoint, and is measured again."""
    config = config_of(tmp_path, f"recorder:{name}")
    feed_run(config, range(1, 4), stops=True)
    said = feed_run(config, range(3, 5), done=2)
    assert [step for step, kind in records_of(tmp_path, name) if kind == "step"] == records
    begins = [(line["begin"], line["id"]) for line in lines_of(tmp_path, name) if "begin" in line]
    assert begins == [(0, None), (2, "run 7")]
    assert [line["state"] for line in lines_of(tmp_path, name) if "state" in line] == ["stopped", "finished"]
    assert said == [f"sink recorder:{name} has steps up to 3, and the run goes on after step 2"]


def test_a_sink_that_fails_is_said_once_counted_and_sent_later(
    tmp_path: Path, plugs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_DEADLINE_S", 0.0)
    config, said = config_of(tmp_path, "recorder:Moody"), list[str]()
    config.run_dir.mkdir()
    with Feed(config, said.append, enabled=True) as sinks:
        sinks.begin("run-id", 0, evaluated=False)
        for step in (1, 2):
            sinks.add({"loss": 1.0})
            sinks.publish(step)
        until(lambda: sinks.look()["sinks/failing"])
        assert sinks.look() == {"sinks/failing": 1, "sinks/lost": 0}
        assert sinks.problems == {"recorder:Moody": "RuntimeError: no http://***@host/"}
    first, last = said
    assert first == "warning: sink recorder:Moody fails: RuntimeError: no http://***@host/"  # as status shows it
    assert last == "warning: sink recorder:Moody lacks records; the next start of the run sends them"
    assert records_of(tmp_path, "Moody") == []
    (config.run_dir / "well").touch()
    monkeypatch.setattr(feed, "_DEADLINE_S", 600.0)
    assert feed_run(config, range(0), done=2, evaluated=False) == []  # also a run without further steps sends the rest
    assert records_of(tmp_path, "Moody") == [(1, "step"), (2, "step")]


@pytest.mark.parametrize(
    ("name", "problem", "trying"),
    [("Stuck", "no answer for", "0000002.0.json"), ("Leaver", "its process has ended", "0000001.0.json")],
)
def test_a_sink_that_hangs_or_dies_does_not_hold_the_run(
    tmp_path: Path, plugs: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str, trying: str
) -> None:
    monkeypatch.setattr(feed, "_HANG_S", 0.2)
    monkeypatch.setattr(feed, "_DEADLINE_S", 0.5)
    config, said = config_of(tmp_path, f"recorder:{name}"), list[str]()
    config.run_dir.mkdir()
    with Feed(config, said.append, enabled=True) as sinks:
        sinks.begin("run-id", 0, evaluated=False)
        for step in (1, 2, 3):
            sinks.publish(step)
        (process,) = sinks._processes.values()
        until(lambda: read_record(config.run_dir / "sinks" / f"recorder:{name}.state").get("trying") == trying)
        until(lambda: sinks.look()["sinks/failing"] and problem in sinks.problems[f"recorder:{name}"])
    assert any(problem in line for line in said)
    assert said[-1].endswith("the next start of the run sends them")
    process.join()
    # Nobody knows whether the record arrived in the call that was cut off: it does not go out twice.
    run = SinkRun("", config.run_dir, "", None, {}, 3, None)
    assert feed.Follower(f"recorder:{name}", run, "0000003.0.json").state["sent"] == trying


def test_a_record_that_is_refused_ten_times_is_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sinks").mkdir()
    slept: list[float] = []
    monkeypatch.setattr(feed.time, "sleep", slept.append)
    follower = feed.Follower("x:y", SinkRun("", tmp_path, "", None, {}, 0, None), "0000000.0.json")
    assert follower._try(lambda: 1 / 0, "0000001.0.json") is None
    assert (follower.state["failures"], follower.state["sent"]) == (10, "")
    assert follower.state["error"].startswith("ZeroDivisionError")
    assert 240 < sum(slept) < 360
    (tmp_path / "sinks" / "end").touch()
    with pytest.raises(SystemExit):  # at the end of a run, the record stays for the next start
        follower._try(lambda: 1 / 0, "0000001.0.json")
    assert follower.state["failures"] == 13


def test_nothing_starts_without_sinks_or_on_other_ranks(tmp_path: Path) -> None:
    for config, enabled in ((config_of(tmp_path), True), (config_of(tmp_path, "tensorboard"), False)):
        with Feed(config, print, enabled=enabled) as feed:
            feed.begin("run-id", 0, evaluated=False)
            feed.publish(1)
            assert feed.look() == {}
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_numbers_and_texts_and_hides_undone_steps(tmp_path: Path) -> None:
    config = config_of(tmp_path, "tensorboard", run__name="shown")
    feed_run(config, range(1, 4))
    feed_run(config, range(3, 5), done=2)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert [point.step for point in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    assert [point.value for point in events.Scalars("minibatch_0/loss")] == [1.25, 2.25, 3.25, 4.25]
    assert [point.step for point in events.Scalars("eval/pass_rate")] == [1, 2, 3, 4]

    def text(tag: str, index: int = 0) -> str:
        return events.Tensors(tag)[index].tensor_proto.string_val[0].decode()

    assert "| run.name | shown |" in text("config")
    assert text("verdicts") == "self-test: k3 0"
    assert "1\\|2" in text("samples")
    assert "\\<b\\>↵" in text("samples")
    assert text("state") == "finished "


READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient

client = MlflowClient()
experiment = client.get_experiment_by_name("moe")
runs = client.search_runs([experiment.experiment_id])
info, data = runs[0].info, runs[0].data
points = {name: client.get_metric_history(info.run_id, name) for name in data.metrics}
history = {name: [(point.step, str(point.value)) for point in line] for name, line in points.items()}
files = [file.path for folder in ("samples", "verdicts") for file in client.list_artifacts(info.run_id, folder)]
with open(client.download_artifacts(info.run_id, files[0])) as file:
    table = json.load(file)
print(json.dumps([len(runs), info.status, info.run_name, history, data.params, data.tags, files, table]))
"""
FEED = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from megarl.run import feed
from test_sinks import config_of, feed_run

if __name__ == "__main__":
    folder, feed._DEADLINE_S = Path(sys.argv[1]), 600.0
    config = config_of(folder, "mlflow", "wandb", run__name="shown", log__project="moe")
    feed_run(config, range(1, 4), stops=True)
    print(feed_run(config, range(3, 5), done=2))
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a run that was stopped, went back from step 3 to 2, and finished, in MLflow and offline wandb."""
    folder = tmp_path_factory.mktemp("foreign")
    tests = [str(ROOT / "tests"), str(ROOT / "tests" / "trainer")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(sinks_release()), *tests])}
    environment |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri()}
    environment |= {"WANDB_MODE": "offline", "MY_API_KEY": "shown-is-bad"}
    (folder / "feed_it.py").write_text(FEED)
    done = subprocess.run(
        [sys.executable, "feed_it.py", str(folder)], env=environment, cwd=folder, capture_output=True, text=True
    )
    logs = "".join(log.read_text() for log in folder.glob("run/sinks/*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert "fails" not in done.stdout, logs
    assert "lacks" not in done.stdout, logs
    return folder, environment


@pytest.mark.gate
@pytest.mark.slow(minutes=1)
def test_mlflow_has_one_run_with_each_step_once(foreign: tuple[Path, dict[str, str]]) -> None:
    _, environment = foreign
    read = subprocess.run(
        [sys.executable, "-c", READ_MLFLOW], env=environment, capture_output=True, text=True, check=True
    )
    num_runs, status, name, history, params, tags, files, table = json.loads(read.stdout.splitlines()[-1])
    assert (num_runs, status, name) == (1, "FINISHED", "shown")
    assert [step for step, _ in history["reward/mean"]] == [1, 2, 3, 4]
    assert [step for step, _ in history["eval/pass_rate"]] == [1, 2, 3, 4]
    assert history["minibatch_0/loss"] == [[step, str(step + 0.25)] for step in (1, 2, 3, 4)]
    assert history["minibatch_0/tis.ess"][0] == [1, "2.0"]
    assert history["minibatch_0/tis.ess.fraction"][0] == [1, "0.5"]
    assert (history["odd name_8"][0], history["eval/...x"][0]) == ([1, "nan"], [1, "inf"])
    assert (params["rollout.group_size"], params["run.name"]) == ("8", "shown")
    assert tags["megarl.state"] == "finished "
    assert files[0] == "samples/step_0000001.json"
    assert "verdicts/step_0000001.txt" in files
    assert table["columns"] == ["step", "prompt", "response", "parts", "reward"]
    assert table["data"] == [[1, "1|2", "<b>\n", '[["a", "b"]]', None]]


READ_WANDB = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

rows, config, exits = [], {}, []
for path in sorted(sys.argv[1:]):
    data, place, whole = open(path, "rb").read(), 7, b""  # LevelDB's log: blocks of 32 KiB
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            record = Record.FromString(whole)
            whole = b""
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if items:
                rows.append(items)
            for item in record.run.config.update:
                config[item.key] = json.loads(item.value_json)
            if record.HasField("exit"):
                exits.append(record.exit.exit_code)
print(json.dumps([rows, config, exits]))
"""


@pytest.mark.gate
@pytest.mark.slow(minutes=1)
def test_wandb_has_each_step_once_under_one_id(foreign: tuple[Path, dict[str, str]]) -> None:
    folder, environment = foreign
    files = sorted(map(str, folder.glob("run/wandb/offline-run-*/run-run-id.wandb")))
    assert len(files) == 2  # one for each start; `wandb sync` joins them by the id
    command = [sys.executable, "-c", READ_WANDB, *files]
    rows, config, exits = json.loads(
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    steps = [row["global_step"] for row in rows if "reward/mean" in row]
    assert steps == [1, 2, 3, 4]
    assert [row["global_step"] for row in rows if "eval/pass_rate" in row] == [1, 2, 3, 4]
    internal = [row["_step"] for row in rows]
    assert internal == sorted(set(internal))
    assert rows[0]["minibatch_0/loss"] == 1.25
    assert rows[0]["samples/_type"] == rows[0]["verdicts/_type"] == "table-file"
    assert (config["rollout.group_size"], exits) == (8, [0, 0])


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("sglang.arguments", ["--api-key", "abc", "--port", "1"], '["--api-key", "***", "--port", "1"]'),
        ("sglang.arguments", ["--hf-token=d", "-x"], '["--hf-token=***", "-x"]'),
        ("environment.options", {"password": 'a"b c'}, '{"password": "***"}'),
        ("environment.options", {"x": {"a_token": "t", "tokens": "t"}}, '{"x": {"a_token": "***", "tokens": "t"}}'),
        ("megatron.api_key", "abc", "***"),
        ("data.train", "https://me:pw@host/x", "https://***@host/x"),
        ("model.path", "/data/hidden-value/model", "/data/***/model"),
        ("data.max_prompt_tokens", 16, 16),
        ("run.deterministic", False, False),
        ("model.tokenizer", "plain", "plain"),
        ("eval.sets", {"aime": "x.jsonl"}, '{"aime": "x.jsonl"}'),
    ],
)  # fmt: skip
def test_secrets_are_not_sent(key: str, value: Any, shown: Any) -> None:
    table, name = key.split(".")
    assert dict(flatten({table: {name: value}}, {"HF_TOKEN": "hidden-value", "HOME": "/data"})) == {key: shown}


def test_names_stay_apart_in_a_form_that_mlflow_takes() -> None:
    names = ["a/b", "a@b", "a_b", "ess", "x/ess", "x/ess/y", "../up", "a//c", "x" * 300, "/root", "tab\t"]
    new = dict(zip(names, (name for name, _ in allowed(dict.fromkeys(names, 1.0))), strict=True))
    assert new == {
        "a/b": "a/b", "a@b": "a_b", "a_b": "a_b_2", "ess": "ess", "x/ess": "x/ess", "x/ess/y": "x/ess.y",
        "../up": "_/up", "a//c": "a/.c", "x" * 300: "x" * 240, "/root": "_/root", "tab\t": "tab_",
    }  # fmt: skip


def test_wrong_sinks_are_refused_before_a_run(tmp_path: Path, plugs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for sinks in (["tensorbord"], ["mlflow", "mlflow"], ["a:b", "a:b"]):
        assert f'log.sinks: found "{sinks[0]}" in' in refusal(log__sinks=sinks)
    (plugs / "wandb").mkdir()  # not the package
    cases = {"mlflow": "megarl-moe[mlflow]", "wandb": "megarl-moe[wandb]", "recorder:None_": "nothing named"}
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, words in cases.items():
        with pytest.raises(ConfigError, match="found") as caught:
            load_sink(name)
        assert words in str(caught.value)
        failed = [check for check in check_inputs(config_of(tmp_path, name), None) if check.name == "log.sinks"]
        assert [(check.status, check.found) for check in failed] == [
            ("failed", str(caught.value).removeprefix("log.sinks: "))
        ]
    assert "mlflow" not in sys.modules
