"""``megarl quickstart``: from an empty folder to a report in a minute on two cores.

Quickstart makes a tiny Qwen3-MoE, or a dense model, and the task of sorting six digits. Demonstrations, 55 % of them
sorted in the wrong order, teach the format. RL selects the right order. The ranks of both commands are forks of one
process, so torch and Megatron are imported once.
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any

from megarl import enable_cpu
from megarl.config import Config
from megarl.config.command import OnConfiguration
from megarl.config.file import load
from megarl.data.tiny import Family, write_sort_task, write_tiny_model
from megarl.engines.sglang.spec import CPU_SHIM, free_port
from megarl.errors import ConfigError, MegarlError, RolloutError, reason_of, refusal, reworded
from megarl.files.outputs import write_output
from megarl.files.texts import read_table
from megarl.models.shapes import read_shape
from megarl.ops.exits import run_to_exit
from megarl.ops.report.report import write_report
from megarl.run.metrics_log import describe_judged, read_metrics
from megarl.run.progress import program
from megarl.run.status import read_status

RANKS = 2

CONFIG = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
"""The configuration, with the paths {config}, {run}, {model} and {task} left open."""
_TEXTS = read_table(__file__, "quickstart_texts.toml")


def config_text(family: Family, **paths: Path) -> str:
    """The configuration for a model of this family."""
    text = CONFIG.format(**paths, megarl=program())
    for moe, dense in _TEXTS["dense"].items() if family != "qwen3_moe" else ():
        text = text.replace(moe, dense)
    return text


def quickstart(out: Path, family: Family = "qwen3_moe") -> None:
    """Make model and task in ``out``, run cold start, RL and report, and print the result; skip finished steps. Where
    the report exists, say what there is and how to go on or begin anew.

    ConfigError if ``out`` is no folder for it, MegarlError if a step fails or the family is another.
    """
    with reworded(OSError, ConfigError, f"--out {out}: cannot be made a folder (", "); choose another one", reason_of):
        out.mkdir(parents=True, exist_ok=True)
    run, model, task = out / "run", out / "model", out / "task"
    path = out / "quickstart.toml"
    text = config_text(family, config=path, run=run, model=model, task=task)
    untrained = out / "model-untrained"
    if (untrained / "config.json").exists() and (other := read_shape(untrained).family) != family:
        raise MegarlError(f"{out} holds a model of the family {other}: add --family {other}, or choose another --out")
    if not path.exists() and (entries := [entry.name for entry in out.iterdir()]):
        raise ConfigError(f"--out {out}: found {entries[0]}, expected a new or empty folder; choose another one")
    if (run / "report" / "index.html").exists():
        return _say(_TEXTS["finished"].format(out=out, **_describe(path, run)))
    write_output(path, text.encode())
    # The ranks inherit this. Quickstarts are for a CPU; with more threads than cores, training is up to a hundred times
    # slower.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    started = time.monotonic()
    config = load(path)
    if not (untrained / "config.json").exists():
        _say(f"making a tiny {family} model and 4096 sorting problems")
        write_tiny_model(untrained, seed=config.run.seed, family=family)
    if not (task / "demonstrations.jsonl").exists():
        write_sort_task(task, seed=config.run.seed)
    enable_cpu()  # before the forks of the ranks
    from megarl.trainer.loop import train
    from megarl.trainer.sft import sft

    command, overrides = OnConfiguration(path), {"model.path": str(untrained)}
    if not (model / "config.json").exists():
        _say("cold start: Megatron learns the format from demonstrations, 55 % of them sorted the wrong way")
        start_ranks(["sft", str(path)], lambda: sft(command.load_for_ranks(overrides)))
    replay, ep = config.train.replay, config.parallel.ep
    _say(f"RL: MiniRL, replay {replay}, FP8-rounded rollout weights, {RANKS} ranks, ep {ep}")
    start_ranks(["train", str(path)], lambda: train(command.load_for_ranks({})))
    write_report(run)
    _print_summary(out, config, time.monotonic() - started)


def start_ranks(words: Sequence[str], work: Callable[[], int | None], num: int = RANKS) -> None:
    """Run the work of ``megarl WORDS`` in ``num`` forks of this process, with torchrun's environment for ranks.

    RolloutError if a rank fails.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    arguments = num, free_port("127.0.0.1"), words, work
    ranks: Any = start_processes(_be_rank, arguments, nprocs=num, join=False, start_method="fork")
    try:
        while not ranks.join():
            pass
    except KeyboardInterrupt:
        for process in ranks.processes:
            process.join()  # the ranks also got the signal, and are saving
        raise
    except ProcessExitedException as error:
        raise RolloutError(refusal("step_failed", command=words[0], code=error.exit_code)) from None


def _be_rank(rank: int, num: int, port: int, words: Sequence[str], work: Callable[[], int | None]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num), "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num)}
    import torch

    torch.set_num_threads(1)  # a fork has no threads of the parent, and would wait for the threads
    sys.exit(run_to_exit(words, work))


def _print_summary(out: Path, config: Config, seconds: float) -> None:
    evaluations = [r for r in read_metrics(config.run_dir / "metrics.jsonl") if r["kind"] == "eval"]
    rates, judged = [record["eval/pass_rate"] for record in evaluations], describe_judged(evaluations[-1], "eval")
    facts = {"first": rates[0], "last": rates[-1], "best": max(rates), "judged": judged and f", {judged}"}
    _say(_TEXTS["summary"].format(seconds=seconds, **facts, **_describe(out / "quickstart.toml", config.run_dir)))


def _describe(path: Path, run: Path) -> dict[str, Any]:
    """Where the run is, and words for the commands that go on from there."""
    status, report = read_status(run), run / "report" / "index.html"
    more = status["steps"] * (2 if status["state"] == "finished" else 1)
    places = {"path": path, "run": run, "hf": path.with_name("exported"), "report": report, "cpu": relpath(CPU_SHIM)}
    words = {name: shlex.quote(str(place)) for name, place in places.items()}
    return {**status, **words, "megarl": program(), "python": program("python"), "more": more}


def _say(text: str) -> None:
    print(f"quickstart: {text}", flush=True)
