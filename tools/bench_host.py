"""The host's time in an update, by phase: routing replay, none, and plain Megatron on the same model, paired.

    tests/null_gpu/python tools/bench_host.py [--layers 94] [--micros 64] [--tokens 256] [--length 128] [--repeats 5]
                                              [--shape tiny] [--json FILE] [any --table.key value]

The null GPU runs no kernel, so that the process's time is what the host needs to launch everything. Kernels leave no
values there: routers choose experts in turn, and compiled functions allocate their outputs and do nothing else
(`tests/null_gpu/without_values.py`). On a real GPU the times include kernels wherever the host waits for them.

Phases, each without those inside it:

- prepare: ``TrainStep.prepare`` and the old-log-prob pass are before the update, and only "prepare" is timed.
- forward: the model, from the embedding to the last layer.
- loss: output layer, log-probabilities, coefficients, metrics of a micro-batch.
- backward: autograd over all of it.
- optimizer: clearing of gradients, clipping, Adam, learning rate.
- metrics: the statistics of the update on the host.
- rest: replay's sessions, checks, the schedule.

Beside each phase stand its kernel launches, and at the end the waits of the host for the GPU by place.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
ON_NULL_GPU = bool(os.environ.get("NULL_GPU"))
from null_gpu import without_values  # noqa: E402

if ON_NULL_GPU:  # before Megatron and Transformer Engine are imported
    without_values.install()

import bench_plain  # noqa: E402
import numpy as np  # noqa: E402
from bench_rows import finish, ratio_row, take_json  # noqa: E402
from bench_update import SHAPES, Bench, arguments, configuration  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.optimizer import optimizer  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from null_gpu.counting import Counts  # noqa: E402

from megarl.config import Config  # noqa: E402
from megarl.config.file import split_overrides  # noqa: E402
from megarl.core.devices import DeviceChecks  # noqa: E402
from megarl.megatron import distributed  # noqa: E402
from megarl.megatron.policy import Policy  # noqa: E402
from megarl.trainer import passes  # noqa: E402

DEFAULTS = {
    "--layers": "94",
    "--micros": "64",
    "--tokens": "256",
    "--length": "128",
    "--repeats": "5",
    "--shape": "tiny",
}
PHASES = ("prepare", "forward", "loss", "backward", "optimizer", "metrics", "rest")
BUDGET = 1.05


class HostClock:
    """Seconds and launches by phase; an inner phase is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._running: list[str] = []
        self._since = (0.0, 0)

    def _mark(self) -> None:
        now = time.process_time() if ON_NULL_GPU else time.perf_counter(), Counts.now().launches if ON_NULL_GPU else 0
        if self._running:
            self.seconds[self._running[-1]] += now[0] - self._since[0]
            self.launches[self._running[-1]] += now[1] - self._since[1]
        self._since = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._mark()
        self._running.append(name)
        try:
            yield
        finally:
            self._mark()
            self._running.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted as the phase's."""

        def call(*arguments: Any, **named: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **named)

        return call


class HostBench(Bench):
    """Updates whose time is taken by phase."""

    def __init__(self, config: Config, options: argparse.Namespace) -> None:
        super().__init__(config, options)
        self.clocks: dict[str, list[HostClock]] = {name: [] for name in self.updates}

    def run(self, name: str) -> float:
        """Prepare and update once; return the seconds of the update."""
        clock = HostClock()
        with contextlib.ExitStack() as stack:
            for owner, function, phase in (
                (schedules, "forward_step", "forward"),
                (schedules, "forward_step_calc_loss", "loss"),
                (GPTModel, "_postprocess", "loss"),
                (schedules, "backward_step", "backward"),
                (Policy, "zero_grad", "optimizer"),
                (Policy, "optimizer_step", "optimizer"),
                (type(self.policy.optimizer), "step", "optimizer"),
                (bench_plain, "collect", "metrics"),
            ):
                timed = clock.timed(phase, getattr(owner, function))
                stack.enter_context(patch.object(owner, function, timed))
            if name in self.steps:
                with clock.phase("prepare"):
                    self.steps[name].prepare(self.rollouts, self.advantages)
            with clock.phase("rest"):
                super().run(name)
        self.clocks[name].append(clock)
        return sum(seconds for phase, seconds in clock.seconds.items() if phase != "prepare")


def main() -> int:
    words, file = take_json(sys.argv[1:])
    flags, overrides = split_overrides(words)
    options = arguments([*(word for pair in DEFAULTS.items() for word in pair), *flags])
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(options, Path(folder), overrides)
        distributed.initialize(config)
        if ON_NULL_GPU:  # checks and counts are read, but what they read has no meaning
            add = DeviceChecks.add
            DeviceChecks.add = lambda self, is_wrong, refuse: add(self, is_wrong, lambda: None)
            norm = optimizer.get_grad_norm_fp32
            optimizer.get_grad_norm_fp32 = lambda *words, **named: (norm(*words, **named), 1.0)[1]
            count = passes.count_flips
            passes.count_flips = lambda shared, topk, batch: count(np.full_like(shared, topk), topk, batch)
            without_values.balance_routes(SHAPES[options.shape]["num_experts_per_tok"])
        bench = HostBench(config, options)
        bench.measure(options.repeats)
    what = f"{options.layers} layers x {options.micros} micro-batches of {options.tokens} tokens"
    print(f"{what}: ms of the host (kernel launches), medians of {options.repeats}")
    print(" ".join(f"{word:>18}" for word in ("", *bench.clocks)))
    for phase in (*PHASES, "update"):
        cells = [cell(clocks[-options.repeats :], phase) for clocks in bench.clocks.values()]
        print(" ".join(f"{word:>18}" for word in (phase, *cells)))
    rows = []
    for name, base in (("none", "plain"), ("r3", "none")):
        ratios = [a / b for a, b in zip(bench.seconds[name], bench.seconds[base], strict=True)]
        rows.append(ratio_row(f"host time of an update, {name} / {base}", what, ratios, BUDGET))
        print(f"{rows[-1].name}: {rows[-1].value:.3f} ({rows[-1].low:.3f} to {rows[-1].high:.3f})")
    for name in bench.updates:
        places = bench.waits(name)
        print(f"waits of {name}: {sum(places.values())} {dict(places.most_common(12))}")
    return finish(rows, file)


def cell(clocks: list[HostClock], phase: str) -> str:
    """Median milliseconds and launches of a phase, or of all phases of an update."""
    phases = [phase] if phase != "update" else [each for each in PHASES if each != "prepare"]
    seconds = statistics.median(sum(clock.seconds[each] for each in phases) for clock in clocks)
    return f"{1e3 * seconds:.1f} ({sum(clocks[-1].launches[each] for each in phases)})"


if __name__ == "__main__":
    sys.exit(main())
