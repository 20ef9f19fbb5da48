"""The adapter around Megatron's schedule; ``megatron.training`` is not on PyPI, its ``get_args`` stands in."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from matrix_world import NUM_EXPERTS, NUM_LAYERS, VOCAB, Variant, build_alone
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.adapters.megatron_lm import add_arguments, with_replay
from megarl.errors import ReplayError
from megarl.stand_ins.attention import PackedSequences

LENGTH, MICROS = 12, 3


def batches(with_routes: bool) -> list[dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    made = []
    for _ in range(MICROS):
        scores = torch.rand(1, LENGTH, NUM_LAYERS, NUM_EXPERTS, generator=source)
        one = {"tokens": torch.randint(0, VOCAB, (1, LENGTH), generator=source)}
        if with_routes:
            experts = scores.argsort(-1)[..., :2].to(torch.uint8)
            one |= {"routed_experts": experts, "routed_mask": torch.arange(LENGTH)[None] < LENGTH - 1}
        made.append(one)
    return made


@pytest.fixture
def run(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run(arguments, batches, forward_only)``: a pass as ``megatron.training`` calls it; returns the losses."""
    model = build_alone(Variant(recompute="uniform"))
    parser, module = add_arguments(argparse.ArgumentParser()), ModuleType("megatron.training.global_vars")
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    training = SimpleNamespace(get_forward_backward_func=with_replay(get_forward_backward_func))

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens = next(iterator)["tokens"]
        packing = PackedSequences.of(torch.tensor([0, LENGTH]))
        logits = chunk(tokens, torch.zeros_like(tokens), None, packed_seq_params=packing)
        return logits, lambda output: (output.float().logsumexp(-1).mean(), {"loss": output.detach().double().sum()})

    def run(arguments: str, made: list[dict[str, torch.Tensor]], forward_only: bool = False) -> list[Any]:
        module.get_args = lambda: parser.parse_args(arguments.split())  # type: ignore[attr-defined]
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        schedule = training.get_forward_backward_func()
        shapes = {"seq_length": LENGTH, "micro_batch_size": 1, "num_microbatches": MICROS}
        given = {"model": model.chunks, "data_iterator": [iter(made)], "forward_only": forward_only}
        with torch.set_grad_enabled(not forward_only):
            return [float(one["loss"]) for one in schedule(forward_step_func=forward_step, **given, **shapes)]

    return run


R3 = "--routing-replay r3 --watch-routes --min-route-agreement 0"


def test_training_and_old_log_probabilities_replay_the_routes_of_their_batches(run: Any) -> None:
    native = run("", batches(True))
    replayed = run(R3, batches(True))
    assert native == run("", batches(False)) == run(R3, batches(False), forward_only=True)
    assert replayed == run(R3, batches(True), forward_only=True) == run(R3, batches(True)) != native


def test_what_is_refused_before_the_optimizer_steps(run: Any) -> None:
    with pytest.raises(ReplayError, match="batches of a training step have no routes"):
        run(R3, batches(False))
    with pytest.raises(ReplayError, match="the router itself would have chosen"):
        run("--routing-replay r3", batches(True))  # random routes
    short = batches(True)
    short[1]["routed_experts"] = short[1]["routed_experts"][:, :, :3]
    with pytest.raises(ReplayError, match="expected all 4 MoE layers"):
        run(R3, short)
