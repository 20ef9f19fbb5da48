"""What weight updates as deltas (``sglang.deltas``) cost against whole updates, side by side in one run.

    python tools/bench_deltas.py [--steps 20] [--quickstart FOLDER] [--python .venv-sglang/bin/python] [--json FILE]

First part: real RL steps of the quickstart's model on one rank, with AdamW at its learning rate and at 1e-6. The
weights of every version go through both wires, bf16 and FP8 blocks: share of changed elements, bytes, and seconds to
encode and to expand, in this process. Those in bf16 also go to a real SGLang server, by a fleet with deltas and by one
without, in turns.

Second part: a model of 48 M parameters, of which a share has changed by one bit, to a real server.

--quickstart: the folder of a finished ``megarl quickstart``, else one is run. Bytes are those of base64, as sent.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config
from megarl.config.plugs import EngineKind
from megarl.config.tables.rollout import SGLangConfig
from megarl.data.tiny import write_tiny_model
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.plugin.deltas import Bases, encode
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.ipc import SharedMemory
from megarl.engines.sglang.transports.protocol import Tensors, make_message, payload_of
from megarl.engines.weights import Bucket, Intake, Named, WeightForm, checkpoint_shapes

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import Row, add_json, finish

BF16 = WeightForm(torch.bfloat16)
WIRES = {"bf16": BF16, "FP8 blocks": WeightForm(torch.bfloat16, "blocks")}
RATES = {"1e-4": "the quickstart's", "1e-6": "constant"}
SHARES = (0.0, 0.001, 0.01, 0.05, 0.2, 1.0)
"""Of changed elements, in the second part."""
ROUNDS = 2
"""Of the second part."""


def make_tee(config: Config, tell: Callable[[str], None]) -> Any:
    """The local engine, which also saves the weights of every version."""
    from megarl.trainer.engines import make_local_engine

    engine, folder = make_local_engine(config, tell), Path(os.environ["BENCH_DELTAS"])
    update = engine.update_weights

    def update_weights(tensors: Iterable[Named], version: int) -> None:
        weights = {name: tensor.clone() for name, tensor in tensors}
        torch.save(weights, folder / f"{version:04d}.pt")
        update(weights.items(), version)

    engine.update_weights = update_weights
    return engine


tee = EngineKind(make_tee, routes=True, fp8=True)


def train(quickstart: Path, folder: Path, rate: str, steps: int) -> list[Path]:
    """Run RL steps; return the files of the weights, one for each version."""
    folder.mkdir()
    options = {"run.dir": folder / "run", "run.steps": steps, "rollout.engine": "bench_deltas:tee"}
    options |= {"launch.ranks_per_node": 1, "eval.every": 0, "checkpoint.every": 0, "parallel.ep": 1}
    if rate != "1e-4":
        options |= {"optim.lr": rate, "optim.decay_style": "constant", "optim.min_lr": 0.0}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "BENCH_DELTAS": str(folder), "PYTHONPATH": path}
    command = [sys.executable, "-m", "megarl.cli", "train", str(quickstart / "quickstart.toml"), *words]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return sorted(folder.glob("*.pt"))


def buckets_of(weights: dict[str, torch.Tensor], model: Path, form: WeightForm) -> list[Bucket]:
    return [*Intake.for_servers(checkpoint_shapes(model), 1, form).buckets(weights.items())]


def measure_wire(
    versions: Iterable[dict[str, torch.Tensor]], model: Path, form: WeightForm
) -> Iterator[dict[str, float]]:
    """Yields a row for each version but the first."""
    bases, whole_bases, before = Bases(), Bases(), list[Bucket]()
    for weights in versions:
        buckets = buckets_of(weights, model, form)
        row = dict[str, float].fromkeys(("changed", "elements", "delta", "whole"), 0.0)
        row |= {f"{step} {kind}": 0.0 for step in ("encode", "expand") for kind in ("delta", "whole")}
        for index, bucket in enumerate(buckets):
            base = before[index] if before else None
            for kind, given, held in (("delta", base, bases), ("whole", None, whole_bases)):
                started = time.perf_counter()
                message = make_message(bucket, given)
                row[f"encode {kind}"] += time.perf_counter() - started
                row[kind] += len(message.text)
                raw, _ = encode(bucket.places, bucket.flat.numpy(), given and given.flat.numpy())
                started = time.perf_counter()
                held.expand(raw)
                row[f"expand {kind}"] += time.perf_counter() - started
            for (_, new), (_, old) in zip(bucket.tensors(), base.tensors() if base else (), strict=base is not None):
                row["changed"] += int(
                    (new.view(torch.uint8) != old.view(torch.uint8)).view(-1, new.itemsize).any(1).sum()
                )
                row["elements"] += new.numel()
        if before:
            yield row
        before = buckets


def measure_server(versions: Iterable[dict[str, torch.Tensor]], model: Path, url: str) -> Iterator[dict[str, float]]:
    """Yields the seconds of an update with deltas, of one without, of one through shared memory, and to encode the
    second."""
    ways, transports = {}, {"update delta": Tensors(), "update whole": Tensors(), "update by ipc": SharedMemory()}
    for name, transport in transports.items():
        settings = SGLangConfig(checksums=False, deltas=name == "update delta")
        ways[name] = Fleet(urls=[url], source=model, settings=settings, transport=transport, poll_s=1000.0, tell=_tell)
        ways[name].start()
    for version, weights in enumerate(versions):
        row = {}
        for name, fleet in [*ways.items()][:: 1 if version % 2 else -1]:
            started = time.perf_counter()
            fleet.update(weights.items(), version, BF16)
            row[name] = time.perf_counter() - started
        started = time.perf_counter()
        for bucket in buckets_of(weights, model, BF16):
            payload_of(bucket)
        row["encode plain"] = time.perf_counter() - started
        if version:
            yield row
    for fleet in ways.values():
        fleet.close()


def _tell(line: str) -> None:
    if "API key" not in line:
        print(line, flush=True)


@contextmanager
def serving(model: Path, python: str, folder: Path) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    with Server(ServerSpec(model, python, "bfloat16", folder / "log", max_total_tokens=4096)) as server:
        server.wait_ready(900.0)
        yield server.url


def changed_by_one_bit(model: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Weights in bf16; of each version another share differs from the version before."""
    generator = torch.Generator().manual_seed(0)
    shapes = checkpoint_shapes(model)
    weights = {name: 0.02 * torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    yield weights
    for share in SHARES * ROUNDS:
        for tensor in weights.values():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            tensor.view(torch.int16).bitwise_xor_(chosen.to(torch.int16))
        yield weights


def rows_of(name: str, runs: list[dict[str, float]]) -> Iterator[Row]:
    """Yields medians over the updates, with minimum and maximum."""
    if "elements" in runs[0]:
        runs = [
            run | {"changed, %": 100 * run["changed"] / run["elements"], "bytes, %": 100 * run["delta"] / run["whole"]}
            for run in runs
        ]
        runs = [run | {"whole, MB": run["whole"] / 1e6} for run in runs]
    for what in runs[0]:
        if what not in ("changed", "elements", "delta", "whole"):
            values = [run[what] for run in runs]
            unit = "" if what[-1] in "%B" else "s"
            yield Row(name, what, statistics.median(values), unit, min(values), max(values))


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    quickstart = arguments.quickstart
    if quickstart is None:
        quickstart = folder / "quickstart"
        command = [sys.executable, "-m", "megarl.cli", "quickstart", "--out", str(quickstart)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    model = quickstart / "model"
    with serving(model, arguments.python, folder / "small") as url:
        for rate, what in RATES.items():
            files = train(quickstart, folder / rate, rate, arguments.steps)
            for wire, form in WIRES.items():
                yield from rows_of(f"lr {rate} ({what}), {wire}", [*measure_wire(map(torch.load, files), model, form)])
            yield from rows_of(f"lr {rate} ({what}), server", [*measure_server(map(torch.load, files), model, url)])
    sizes = {"hidden_size": 256, "expert_width": 256, "num_layers": 4, "num_experts": 64}
    large = write_tiny_model(folder / "large-model", **sizes)
    wire = [*measure_wire(changed_by_one_bit(large), large, BF16)]
    with serving(large, arguments.python, folder / "large") as url:
        seconds = [*measure_server(changed_by_one_bit(large), large, url)]
    runs = [first | second for first, second in zip(wire, seconds, strict=True)]
    for index, share in enumerate(SHARES):
        yield from rows_of(f"{share:.1%} changed", runs[index :: len(SHARES)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quickstart", type=Path)
    parser.add_argument("--python", default=".venv-sglang/bin/python")
    add_json(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(arguments, Path(folder)):
            rows.append(row)
            print(
                f"{row.name:32} {row.what:16} {row.value:9.4f} {row.unit}  ({row.low:.4f} to {row.high:.4f})",
                flush=True,
            )
    return finish(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
