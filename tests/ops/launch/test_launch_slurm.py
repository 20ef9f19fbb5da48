"""The scripts of launch/ on a real Slurm of two nodes, with real SGLang servers, requeued, killed and cancelled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import preloaded
import psutil
import pytest
from absent import SGLANG_PYTHON
from audit_reader import check
from launch_world import CONFIG, STEPS, Run, World, assert_whole, processes_of, rank_pid, read_json, until
from slurm_cluster import Cluster

from megarl.ops.shipped import SCRIPTS
from megarl.run.status import read_status

ROOT = Path(__file__).parents[3]
TWO_NODES = CONFIG.replace("ranks_per_node = 2", 'layout = "colocated"\nnodes = 2\nstop_grace_s = 30.0')
SGLANG = """
[sglang]
python = "{python}"
max_total_tokens = 4096
spare_weights = "disk"
"""
APART = CONFIG.replace(
    "ranks_per_node = 2", 'layout = "disaggregated"\nranks_per_node = 2\nserver_nodes = 1\nstop_grace_s = 30.0'
)

pytestmark = [pytest.mark.slow(minutes=6), pytest.mark.multirank]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(autouse=True)
def nodes_are_free_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves no job to those after it."""
    yield
    if "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        cluster.run("scancel", "--user=root")
        until(lambda: not cluster.run("squeue", "-h").strip(), "the queue is empty")


@dataclass
class Job(Run):
    """A submitted run."""

    cluster: Cluster
    id: str

    @property
    def said(self) -> str:
        return self.log.read_text()[-6000:]

    def until_start(self, number: int) -> None:
        self.until(lambda: self.said.count("starting it again") == number - 1, "the trainer is started again")
        self.until(lambda: self.status().get("attempt", "").endswith(f"-{number}"), f"start {number}")

    def set_time_limit(self, minutes: int) -> None:
        """Of all its starts, the one that runs included."""
        self.cluster.run("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")

    def ended(self, timeout_s: float = 1800.0) -> str:
        """Its state at the end, e.g. COMPLETED."""
        return self.cluster.wait(self.id, timeout_s)["JobState"]


def submit(
    cluster: Cluster, world: World, script: str, config: Path, *options: str, evaluates: Sequence[str] | None = None
) -> Job:
    """Torchrun and its rank on a node import once for both. With the options of an evaluation, the job is one."""
    log = config.with_suffix(".log")
    step = preloaded.write_python(world.root / "python", sys.executable, "megarl.ops.launch.node", preloaded.MODULES)
    environment = world.environment(MEGARL_PYTHON=sys.executable, MEGARL_STEP_PYTHON=str(step))
    words = [config] if evaluates is None else ["eval", config, *evaluates]
    job = cluster.submit(*options, f"--output={log}", SCRIPTS / script, *words, env=environment, cwd=world.root)
    return Job(world, config, cluster, job)


def torchrun_of(job: Job, node: int) -> psutil.Process:
    """The process of the step of a node."""
    for process in processes_of(job.folder):
        runs = process.cmdline()[1:3] == ["-m", "megarl.ops.launch.node"]
        if runs and process.environ().get("SLURM_NODEID") == str(node):
            return process
    raise AssertionError(f"no torchrun of node {node}")


def nobody_is_left(job: Job) -> bool:
    return not processes_of(job.config) and not processes_of(job.folder)


@pytest.mark.gate
@pytest.mark.needs("shellcheck")
def test_scripts_are_clean() -> None:
    done = subprocess.run(["shellcheck", *sorted(SCRIPTS.glob("*.s*"))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.gate
@pytest.mark.needs("slurm")
def test_a_job_that_is_requeued_in_mid_run_ends_with_the_numbers_of_one_that_was_not(
    cluster: Cluster, world: World, reference: Path
) -> None:
    job = submit(cluster, world, "colocated.sbatch", world.config("requeued", TWO_NODES), "--nodes=2")
    job.until_step(3)
    cluster.run("scontrol", "requeue", job.id)
    assert job.ended() == "COMPLETED", job.said
    assert int(cluster.job(job.id)["Restarts"]) == 1
    assert "resumed from" in job.said
    assert_whole(job.folder, reference)


@pytest.mark.needs("slurm")
def test_a_job_evaluates_on_two_nodes_and_begins_anew_when_it_is_requeued(
    cluster: Cluster, world: World, reference: Path
) -> None:
    outs, jobs = [world.root / name for name in ("eval-job", "eval-requeued")], []
    for out, more in ((outs[0], ()), (outs[1], ("--reward.function", "lengths:slow_reward", "--samples", "64"))):
        config = world.config(out.name, TWO_NODES)
        options = [
            "--checkpoint",
            str(reference),
            "--out",
            str(out),
            "--samples",
            "2",
            "--eval.max_prompts",
            "8",
            *more,
        ]
        options += ["--eval.max_prompts", "8"]
        jobs.append(submit(cluster, world, "colocated.sbatch", config, "--nodes=2", evaluates=options))
    evaluated, requeued = jobs
    assert evaluated.ended() == "COMPLETED", evaluated.said
    assert len((outs[0] / "heldout" / "responses.jsonl").read_text().splitlines()) == 16
    logs = [*evaluated.folder.glob("eval/logs/*/attempt1/node*/*/attempt_0/*/stdout.log")]
    assert len({log.parents[3] for log in logs}) == 2  # both nodes
    until(lambda: bool([*requeued.folder.glob("eval/logs/*/attempt1/node1/*/attempt_0/*/stdout.log")]), "ranks")
    cluster.run("scontrol", "requeue", requeued.id)
    assert requeued.ended() == "COMPLETED", requeued.said
    assert int(cluster.job(requeued.id)["Restarts"]) == 1
    assert "given up" not in requeued.log.read_text()
    assert len((outs[1] / "heldout" / "responses.jsonl").read_text().splitlines()) == 512


@pytest.mark.needs("slurm")
def test_a_job_near_its_time_limit_saves_itself_and_is_requeued(cluster: Cluster, world: World) -> None:
    config = world.config("limit", TWO_NODES, steps=400)
    job = submit(cluster, world, "colocated.sbatch", config, "--nodes=2", "--time=60", "--signal=B:USR1@300")
    job.until_step(1)
    hours, minutes, seconds = map(int, cluster.job(job.id)["RunTime"].split(":"))
    next_minute = (hours * 3600 + minutes * 60 + seconds) // 60 + 1
    job.set_time_limit(next_minute + 3)  # it ends in 180 to 240 s: Slurm gives notice when it looks next
    job.until(lambda: "asked to stop by SIGUSR1" in job.said, "the notice")
    job.set_time_limit(60)  # the next start has time
    job.until(lambda: int(cluster.job(job.id).get("Restarts", 0)) >= 1, "requeued")
    assert "asked to stop by SIGUSR1; the trainer saved itself" in job.said, job.said
    job.until(lambda: "resumed from" in job.said, "resumed")
    cluster.run("scancel", job.id)
    job.ended()
    lines = [json.loads(line) for line in (job.folder / "samples.jsonl").read_text().splitlines()]
    resumed = [line["resumed_after"] for line in lines if "resumed_after" in line]
    assert resumed[0] == 0
    assert resumed[1] > 0
    before = [line["step"] for line in lines[: [i for i, line in enumerate(lines) if "resumed_after" in line][1]][1:]]
    assert before == list(range(1, resumed[1] + 1))  # nothing was done twice


@pytest.mark.needs("slurm")
def test_ranks_steps_and_scripts_that_are_killed_cost_nothing_that_is_saved(
    cluster: Cluster, world: World, reference: Path
) -> None:
    job = submit(cluster, world, "colocated.sbatch", world.config("killed", TWO_NODES), "--nodes=2")
    job.until_step(3)
    os.kill(rank_pid(job.folder, 1), signal.SIGKILL)
    job.until_start(2)
    job.until_step(5)
    os.kill(torchrun_of(job, node=1).pid, signal.SIGKILL)
    job.until_start(3)
    job.until_step(6)
    supervisor = [p for p in processes_of(job.config) if "launch" in p.cmdline()]
    os.kill(supervisor[0].pid, signal.SIGKILL)
    assert job.ended() == "FAILED"
    job.until(lambda: nobody_is_left(job), "nobody is left")
    again = submit(cluster, world, "colocated.sbatch", job.config, "--nodes=2")
    assert again.ended() == "COMPLETED", again.said
    assert_whole(job.folder, reference)


@pytest.mark.needs("slurm")
def test_a_second_submission_is_refused_or_waits_and_a_cancelled_job_leaves_nobody(
    cluster: Cluster, world: World
) -> None:
    config = world.config("twice-slurm", TWO_NODES, steps=200)
    shared = ["--nodes=2", "--exclusive=user", "--mem=4000"]  # a second job of the same user may begin beside it
    first = submit(cluster, world, "colocated.sbatch", config, *shared, "--job-name=twice")
    first.until_step(1)
    refused = submit(cluster, world, "colocated.sbatch", config, *shared, "--job-name=other")
    assert refused.ended() == "FAILED"
    assert cluster.job(refused.id)["ExitCode"] == "2:0"
    assert f"Slurm job {first.id}" in first.said
    waits = submit(cluster, world, "colocated.sbatch", config, *shared, "--job-name=twice")

    def depends() -> bool:
        found = cluster.job(waits.id)
        return (found.get("JobState"), found.get("Reason")) == ("PENDING", "Dependency")

    until(depends, "the second job waits for the first")
    cluster.run("scancel", waits.id)
    first.until_step(3)
    cluster.run("scancel", first.id)
    assert first.ended() == "CANCELLED"
    first.until(lambda: nobody_is_left(first), "nobody is left")
    assert read_status(first.folder)["state"] in ("stopped", "lost", "failed")


def with_sglang(world: World, name: str, text: str, python: Path) -> Path:
    text = text.replace('dtype = "fp32"\n[train]', 'dtype = "fp32"\nengine = "sglang"\n[train]')
    return world.config(name, text + SGLANG.replace("{python}", str(python)))


@pytest.mark.needs("slurm")
@pytest.mark.sglang
def test_servers_beside_the_trainer_on_two_nodes(
    cluster: Cluster, world: World, sglang_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_sglang(world, "colocated", TWO_NODES, sglang_python)
    config.write_text(config.read_text().replace("[sglang]", '[sglang]\napi_key_env = "KEY"'))
    monkeypatch.setenv("KEY", "secret-of-the-test")
    job = submit(cluster, world, "colocated.sbatch", config, "--nodes=2")
    assert job.ended() == "COMPLETED", job.said
    assert check(job.folder / "samples.jsonl", STEPS) == STEPS * 32
    job.until(lambda: nobody_is_left(job), "nobody is left")


@pytest.mark.needs("slurm")
@pytest.mark.sglang
@pytest.mark.parametrize("layout", ["disaggregated", "heterogeneous"])
def test_servers_on_a_node_of_their_own_are_killed_and_nothing_is_lost(
    cluster: Cluster, world: World, sglang_python: Path, layout: str
) -> None:
    config = with_sglang(world, layout, APART.replace("disaggregated", layout), sglang_python)
    nodes = ["--nodes=2"] if layout == "disaggregated" else []
    job = submit(cluster, world, f"{layout}.sbatch", config, *nodes)
    job.until_step(2)
    launch = read_json(job.folder / "launch.json")
    assert [node["name"] for node in launch["topology"]["trainers"]] == ["n1"]
    assert [node["name"] for node in launch["topology"]["servers"]] == ["n2"]
    if layout == "disaggregated":  # the server, whose step the launcher starts again
        server = [p for p in processes_of(world.root) if "sglang.launch_server" in p.cmdline()]
        os.killpg(os.getpgid(server[0].pid), signal.SIGKILL)
        job.until_step(4)
    else:  # the step itself
        step = [
            p for p in processes_of(job.folder) if "megarl.ops.launch.serve" in p.cmdline() and "srun" not in p.name()
        ]
        os.kill(max(step, key=psutil.Process.create_time).pid, signal.SIGKILL)
        job.until(lambda: "starting it again" in job.said, "the step is started again")
    assert job.ended() == "COMPLETED", job.said
    assert check(job.folder / "samples.jsonl", STEPS) == STEPS * 32
    assert "secret" not in job.said
    job.until(lambda: nobody_is_left(job), "nobody is left")
    asked = ["--checkpoint", str(job.folder), "--samples", "2", "--eval.max_prompts", "8"]
    evaluation = submit(cluster, world, f"{layout}.sbatch", config, *nodes, evaluates=asked)
    assert evaluation.ended() == "COMPLETED", evaluation.said
    launch = read_json(job.folder / "eval" / "launch.json")
    assert [node["name"] for node in launch["topology"]["servers"]] == ["n2"]
    found = read_json(job.folder / "eval" / f"step_{STEPS:07d}" / "eval.json")
    assert found["benchmarks"]["heldout"]["figures"]["responses"] == 16
    assert (job.folder / "eval" / "sglang" / "server0").is_dir()  # beside those of the trainer


@pytest.mark.sglang
def test_one_machine_without_slurm_with_a_server(world: World) -> None:
    config = with_sglang(world, "local-sglang", CONFIG, SGLANG_PYTHON)
    environment = world.environment(MEGARL_PYTHON=sys.executable)
    done = subprocess.run(
        [SCRIPTS / "local.sh", config], env=environment, cwd=world.root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert check(world.root / "local-sglang" / "samples.jsonl", STEPS) == STEPS * 32
