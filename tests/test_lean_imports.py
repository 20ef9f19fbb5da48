"""What megarl needs: for the formulas and for replay torch and Megatron-Core, for routing traces a few packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lean import KIT, make_environment
from megatron_releases import installed
from run_configs import run_text

from megarl.data.tiny import write_tiny_model
from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, write_traces

ROOT = Path(__file__).parents[1]
ABSENT = "import importlib.util as u; print([n for n in ('pydantic', 'transformers', 'rich') if u.find_spec(n)])"
REPLAY = "import megarl.replay"
PLUGIN = "import megarl.plugin"
MEGATRON = "import torch, megatron.core.models.gpt, megatron.core.transformer.moe.moe_layer"
CORE = "import " + ", ".join(
    f"megarl.core.{name}" for name in ("objectives", "advantages", "ratios", "sampling", "packing")
)


def third_party(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after this import, without those of Python."""
    tell = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    names = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True).stdout.split()
    return set(names) - sys.stdlib_module_names


@pytest.mark.parametrize(
    ("statement", "peers"),
    [(REPLAY, MEGATRON), (PLUGIN, MEGATRON), (CORE, "import torch, numpy")],
    ids=["replay", "plugin", "core"],
)
def test_nothing_comes_along_but_torch_and_megatron(statement, peers):
    assert third_party(statement) - third_party(peers) == {"megarl"}
    assert {"megarl", "pydantic"} <= third_party("import megarl.config")  # the measure sees it


def test_traces_need_few_packages_and_what_is_missing_is_named(lean, tmp_path):
    experts = np.array([[[0, 1]], [[2, 3]]], np.int32)
    a, b = (str(tmp_path / name) for name in "ab")
    for path, rows in ((a, experts), (b, experts[::-1])):
        write_traces(path, TraceInfo("tiny", (0,), 4, 2), [TracedSequence("s", RoutingTrace(rows, 4))])
    assert "top-2 of 4" in lean("trace", "inspect", a).stdout
    assert "100.000%" in lean("trace", "diff", a, b).stdout
    for words, told in (
        (("patch", "status"), "this Python has no megatron-core"),
        (("quickstart",), "needs the package jinja2, which is not installed: pip install 'megarl-moe[train]'\n"),
    ):
        done = lean(*words)
        assert done.returncode == 2
        assert told in done.stderr


def test_a_plan_prepared_data_and_a_launcher_import_no_torch() -> None:
    modules = (
        "ops.plan.table",
        "ops.doctor",
        "ops.launch.supervisor",
        "data.prepare.prepare",
        "run.status",
        "commands",
    )
    found = third_party("import " + ", ".join(f"megarl.{module}" for module in modules))
    assert {"pydantic", "numpy"} <= found
    assert not found & {"torch", "transformers", "megatron", "sympy", "jinja2", "datasets", "aiohttp", "psutil"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, prompts and run.toml."""
    folder = tmp_path_factory.mktemp("run")
    write_tiny_model(folder / "model", seed=0)
    for name in ("data", "heldout"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "1+1", "answer": "2", "response": "2"}\n')
    places = {"run__dir": "run", "model__path": "model", "data__train": "data.jsonl", "data__heldout": "heldout.jsonl"}
    sft = {"data": str(folder / "data.jsonl"), "steps": 1, "batch_size": 1, "lr": 1e-4}
    (folder / "run.toml").write_text(run_text(sft=sft, **{key: str(folder / name) for key, name in places.items()}))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        *("train run.toml", "sft run.toml", "eval run.toml", "gap model --config run.toml", "quickstart"),
        *("convert model out", "quantize model out", "report run", "verify --engine http://127.0.0.1:9"),
        *("launch run.toml", "data prepare data.jsonl out --model model", "data prepare owner/name out"),
    ],
)
def test_a_command_that_needs_torch_says_in_one_line_what_to_install(lean, here: Path, words: str) -> None:
    done = lean(*(str(here / word) if (here / word).exists() or word == "run" else word for word in words.split()))
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"megarl: error: .*'megarl-moe\[(train|data)\]'.*\n", done.stderr), done.stderr
    assert ("[data]" in done.stderr) == words.startswith("data")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("kit"), distributions=KIT)


@pytest.mark.parametrize("release", ["0.16.1", "0.19.2"])
def test_the_plug_in_replays_with_megatron_alone(kit: Path, release: str, tmp_path: Path) -> None:
    """Of the distribution, the process sees the package folder only."""
    (tmp_path / "megarl").symlink_to(ROOT / "megarl")
    path = os.pathsep.join([str(tmp_path), str(installed(release))])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [kit, "-W", "ignore", *words], capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    assert run("-c", ABSENT).stdout == "[]\n"
    version = run("-c", "import megatron.core; print(megatron.core.__version__)").stdout.split()[-1]
    assert version == release
    done = run(ROOT / "examples" / "plugged_in.py", "--replay", "r3", "--steps", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("r3 held\n")


def test_no_import_of_megarl_changes_the_process() -> None:
    """In fresh processes, not forks; the snapshot sees what ``megarl.enable_cpu()`` changes."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "import_snapshot.py"], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    )
    changes, names, on_cpu = json.loads(done.stdout.rpartition("CHANGES")[2])
    assert changes == []
    doors = {"megarl.plugin", "megarl.replay", "megarl.routes", "megarl.core.objectives", "megarl.trainer.loop"}
    assert doors <= {*names}
    assert {
        "torch.cuda.current_device",
        "torch.cuda.Stream",
        "Tensor.cuda",
        "torch.distributed.distributed_c10d.ProcessGroupGloo",
        "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
        "warnings.filters",
    } <= {*on_cpu}
    assert any(name.endswith("__code__") and name.startswith("megatron.core.pipeline_parallel") for name in on_cpu)
