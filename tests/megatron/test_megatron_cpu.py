"""The CPU layer: safe to enable again, absent with CUDA, independent of who imports Megatron first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_enabling_again_changes_nothing() -> None:
    import torch

    from megarl.stand_ins import cpu

    before = (torch.cuda.synchronize, torch.cuda.Stream, torch.cuda.current_device, torch.Tensor.cuda)
    assert cpu.enable() is not torch.cuda.is_available()
    assert (torch.cuda.synchronize, torch.cuda.Stream, torch.cuda.current_device, torch.Tensor.cuda) == before
    assert torch.cuda.current_device() == "cpu" or torch.cuda.is_available()


def test_nothing_is_touched_where_there_is_cuda() -> None:
    code = """
import torch
names = ("synchronize", "current_device", "stream", "Stream", "Event", "get_rng_state", "manual_seed")
before = [getattr(torch.cuda, name) for name in names], torch.Tensor.cuda, torch.compile
torch.cuda.is_available = lambda: True
from megarl.stand_ins import cpu
assert cpu.enable() is False
assert ([getattr(torch.cuda, name) for name in names], torch.Tensor.cuda, torch.compile) == before
assert not hasattr(torch.cuda, "_megarl_cpu_layer")
print("untouched")
"""
    assert "untouched" in run_python(code)


@pytest.mark.parametrize("first", ["", "import megatron.core, megatron.core.models.gpt"], ids=["megarl", "megatron"])
def test_a_model_trains_whoever_imports_megatron_first(first: str, models: dict[str, Path]) -> None:
    code = f"""
{first}
import os
import cases_training
os.chdir({str(models["base"].parent.parent)!r})
found = cases_training.fixed_batch_steps({{}})
print(found["losses"][0] != found["losses"][1])
"""
    assert "True" in run_python(code)
