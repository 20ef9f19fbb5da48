"""The command line as a user calls it: alone, under torchrun, with mistakes, from cold start to report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import tomli_w
from absent import SGLANG_PYTHON

from megarl.config.tables.health import HealthConfig
from megarl.data.tiny import write_sort_task, write_tiny_model
from megarl.engines.sglang.spec import free_port
from megarl.run.metrics_log import read_metrics
from megarl.watch.health import judge_run

pytestmark = pytest.mark.multirank
Result = subprocess.CompletedProcess[str]
REWARDS = """
import os

from megarl.data.rewards import instantaneous
from megarl.errors import ConfigError


def digit_share(*, prompt, response, answer):
    return sum(map(str.isdigit, response)) / max(len(response), 1)


@instantaneous  # in the rank itself: a worker knows nothing of ranks
def fails_on_rank_1(*, prompt, response, answer):
    if os.environ.get("RANK") == "1":
        raise ConfigError("this reward cannot work here")
    return digit_share(prompt=prompt, response=response, answer=answer)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its task, rewards and a configuration."""
    folder = tmp_path_factory.mktemp("home")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_experts": 8, "expert_width": 32, "max_positions": 32}
    write_tiny_model(folder / "model", **sizes, initializer_range=0.1)
    write_sort_task(folder / "task", num_train=64, num_heldout=16, num_demonstrations=400, digits=3, wrong_share=0.0)
    (folder / "end_to_end_rewards.py").write_text(REWARDS)
    (folder / "run.toml").write_text(tomli_w.dumps(settings(folder)))
    return folder


def settings(folder: Path) -> dict[str, Any]:
    task = folder / "task"
    sizes = {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 6}
    taught = {"data": str(task / "demonstrations.jsonl"), "out": str(folder / "taught")}
    return {
        "run": {"steps": 2, "dir": str(folder / "run")},
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {"train": str(task / "train.jsonl"), "heldout": str(task / "heldout.jsonl"), "max_prompt_tokens": 8},
        "reward": {"function": "end_to_end_rewards:digit_share"},
        "rollout": {**sizes, "fp8_rounding": True, "dtype": "fp32"},
        "train": {"mini_batches": 2, "micro_batch_tokens": 128},
        "optim": {"lr": 1e-3},
        "eval": {"every": 1},
        "sft": {**taught, "steps": 120, "batch_size": 64, "lr": 5e-3},
    }


def call(folder: Path, *words: str | Path, ranks: int = 1, timeout_s: float = 1800.0, fresh: bool = False) -> Result:
    """``megarl WORDS``, alone or under torchrun; with ``fresh`` by interpreters that import everything themselves."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, *launcher, "-m", "megarl.cli", *map(str, words)]
    if fresh:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s, cwd=folder)
    return preloaded.run(command, env=environment, timeout=timeout_s, cwd=folder)


def complaints(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("megarl: error")]


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == kind]


def test_train_under_torchrun_with_expert_parallelism(home: Path) -> None:
    result = call(
        home, "train", home / "run.toml", "--run.dir", home / "two", "--parallel.ep", "2", ranks=2, fresh=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    steps = records(home / "two", "step")
    assert [record["step"] for record in steps] == [1, 2]
    assert result.stdout.count("step 2/2") == 1  # one rank speaks
    for wanted in ("reward/mean", "response/length_mean", "rollout/k3", "rollout/k1", "rollout/entropy", "time/step_s"):
        assert all(np.isfinite(record[wanted]) for record in steps), wanted
    assert any((home / "two" / "tensorboard").iterdir())
    drawn = call(home, "report", home / "two")
    assert drawn.returncode == 0, drawn.stderr[-3000:]
    assert (home / "two" / "report" / "index.html").stat().st_size > 1000


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_run(home: Path) -> None:
    """The other rank waits in a collective; it must not wait for ever."""
    words = ["--eval.every", "0", "--reward.function", "end_to_end_rewards:fails_on_rank_1"]
    folder = home / "one_fails"
    result = call(home, "train", home / "run.toml", "--run.dir", folder, *words, ranks=2, timeout_s=900.0)
    assert result.returncode != 0
    assert "megarl: error (rank 1): this reward cannot work here" in result.stderr


@pytest.mark.slow
def test_sft_teaches_the_task_and_its_checkpoint_is_one(home: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = call(home, "sft", home / "run.toml", "--parallel.ep", "2", ranks=2)
    assert result.returncode == 0, result.stderr[-3000:]
    model = AutoModelForCausalLM.from_pretrained(home / "taught", dtype=torch.float32).eval()
    untaught = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "taught")
    rows = [json.loads(line) for line in (home / "task" / "heldout.jsonl").read_text().splitlines()]
    losses, right = {"before": [], "after": []}, 0
    for row in rows:
        prompt = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        target = tokenizer(row["answer"] + tokenizer.eos_token, return_tensors="pt", add_special_tokens=False)
        whole = torch.cat([prompt, target["input_ids"]], 1)
        with torch.no_grad():
            for name, one in (("before", untaught), ("after", model)):
                full = torch.log_softmax(one(whole).logits[0, :-1], -1)
                picked = full.gather(1, whole[0, 1:, None])[prompt.size(1) - 1 :]
                losses[name].append(-float(picked.mean()))
            made = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.size(1) :]
        right += tokenizer.decode(made, skip_special_tokens=True).strip() == row["answer"]
    assert np.mean(losses["after"]) < 0.5 * np.mean(losses["before"])
    assert right >= 8  # of 16 prompts that no demonstration has
    refused = call(home, "sft", home / "run.toml", "--sft.batch_size", "63", ranks=2)
    assert refused.returncode != 0
    assert "sft.batch_size" in complaints(refused)[0]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("quickstart") / "out"
    return out, call(out.parent, "quickstart", "--out", out)


def test_acceptance_quickstart_learns_and_leaves_a_report(quickstart: tuple[Path, Result]) -> None:
    out, result = quickstart
    assert result.returncode == 0, result.stderr[-3000:]
    rates = [record["eval/pass_rate"] for record in records(out / "run", "eval")]
    assert rates[0] <= 0.5
    assert rates[-1] >= 0.85
    steps = records(out / "run", "step")
    assert len(steps) == 30
    assert all(record["router/flip"] == 0.0 for record in steps)
    assert max(record["router/native/flip"] for record in steps) > 0.0
    calm = HealthConfig(idle_share="off")  # how fast this machine is says nothing about the run
    assert judge_run(read_metrics(out / "run" / "metrics.jsonl"), calm) == []
    assert (out / "run" / "report" / "index.html").is_file()
    assert str(out / "run" / "report" / "index.html") in result.stdout


@pytest.mark.slow
def test_quickstart_says_so_when_it_has_finished_and_goes_on_when_it_has_not(quickstart: tuple[Path, Result]) -> None:
    out, first = quickstart
    assert first.returncode == 0
    again = call(out.parent, "quickstart", "--out", out)
    assert again.returncode == 0
    assert f"{out} holds a quickstart already: RL finished, 30 of 30 steps\n" in again.stdout
    for line in (
        f"report   {out}/run/report/index.html",
        f"export   megarl convert {out}/run",
        f"anew     rm -r {out}",
    ):
        assert line in again.stdout.replace(f"{Path(sys.executable).parent}/", "")
    # As if it had been killed before the report: nothing is taught or trained again, the report is drawn.
    before = (out / "run" / "metrics.jsonl").read_bytes()
    taught = (out / "model" / "config.json").stat().st_mtime_ns
    (out / "run" / "report" / "index.html").unlink()
    resumed = call(out.parent, "quickstart", "--out", out)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert (out / "run" / "report" / "index.html").is_file()
    assert (out / "model" / "config.json").stat().st_mtime_ns == taught
    assert (out / "run" / "metrics.jsonl").read_bytes() == before
    assert "cold start" not in resumed.stdout


@pytest.mark.slow(minutes=4)
@pytest.mark.sglang
def test_what_the_quickstart_prints_can_be_run_as_it_stands(quickstart: tuple[Path, Result]) -> None:
    """Export, transformers, a real SGLang server and an evaluation; the tutorial shows the same lines."""
    out, first = quickstart
    said = first.stdout[first.stdout.index("quickstart: done in") :]
    lines = dict(re.findall(r"^  (\w+) +(.*)$", said, re.MULTILINE))
    shown = {name: line.replace(str(out), "runs/quickstart") for name, line in lines.items()}
    page = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
    for name in ("evaluate", "export", "load", "ask"):
        shown[name] = re.sub(r"^\S*/(megarl|python) ", r"\1 ", shown[name])
        assert f"    {shown[name]}\n" in page, shown[name]
    assert re.sub("PYTHONPATH=\\S+", "PYTHONPATH=megarl/engines/sglang/cpu", shown["serve"].split("  #")[0]) in page

    def shell(line: str, **options: Any) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            line, shell=True, cwd=out.parent, capture_output=True, text=True, env=environment, **options
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    shell(lines["export"])
    told = shell(lines["load"])
    answer = re.search(r"672159=(\d{6})", told)
    assert answer, told
    assert sorted(answer[1]) == sorted("672159")  # the model has learnt to sort, and nearly always upwards
    assert "heldout" in shell(lines["evaluate"])
    (out.parent / ".venv-sglang").symlink_to(SGLANG_PYTHON.parents[1])
    port = free_port("127.0.0.1")  # 30000 may be somebody's
    words = f"exec env {lines['serve'].replace(' --device', f' --port {port} --device')}"
    log = out.parent / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            words, shell=True, cwd=out.parent, stdout=output, stderr=output, start_new_session=True
        )
    try:
        until = time.monotonic() + 1200.0
        while server.poll() is None and time.monotonic() < until and "Uvicorn running" not in log.read_text():
            time.sleep(0.5)
        assert server.poll() is None, log.read_text()[-3000:]
        told = shell(lines["ask"].replace("30000", str(port)), timeout=300)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert sorted(json.loads(told)["text"][:6]) == sorted("672159"), told
