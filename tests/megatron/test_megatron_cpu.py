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


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [1, 2, 3, 0]])
@pytest.mark.parametrize("with_probs", [False, True])
def test_chunks_are_sorted_as_asked_and_left_where_they_are_sorted(order: list[int], with_probs: bool) -> None:
    import on_cpu  # noqa: F401
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    sizes = [2, 0, 3, 1]
    tokens, probs = torch.randn(6, 3), torch.rand(6) if with_probs else None
    sort = token_dispatcher.sort_chunks_by_idxs
    found, found_probs = sort(tokens, torch.tensor(sizes), torch.tensor(order), probs=probs)
    assert torch.equal(found, torch.cat([tokens.split(sizes)[chunk] for chunk in order]))
    if probs is None:
        assert found_probs is None
    else:
        assert torch.equal(found_probs, torch.cat([probs.split(sizes)[chunk] for chunk in order]))
    assert (found is tokens) is (order == sorted(order))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["dist_all_gather_func", "dist_reduce_scatter_func"])
def test_a_rank_alone_copies_only_what_is_elsewhere(name: str) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.distributed import param_and_grad_buffer
    from tiny_world import config, join

    join(config(Path("unused")))
    exchange, group = getattr(param_and_grad_buffer, name), dist.group.WORLD
    buffer, other = torch.arange(5.0), torch.zeros(5)
    exchange(buffer.view(5), buffer, group=group, async_op=False)
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    exchange(other, buffer, group=group, async_op=False)
    assert other.tolist() == buffer.tolist()
    other.zero_()
    exchange(other, buffer, group=group, async_op=True).wait()
    assert other.tolist() == buffer.tolist()
