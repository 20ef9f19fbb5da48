"""What the launcher decides from what trainers leave behind; here they are a few words of shell."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lean import make_environment
from run_configs import SMALLEST

from megarl.config import Config
from megarl.config.file import parse
from megarl.engines.sglang.server import Server, ServerSpec
from megarl.errors import ConfigError, DataError, MegarlError, PeerError, RolloutError
from megarl.ops.launch import node, steps
from megarl.ops.launch import supervisor as module
from megarl.ops.launch.steps import Node, ServerSteps, Step, end_file, srun
from megarl.ops.launch.supervisor import Supervisor
from megarl.ops.shipped import SCRIPTS
from megarl.run.status import write_failure

FINISHES = """echo '{"state": "finished", "attempt": "'$MEGARL_ATTEMPT'"}' > $RUN/status.json"""


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Handlers and variables of a launcher go with its test."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def config(folder: Path, **launch: Any) -> Config:
    return parse({**SMALLEST, "run": {"steps": 1, "dir": str(folder / "run")}, "launch": launch})


class Launched(Supervisor):
    """Its trainer is a line of shell, with $RUN for the run's folder."""

    trainer = "true"

    def _trainer_words(self) -> list[str]:
        return ["sh", "-c", self.trainer.replace("$RUN", str(self.folder))]


def launched(folder: Path, trainer: str, stage: str = "train", **launch: Any) -> Launched:
    made = Launched(config(folder, **{"max_restarts": 0, **launch}), [stage, "c.toml"])
    made.trainer = trainer
    return made


def test_what_an_earlier_launch_of_the_same_job_has_left_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = launched(tmp_path, f"{FINISHES}; echo $MEGARL_ATTEMPT > $RUN/stop")
    assert first.run() == 0
    second = launched(tmp_path, "test $(cat $RUN/stop) != $MEGARL_ATTEMPT || kill -9 $$; exit 3")
    assert second.run() == 1  # it has said nothing, so it has not finished
    told = capsys.readouterr().err
    assert "exit code 3; last seen: rank 0: no sign of life" in told
    assert f"no rank of {sys.executable} has said a word" in told
    assert first.logs != second.logs
    failing = f'{sys.executable} -c \'import megarl.cli; megarl.cli.main(["status", "/nowhere"])\''
    assert launched(tmp_path, f"{failing}; exit 3").run() == 2
    assert launched(tmp_path, "exit 3").run() == 1  # that word was of another start


@pytest.mark.parametrize(
    ("kind", "starts", "code", "says"),
    [
        ("DamageError", 1, 1, "given up: why"),  # and is not called bad input
        ("ConfigError", 1, 2, "the trainer cannot go on: why"),
        ("RolloutError", 3, 1, "the trainer died 3 times without a new checkpoint and is given up: why"),
    ],
)
def test_what_would_end_the_next_start_too_is_not_started_again(
    kind: str, starts: int, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Launched(config(tmp_path, max_restarts=2), ["train", "c.toml"])
    failure = json.dumps({"kind": kind, "message": "why"})
    made.trainer = f"echo began >> $RUN/began; echo '{failure}' > $MEGARL_FAILURE; exit 1"
    assert made.run() == code
    assert (tmp_path / "run" / "began").read_text() == "began\n" * starts
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "work", "code", "says"),
    [
        ("eval", "exit 0", 0, ""),  # writes no status: the exit code decides
        (
            "sft",
            "test -e $RUN/began || { touch $RUN/began; exit 3; }",
            0,
            "the cold start died (exit code 3); starting",
        ),
        ("eval", "exit 3", 1, "the evaluation died 2 times and is given up: exit code 3"),
        ("eval", "exit 143", 75, ""),  # somebody else has ended it
        ("sft", 'echo \'{"kind": "DataError", "message": "why"}\' > $MEGARL_FAILURE; exit 1', 2, "cannot go on: why"),
    ],
)
def test_an_evaluation_or_a_cold_start_is_judged_by_its_exit_code_and_begins_anew(
    stage: str, work: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "launch.json").write_text("of a trainer")
    (tmp_path / "run" / "status.json").write_text('{"state": "running"}')
    made = launched(tmp_path, work, stage, max_restarts=1)
    assert made.run() == code
    assert says in capsys.readouterr().err
    launch = json.loads((tmp_path / "run" / stage / "launch.json").read_text())
    assert launch["command"] == [stage, "c.toml"]
    assert launch["says"].startswith({0: "finished", 75: "stopped"}.get(code, "gave up"))
    assert (tmp_path / "run" / "launch.json").read_text() == "of a trainer"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 0)])
def test_an_evaluation_ends_at_once_on_request_and_goes_on_near_the_time_limit(
    number: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = launched(tmp_path, f"kill -{number} {os.getpid()}; sleep 2; echo done > $RUN/done", "eval")
    assert made.run() == code
    assert (tmp_path / "run" / "eval" / "done").exists() == (code == 0)
    assert ("asked to stop by SIGTERM; the evaluation was killed" in capsys.readouterr().err) == (code == 75)


def test_a_cold_start_on_nodes_of_servers_starts_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launched(tmp_path, "exit 0", "sft")
    machine = Node("n1", "127.0.0.1")
    monkeypatch.setattr(steps, "find", lambda *_: steps.Topology((machine,), (machine,), 1, 20001, (20002,)))
    assert made.run() == 0
    launch = json.loads((tmp_path / "run" / "sft" / "launch.json").read_text())
    assert (launch["topology"]["servers"], launch["command"]) == ([], ["sft", "c.toml"])


def test_a_stop_before_the_trainer_starts_none_and_a_cancelled_job_is_not_requeued(tmp_path: Path) -> None:
    made = launched(tmp_path, "touch $RUN/began")
    made._on_signal(signal.SIGUSR1, None)
    assert made._stop_signal == signal.SIGUSR1
    made._on_signal(signal.SIGTERM, None)  # Slurm's, where the limit comes before the end
    assert made._stop_signal == signal.SIGUSR1
    made._on_signal(signal.SIGINT, None)
    assert made._stop_signal == signal.SIGINT
    assert made.run() == 75
    assert not (tmp_path / "run" / "began").exists()


def test_a_launcher_whose_folder_is_taken_over_ends_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.1)
    other = '{"host": "another-node", "pid": 12, "since": "then"}'
    made = launched(tmp_path, f"echo '{other}' > $RUN/launch.lock; sleep 60; touch $RUN/ended")
    with pytest.raises(ConfigError, match="in use by process 12 on another-node"):
        made.run()
    assert json.loads((tmp_path / "run" / "launch.lock").read_text())["host"] == "another-node"
    assert not (tmp_path / "run" / "ended").exists()


def test_servers_are_ended_by_the_launch_that_started_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_GRACE_S", 0.1)
    made = launched(tmp_path, FINISHES)
    assert made.run() == 0
    made._servers._steps = [Step("servers", ["sleep", "60"])]
    made._servers.stop()
    name = json.loads((tmp_path / "run" / "launch.json").read_text())["launch"]
    assert end_file(tmp_path / "run" / "launch.json", 0).read_text() == name == made.logs.name


def test_a_trainer_begins_only_when_it_can_be_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_FULL_DISK_S", 3.0)
    made, original, failed = launched(tmp_path, FINISHES), module.write_atomically, [0]

    def full(path: Path, data: bytes) -> None:
        if b"running" in data and (failed[0] < 3 or always):
            failed[0] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, data)

    monkeypatch.setattr(module, "write_atomically", full)
    always = False
    assert made.run() == 0
    assert failed == [3]
    always = True
    assert launched(tmp_path, f"touch $RUN/began; {FINISHES}").run() == 1
    assert not (tmp_path / "run" / "began").exists()
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("order", [0, 1])
def test_the_rank_that_knows_why_has_the_word(order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "failure.json"
    monkeypatch.setenv("MEGARL_FAILURE", str(path))
    others = RolloutError("sampling failed on 1 other ranks")
    others.second_hand = True
    errors: list[MegarlError] = [DataError("line 3: no answer"), PeerError("rank 0 lost the others"), others]
    for error in errors if order == 0 else reversed(errors):
        write_failure(error)
    assert json.loads(path.read_text())["kind"] == "DataError"
    write_failure(ConfigError("later"))
    assert json.loads(path.read_text())["message"] == "line 3: no answer"
    write_failure(MegarlError("rank 0 on a was killed by SIGKILL"), is_cause=True)
    write_failure(DataError("later"))
    assert json.loads(path.read_text())["message"] == "rank 0 on a was killed by SIGKILL"


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ({0: (2, 100), 1: (-9, 100)}, 1),  # rank 0 lost the killed one, and torchrun saw both at once
        ({0: (-15, 100), 1: (1, 100)}, 1),  # torchrun has ended rank 0
        ({0: (-15, 100), 1: (2, 101), 2: (-6, 100)}, 2),
        ({0: (-15, 100)}, 0),
    ],
)
def test_the_rank_that_died_first_is_found(failures: dict[int, tuple[int, int]], cause: int) -> None:
    found = {rank: SimpleNamespace(exitcode=code, timestamp=when) for rank, (code, when) in failures.items()}
    assert node.find_cause(found) == cause


def test_words_commands_and_folders_that_cannot_be_are_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_SRUN_ARGS", "--container-image='a b'")
    assert srun([Node("n1", "10.0.0.1")])[-1] == "--container-image=a b"
    monkeypatch.setenv("MEGARL_SRUN_ARGS", "--container-image='a b")
    with pytest.raises(ConfigError, match=r"MEGARL_SRUN_ARGS: found .* No closing quotation"):
        srun([Node("n1", "10.0.0.1")])
    with pytest.raises(ConfigError, match="trainer: /no/python could not be started"):
        Step("trainer", ["/no/python"])
    spec = ServerSpec(tmp_path, tmp_path / "no", "float32", tmp_path / "log")
    with pytest.raises(ConfigError, match=r"found no Python at .*/no: set sglang\.python"):
        Server(spec).start()
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"run\.dir: .* cannot be written"):
        launched(tmp_path, "true").run()


@pytest.mark.parametrize("script", sorted(SCRIPTS.iterdir()), ids=lambda path: path.name)
def test_a_setup_file_cannot_change_the_words_of_a_script(script: Path, tmp_path: Path) -> None:
    assert shutil.which("bash")
    setup, python = tmp_path / "setup.sh", tmp_path / "python"
    setup.write_text('[[ -z "$*" ]] || echo "saw $*"\nset -- replaced\nexport FROM_SETUP=1\n')
    python.write_text('#!/bin/sh\necho "$FROM_SETUP $*"\n')
    python.chmod(0o755)
    env = {**os.environ, "MEGARL_SETUP": str(setup), "MEGARL_PYTHON": str(python)}
    words = ["my config.toml", "--train.replay", "r2"]
    done = subprocess.run(["bash", script, *words], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 -m megarl.cli launch my config.toml --train.replay r2 --launch.layout")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, r"MEGARL_PYTHON is not set; tried \S+/python3 on \S+, which cannot import megarl \(ModuleNotFoundError"),
        ({"MEGARL_PYTHON": "no/python"}, r"MEGARL_PYTHON is no/python; tried no/python on .*No such file"),
        ({"MEGARL_SETUP": "no.sh"}, r"MEGARL_SETUP: there is no readable file no.sh \(working folder /"),
    ],
)
@pytest.mark.parametrize("script", sorted(SCRIPTS.iterdir()), ids=lambda path: path.name)
def test_a_script_names_the_variable_that_is_missing_or_wrong(
    script: Path, variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "bare", distributions=())
    environment = {"PATH": os.pathsep.join([str(python.parent), "/usr/bin", "/bin"]), **variables}
    done = subprocess.run(
        ["bash", script, "c.toml"], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert re.match(rf"megarl: error: {said}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


class ShellServers(ServerSteps):
    """Its servers are lines of shell; $READY is the file that says that one answers."""

    lines: tuple[str, ...] = ()

    def _start_step(self, index: int) -> Step:
        ready = steps.ready_file(self._launch_file, index)
        ready.unlink(missing_ok=True)
        if self.lines[index] == READY:
            ready.touch()
        line = self.lines[index].replace("$READY", str(ready)).replace("$FOLDER", str(ready.parent))
        return Step(f"server {index}", ["sh", "-c", line], self._log(index))


READY, ANSWERS, DIES, LATE = "sleep 61", "touch $READY; sleep 60", "exit 3", "sleep 60"
SPEAKS = "echo but; echo why; echo 'srun: error: n5: task 0: Exited with exit code 1'; exit 1"
ONCE = "test -e $FOLDER/again || { touch $FOLDER/again; exit 3; }; touch $READY; sleep 60"


@pytest.mark.parametrize(
    ("lines", "first", "outcome"),
    [
        ((ANSWERS, DIES), True, True),
        ((ANSWERS, ONCE), True, True),
        ((READY, LATE), True, True),  # after start_deadline_s
        ((DIES, DIES), True, "server 0 ended with exit code 3 before it was ready.*; server 1 ended"),
        ((SPEAKS,) * 4, True, r"server0.log ends with: why \(the step's Python.*; server 1 ended .*; and 2 more$"),
        ((LATE, LATE), True, "none of 2 servers was ready after sglang.start_deadline_s = 1 s"),
        ((DIES, "exit 2"), True, ConfigError),
        ((ONCE, ONCE), False, True),
        ((), True, True),
    ],
)
def test_the_trainer_begins_with_the_servers_that_answer(
    tmp_path: Path, lines: tuple[str, ...], first: bool, outcome: bool | str | type
) -> None:
    made = launched(tmp_path, "true")
    sglang = made.config.sglang.model_copy(update={"start_deadline_s": 1.0 if lines[1:] == (LATE,) else 100.0})
    made.config = made.config.model_copy(update={"sglang": sglang})
    made.logs = tmp_path / "run" / "logs"
    made.logs.mkdir(parents=True)
    made.launch_file = tmp_path / "run" / "launch.json"
    made.topology = replace(steps.find(made.config, {}), server_ports=tuple(range(len(lines))))
    made._servers = ShellServers(made.config, made.launch_file, made.logs, made._tell)
    made._servers.lines = lines
    made._servers.start(made.topology)
    made._failure_file = made.logs / "failure.json"
    try:
        if outcome is True:
            assert made._wait_for_servers(first=first)
        else:
            kind, told = (RolloutError, outcome) if isinstance(outcome, str) else (outcome, "exit code 2")
            with pytest.raises(kind, match=str(told)):
                made._wait_for_servers(first=first)
    finally:
        for step in made._servers._steps:
            step.stop(grace_s=1.0)
