"""examples/pretrain_style.py replays in every layout, spells arguments as Megatron-LM does, and its page is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import megatron_lm_names
import pytest
from test_examples import DRIVER, OLD_PASS, PLUGGED, ROLLOUT, ROOT, TORCHRUN, ran

from megarl.core.replay_blockers import REPLAY_BLOCKERS

SCRIPT = ROOT / "examples" / "pretrain_style.py"
PAGE = (ROOT / "docs" / "megatron_lm.md").read_text()
OWN = {"--routing-replay", "--min-route-agreement", "--policy-objective"}
"""What ``add_megarl_args`` adds."""

TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
INTERLEAVED = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
EXPERT = ("--expert-model-parallel-size", "2", "--use-distributed-optimizer")


def strings(path: Path) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def script_arguments() -> set[str]:
    return {text for text in strings(SCRIPT) if re.fullmatch(r"--[a-z0-9-]+", text)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_the_three_lines_train_as_the_plugged_in_loop_does(mode: str) -> None:
    found = ran(SCRIPT, "--routing-replay", mode)
    assert found.status == 0, found.output
    assert found.output.endswith(f"{mode} held\n")
    assert len(found.steps) == 4
    assert found.steps == [pytest.approx(step, abs=1e-3) for step in ran(PLUGGED, "--replay", mode).steps]


SPLIT = """
import sys
sys.path.insert(0, "examples")
import argparse, pretrain_style, toy, torch
from megarl.plugin import OBJECTIVES, StepLoss
toy.join(argparse.Namespace(tp=1, pp=1, vpp=None, ep=1))
draw = torch.Generator().manual_seed(0)
names = ("old_logprobs", "rollout_logprobs")
batch = {name: -1 - torch.rand(4, 9, generator=draw) for name in names}
batch |= {"advantages": torch.randn(4, 9, generator=draw), "loss_mask": torch.rand(4, 9, generator=draw) < 0.4}
for name in sys.argv[1:]:
    gradients = []
    for count in (1, 4):
        logprobs = (-1 - torch.rand(4, 9, generator=torch.Generator().manual_seed(1))).requires_grad_()
        micros = [{key: column[rows] for key, column in batch.items()} for rows in torch.arange(4).chunk(count)]
        step_loss = StepLoss.of(OBJECTIVES[name], [micro["loss_mask"] for micro in micros])
        for micro, rows in zip(micros, torch.arange(4).chunk(count)):
            (pretrain_style.loss_func(micro, step_loss, -logprobs[rows])[0] / count).backward()  # as Megatron divides
        gradients.append(logprobs.grad)
    torch.testing.assert_close(*gradients)
    print(name, "equal")
toy.leave()
"""


def test_the_gradient_does_not_depend_on_the_micro_batches() -> None:
    found = ran("-c", SPLIT, "minirl", "grpo", "dapo")
    assert found.output.splitlines()[-3:] == ["minirl equal", "grpo equal", "dapo equal"], found.output


def test_without_replay_routers_are_left_alone() -> None:
    found = ran(SCRIPT)
    assert found.status == 0, found.output
    assert "hold" not in found.output
    assert "held" not in found.output
    for choice, most in ((ROLLOUT, 20), (OLD_PASS, 95)):
        sent, alone = found.shares(choice)
        assert sent == alone < most


@pytest.mark.parametrize("mode", ["r3", pytest.param("r2", marks=pytest.mark.slow)])
def test_one_altered_row_makes_the_script_fail(mode: str) -> None:
    found = ran(DRIVER, SCRIPT, "--routing-replay", mode, "--train-iters", "1")
    assert "order of rows verified" in found.output, found.output
    assert re.search(rf"^{mode} DID NOT HOLD for [2-4] pairs$", found.output, re.MULTILINE), found.output
    assert found.status == 1


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        pytest.param("r3", (*TENSOR, *RECOMPUTE), id="r3-tp2-recompute"),
        pytest.param("r2", INTERLEAVED, id="r2-pp2-vpp2", marks=pytest.mark.slow),
        pytest.param("r2", (*TENSOR, *RECOMPUTE), id="r2-tp2-recompute", marks=pytest.mark.slow),
        pytest.param("r3", (*INTERLEAVED, *RECOMPUTE), id="r3-pp2-vpp2-recompute", marks=pytest.mark.slow),
        pytest.param("r3", EXPERT, id="r3-ep2", marks=pytest.mark.slow),
    ],
)
def test_replay_holds_on_two_ranks(mode: str, layout: tuple[str, ...]) -> None:
    found = ran(*TORCHRUN, SCRIPT, "--routing-replay", mode, *layout)
    assert found.status == 0, found.output
    assert f"{mode} held" in found.output
    if mode == "r3" and "--tensor-model-parallel-size" in layout:
        assert found.steps == [pytest.approx(step, abs=5e-3) for step in ran(SCRIPT, "--routing-replay", mode).steps]


@pytest.mark.slow
@pytest.mark.multirank
def test_without_replay_two_ranks_are_left_alone() -> None:
    found = ran(*TORCHRUN, SCRIPT, *TENSOR, *RECOMPUTE)
    assert found.status == 0, found.output
    assert found.shares(ROLLOUT)[0] < 20
    assert found.shares(OLD_PASS)[0] < 95


def test_an_argument_that_bypasses_replay_is_refused_by_its_name() -> None:
    found = ran(SCRIPT, "--routing-replay", "r3", "--moe-router-load-balancing-type", "sinkhorn")
    assert found.status == 2
    assert "error: --moe-router-load-balancing-type: --routing-replay r3 cannot hold, because" in found.output


def test_every_setting_that_bypasses_replay_is_an_argument() -> None:
    arguments = {f"--{blocker.setting.replace('_', '-')}" for blocker in REPLAY_BLOCKERS}
    assert arguments <= script_arguments()
    listed = PAGE.partition("## Arguments that forbid replay")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(--[a-z-]+)", listed, re.MULTILINE)) == arguments


def test_the_page_uses_arguments_that_exist() -> None:
    commands = {"--nproc-per-node", "--model", "--layers", "--dtype", "--stack-layers"}  # of torchrun, megarl convert
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGE))
    assert named - megatron_lm_names.known() - OWN == commands


def test_the_page_shows_the_marked_lines() -> None:
    marked = [line.strip() for line in SCRIPT.read_text().splitlines() if re.search(r"# megarl \d", line)]
    assert len(marked) == 5
    shown = [line[1:].strip() for line in PAGE.splitlines() if line.startswith("+")]
    for line in marked:
        assert line in shown
