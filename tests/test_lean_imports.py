"""What megarl needs: for the formulas and for replay torch and Megatron-Core, for routing traces a few packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lean import make_environment

from megarl.routes import RoutingTrace
from megarl.routes.trace_file import TracedSequence, TraceInfo, write_traces

ROOT = Path(__file__).parents[1]
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


def test_the_measure_sees_what_a_configuration_brings():
    assert {"megarl", "pydantic"} <= third_party("import megarl.config")


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    """Runs megarl where nothing but numpy, pydantic and safetensors is installed."""
    here = tmp_path_factory.mktemp("here")
    python = make_environment(tmp_path_factory.mktemp("lean"))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [python, "-m", "megarl.cli", *words], capture_output=True, text=True, cwd=here, env=environment
        )

    run.here = here
    return run


def test_traces_need_few_packages(lean):
    experts = np.array([[[0, 1]], [[2, 3]]], np.int32)
    for name, rows in (("a", experts), ("b", experts[::-1])):
        write_traces(lean.here / name, TraceInfo("tiny", (0,), 4, 2), [TracedSequence("s", RoutingTrace(rows, 4))])
    shown = {words: lean("trace", *words) for words in (("inspect", "a"), ("diff", "a", "b"))}
    assert [done.returncode for done in shown.values()] == [0, 0], shown
    assert "top-2 of 4" in shown["inspect", "a"].stdout
    assert "100.000%" in shown["diff", "a", "b"].stdout


def test_there_is_no_megatron_to_patch(lean):
    done = lean("patch", "status")
    assert done.returncode == 2
    assert "this Python has no megatron-core" in done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("quickstart",), "plotly"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(lean, words, package):
    done = lean(*words)
    assert done.returncode == 2
    assert done.stderr == (
        f"megarl: error: megarl {words[0]} needs the package {package}, which is not installed: "
        "pip install 'megarl-moe[train]'\n"
    )
