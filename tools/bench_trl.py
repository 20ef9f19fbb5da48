"""What a step of the quickstart costs beside TRL's, and which share of it is not the model's.

    python tools/bench_trl.py [--json FILE] [--rounds 12]

megarl and TRL train the same model on the same prompts, from the same cold start, with one process and one thread each:
32 prompts x 8 responses of at most 10 tokens, two optimizer steps, fp32, one micro-batch each. The processes take
turns, step by step, so that other load on the machine affects both. Costs are CPU seconds of a process. Phases are
those of its main thread; what other threads do is overhead.

- megarl is the quickstart's configuration on one rank: R3, weights rounded through FP8, tripwires, all metrics, the log
  of each step, and signs of life, which a thread of its own writes. It computes old log-probabilities for the second
  mini-batch alone.
- TRL is GRPOTrainer with the transformers engine. It samples all responses in one batch, too. It computes old
  log-probabilities for both mini-batches, and logs after the clock has stopped. It has no replay, no second copy of the
  weights, and no gap between two engines to watch. Its balancing loss is off, as megarl's.

The loop's overhead is the rest of a megarl step: all but the passes of the model (the engine's with its cache,
Megatron's forward with log-probabilities, its backward) and the optimizer. Models 4 and 16 times as large are wider.
They have no cold start, so their responses have 10 tokens and rewards of 0; neither changes the work per token. Their
engine takes the weights as they are: rounding through FP8 emulates other hardware, and would be most of the overhead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from environments import ROOT, cache_folder, installation, key, trl_release

TRL = "1.16.0"
WARM_UP = 2
PASSES = ("sampling passes", "old pass", "forward", "backward", "optimizer")
"""What is not overhead; the phases below are."""
PHASES = (
    "weight update", "choice of tokens", "rest of sampling", "prepare", "comparison", "coefficients", "log", "other",
)  # fmt: skip


# The processes


class Worker:
    """A process that runs one step whenever it is asked to."""

    def __init__(self, words: Sequence[str], **environment: str) -> None:
        own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
        self._words = " ".join(words)
        self._process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"{self._words}: ended with {self._process.wait()}, expected an answer")
        return json.loads(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def _megarl(model: Path, task: Path, steps: int, fp8: bool) -> Worker:
    return Worker([__file__, "--worker", str(model), str(task), str(steps), "fp8" if fp8 else "exact"])


def _trl(model: Path, task: Path, steps: int) -> Worker:
    words = [str(ROOT / "tools" / "trl_worker.py"), str(model), str(task / "train.jsonl"), str(steps)]
    return Worker(words, PYTHONPATH=str(trl_release(TRL)))


class _Clock:
    """CPU seconds of the main thread by phase; those of an inner phase do not count in the outer one."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inner = [0.0]

    def watch(self, owner: Any, function: str, name: str | Callable[..., str]) -> None:
        original = getattr(owner, function)

        def timed(*arguments: Any, **named: Any) -> Any:
            phase = name if isinstance(name, str) else name(*arguments)
            self._inner.append(0.0)
            started = time.thread_time()
            try:
                return original(*arguments, **named)
            finally:
                seconds = time.thread_time() - started
                self.spent[phase] = self.spent.get(phase, 0.0) + seconds - self._inner.pop()
                self._inner[-1] += seconds

        setattr(owner, function, timed)


def run_megarl(model: str, task: str, steps: int, fp8: bool) -> None:
    """A run of the quickstart's configuration, one step for each line on standard input."""
    from megatron.core.pipeline_parallel import schedules

    from megarl.config.file import parse
    from megarl.engines.local import decode, engine
    from megarl.megatron import distributed
    from megarl.megatron.passes import forward
    from megarl.run.metrics_log import MetricsLog
    from megarl.run.stop_request import StopRequest
    from megarl.run.vitals import Vitals
    from megarl.trainer import passes
    from megarl.trainer import step as training
    from megarl.trainer.loop import Trainer

    answers, sys.stdout = sys.stdout, sys.stderr
    run = Path(tempfile.mkdtemp())
    config = parse(_table(Path(model), Path(task), run, steps, fp8))
    distributed.initialize(config)
    clock = _Clock()

    class Steps(Trainer):
        def _step(self, step: int) -> None:
            sys.stdin.readline()
            clock.spent.clear()
            started = time.process_time()
            super()._step(step)
            seconds = time.process_time() - started
            clock.spent["other"] = seconds - sum(clock.spent.values())
            print(json.dumps({"seconds": seconds, "phases": clock.spent}), file=answers, flush=True)

    # Megarl's passes without gradients are those for old log-probabilities.
    clock.watch(forward, "_run_schedule", lambda *arguments: "forward" if arguments[2] else "old pass")
    clock.watch(training.TrainStep, "old_pass", "comparison")
    clock.watch(schedules, "backward_step", "backward")
    for name in ("coefficients", "surrogate_metrics"):
        clock.watch(training, name, "coefficients")
    clock.watch(passes, "compare_engines", "comparison")
    clock.watch(training.TrainStep, "prepare", "prepare")
    clock.watch(engine, "decode", "choice of tokens")
    clock.watch(Trainer, "_sample", "rest of sampling")
    clock.watch(Trainer, "_sync", "weight update")
    clock.watch(MetricsLog, "write", "log")
    vitals, stop = Vitals(run, 0, 1, steps=steps, hang_s=3600.0), StopRequest()
    with MetricsLog(run) as log, vitals:
        trainer = Steps(config, log, vitals, stop)
        for name in ("optimizer_step", "zero_grad"):
            clock.watch(trainer.policy, name, "optimizer")
        clock.watch(trainer.engine._model, "forward", "sampling passes")  # type: ignore[attr-defined]
        clock.watch(decode.Reader, "select", "sampling passes")  # the cache of responses that go on
        trainer.run()


def _table(model: Path, task: Path, run: Path, steps: int, fp8: bool) -> dict[str, Any]:
    import tomllib

    from megarl.ops.quickstart import config_text

    text = config_text("qwen3_moe", config=run / "quickstart.toml", run=run, model=model, task=task)
    table = tomllib.loads(text)
    table["parallel"]["ep"] = 1
    table["run"]["steps"] = steps
    table["rollout"]["fp8_rounding"] = fp8
    table["eval"]["every"] = table["checkpoint"]["every"] = 0
    table["checkpoint"]["at_end"] = False
    table.pop("sft")
    return table


# Models


def quickstart_model() -> Path:
    """A folder with the quickstart's ``model`` after its cold start, and ``task``; made once for all clones."""
    sources = [ROOT / "megarl" / name for name in ("data/tiny.py", "ops/quickstart.toml", "trainer/sft.py")]
    folder = cache_folder() / f"quickstart-model-{key(*(path.read_text() for path in sources))}"
    with installation(folder) as is_missing:
        if is_missing:
            from megarl.data.tiny import write_sort_task, write_tiny_model
            from megarl.ops.quickstart import config_text

            print("making the quickstart's model (a minute, once for all clones)", file=sys.stderr)
            write_tiny_model(folder / "untrained")
            write_sort_task(folder / "task")
            path, names = folder / "quickstart.toml", ("run", "model", "task")
            text = config_text("qwen3_moe", config=path, **{name: folder / name for name in names})
            path.write_text(text.replace("ep = 2", "ep = 1"))
            words = ["-m", "megarl.cli", "sft", path, "--model.path", folder / "untrained"]
            own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            subprocess.run([sys.executable, *map(str, words)], env={**os.environ, **own}, check=True, stdout=sys.stderr)
    return folder


def _write_wider(path: Path, factor: int) -> Path:
    """A model with ``factor ** 2`` times the weights."""
    from megarl.data.tiny import write_tiny_model

    widths = {"hidden_size": 128, "expert_width": 64, "num_heads": 4, "num_kv_heads": 2}
    return write_tiny_model(path, **{name: width * factor for name, width in widths.items()})


# Results


def _row(name: str, what: str, values: Sequence[float], budget: float | None, unit: str = "ratio") -> dict[str, Any]:
    """The median, and what is left of the values without a tenth at each end."""
    ordered, cut = sorted(values), len(values) // 10
    row = {"name": name, "what": what, "value": statistics.median(values), "unit": unit}
    row |= {"low": ordered[cut], "high": ordered[-1 - cut]}
    return row | {"budget": budget, "kind": None if budget is None else "at_most"}


def _overhead(told: Sequence[dict[str, Any]]) -> list[float]:
    return [1 - sum(one["phases"].get(name, 0.0) for name in PASSES) / one["seconds"] for one in told]


def measure(rounds: int) -> list[dict[str, Any]]:
    """Rows for both questions; ``rounds`` paired steps of the small model, fewer of the larger ones."""
    shared, rows = quickstart_model(), []
    model, task = shared / "model", shared / "task"
    with _megarl(model, task, rounds + WARM_UP, fp8=True) as ours, _trl(model, task, rounds + WARM_UP) as theirs:
        pairs = [(ours.step(), theirs.step()) for _ in range(rounds + WARM_UP)][WARM_UP:]
    mine, others = ([one["seconds"] for one in told] for told in zip(*pairs, strict=True))
    told = [one for one, _ in pairs]
    ratios = [ours / theirs for ours, theirs in zip(mine, others, strict=True)]
    rows.append(_row("step / TRL", "quickstart's step, megarl's CPU time by TRL's", ratios, 0.9))
    rows.append(_row("step megarl", "quickstart's step on one rank", mine, None, "CPU s"))
    rows.append(_row("step TRL", f"the same with TRL {TRL}", others, None, "CPU s"))
    rows.append(_row("loop 1x", "share of the loop's overhead, quickstart", _overhead(told), 0.08))
    for name in (*PASSES, *PHASES):
        shares = [one["phases"].get(name, 0.0) / one["seconds"] for one in told]
        rows.append(_row(f"share {name}", "of the quickstart's step", shares, None))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as workers:
        for factor, budget, number in ((2, None, max(2, rounds // 2)), (4, 0.03, max(2, rounds // 3))):
            wider = _write_wider(Path(folder, str(factor)), factor)
            worker = workers.enter_context(_megarl(wider, task, number + WARM_UP, fp8=False))
            told = [worker.step() for _ in range(number + WARM_UP)][WARM_UP:]
            rows.append(_row(f"loop {factor**2}x", "the same, larger model", _overhead(told), budget))
    return rows


def is_broken(row: dict[str, Any]) -> bool:
    return row["kind"] == "at_most" and row["value"] > row["budget"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    rows = measure(asked.rounds)
    for row in rows:
        limit = "" if row["budget"] is None else f"budget {row['budget']:.2f}"
        spread = f"{row['low']:.3f} to {row['high']:.3f} {row['unit']:>6}"
        print(f"{row['name']:>24} {row['value']:7.3f}  {spread}  {limit}{'  BROKEN' if is_broken(row) else ''}")
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(any(map(is_broken, rows)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_megarl(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "fp8")
    else:
        main()
