"""The examples run as they are written, their replay holds in every layout, and their two pages are true."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import preloaded
import pytest

from megarl.core.replay_blockers import REPLAY_BLOCKERS

ROOT = Path(__file__).parent.parent
PLUGGED = ROOT / "examples" / "plugged_in.py"
PRETRAIN = ROOT / "examples" / "pretrain_style.py"
DRIVER = Path(__file__).parent / "example_driver.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DOCS = (ROOT / "docs" / "plugin.md").read_text()
PAGE = (ROOT / "docs" / "megatron_lm.md").read_text()
OWN = {"--routing-replay", "--min-route-agreement", "--policy-objective"}
"""What ``add_megarl_args`` adds."""
MODE = {PLUGGED: "--replay", PRETRAIN: "--routing-replay"}
SCRIPTS = pytest.mark.parametrize("script", MODE, ids=lambda path: path.stem)

TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
INTERLEAVED = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
EXPERT = ("--expert-model-parallel-size", "2", "--use-distributed-optimizer")


@dataclass(frozen=True)
class Ran:
    status: int
    output: str

    @property
    def steps(self) -> list[list[float]]:
        """Loss and gradient norm of each optimizer step."""
        found = re.findall(r"^step \d+: loss (\S+), gradient norm (\S+)$", self.output, re.MULTILINE)
        return [[float(number) for number in numbers] for numbers in found]

    def shares(self, choice: str) -> tuple[float, float]:
        """Percentages of pairs that were sent to these experts, and that routers alone would have sent there."""
        found = re.search(rf"([\d.]+)% were sent to {choice} experts; routers left alone: ([\d.]+)%", self.output)
        assert found, self.output
        return float(found[1]), float(found[2])


@cache
def ran(*command: str | Path) -> Ran:
    """What ``python`` with these arguments printed, and its exit status."""
    process = preloaded.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=1800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ran(process.returncode, output)


ROLLOUT, OLD_PASS = "the rollout's", "the old-log-prob pass's"


@SCRIPTS
def test_without_replay_routers_are_left_alone(script: Path) -> None:
    found = ran(script, *([MODE[script], "none"] if script == PLUGGED else []))
    assert found.status == 0, found.output
    assert len(found.steps) == 4
    assert "held" not in found.output
    for choice, most in ((ROLLOUT, 20), (OLD_PASS, 95)):
        sent, alone = found.shares(choice)
        assert sent == alone < most


@pytest.mark.parametrize(
    ("mode", "replayed", "most", "other", "below"),
    [("r3", ROLLOUT, 20, OLD_PASS, 100), ("r2", OLD_PASS, 95, ROLLOUT, 20)],
)
def test_replay_sends_every_token_where_its_source_did(
    mode: str, replayed: str, most: int, other: str, below: int
) -> None:
    """Rows that the rollout does not have route natively."""
    found = ran(PLUGGED, "--replay", mode)
    assert found.status == 0, found.output
    assert found.output.endswith(f"{mode} held\n")
    assert len(found.steps) == 4
    sent, alone = found.shares(replayed)
    assert sent == 100
    assert alone < most
    assert found.shares(other)[0] < below


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_the_three_lines_train_as_the_plugged_in_loop_does(mode: str) -> None:
    found = ran(PRETRAIN, "--routing-replay", mode)
    assert found.status == 0, found.output
    assert found.output.endswith(f"{mode} held\n")
    assert len(found.steps) == 4
    assert found.steps == [pytest.approx(step, abs=1e-3) for step in ran(PLUGGED, "--replay", mode).steps]


@SCRIPTS
@pytest.mark.parametrize("mode", ["r3", pytest.param("r2", marks=pytest.mark.slow)])
def test_one_altered_row_is_noticed(script: Path, mode: str) -> None:
    found = ran(DRIVER, script, MODE[script], mode, "--steps" if script == PLUGGED else "--train-iters", "1")
    assert "order of rows verified" in found.output, found.output
    assert re.search(rf"^{mode} DID NOT HOLD for [2-4] pairs$", found.output, re.MULTILINE), found.output
    assert found.status == 1


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("script", "mode", "layout"),
    [
        pytest.param(PLUGGED, "r3", ("--tp", "2", "--recompute"), id="plugged-r3-tp2-recompute"),
        pytest.param(PRETRAIN, "r3", (*TENSOR, *RECOMPUTE), id="pretrain-r3-tp2-recompute"),
        *(
            pytest.param(script, mode, layout, id=name, marks=pytest.mark.slow)
            for name, script, mode, layout in (
                ("plugged-none-tp2", PLUGGED, "none", ("--tp", "2")),
                ("plugged-r2-ep2", PLUGGED, "r2", ("--ep", "2")),
                ("plugged-r2-pp2-vpp2-recompute", PLUGGED, "r2", ("--pp", "2", "--vpp", "2", "--recompute")),
                ("plugged-r3-pp2-vpp2-recompute", PLUGGED, "r3", ("--pp", "2", "--vpp", "2", "--recompute")),
                ("pretrain-r2-pp2-vpp2", PRETRAIN, "r2", INTERLEAVED),
                ("pretrain-r2-tp2-recompute", PRETRAIN, "r2", (*TENSOR, *RECOMPUTE)),
                ("pretrain-r3-pp2-vpp2-recompute", PRETRAIN, "r3", (*INTERLEAVED, *RECOMPUTE)),
                ("pretrain-r3-ep2", PRETRAIN, "r3", EXPERT),
            )
        ),
    ],
)
def test_two_ranks_replay_and_tensor_parallel_ones_train_as_one_does(
    script: Path, mode: str, layout: tuple[str, ...]
) -> None:
    found = ran(*TORCHRUN, script, MODE[script], mode, *layout)
    assert found.status == 0, found.output
    assert (f"{mode} held" in found.output) == (mode != "none")
    if mode != "r2" and layout[0] in ("--tp", TENSOR[0]):
        assert found.steps == [pytest.approx(step, abs=5e-3) for step in ran(script, MODE[script], mode).steps]


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


def test_the_page_shows_the_lines_of_megarl() -> None:
    code = [line.strip() for line in PLUGGED.read_text().splitlines()]
    block = next(part for part in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if "# megarl" in part)
    shown = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith("# ")]
    assert set(shown) <= {*code, "..."}
    marked = [line for line in code if "# megarl" in line and "``" not in line]
    assert marked == [s for s in shown if "# megarl" in s]
    assert len(marked) == 12
    names = re.compile(
        r"megarl|RoutingReplay|TokenColumns|StepLoss|OBJECTIVES|reduce_metrics|replay\.\w+\(|step_loss\("
    )
    body = PLUGGED.read_text().partition('"""\n')[2].partition('"""\n')[2]
    assert not [line for line in body.splitlines() if names.search(line) and "# megarl" not in line]


def test_an_argument_that_bypasses_replay_is_refused_by_its_name() -> None:
    found = ran(PRETRAIN, "--routing-replay", "r3", "--moe-router-load-balancing-type", "sinkhorn")
    assert found.status == 2
    assert "error: --moe-router-load-balancing-type: --routing-replay r3 cannot hold, because" in found.output


def test_every_setting_that_bypasses_replay_is_an_argument() -> None:
    settings = {blocker.setting for blocker in REPLAY_BLOCKERS}
    arguments = {f"--{setting.replace('_', '-')}" for setting in settings}
    written = {node.value for node in ast.walk(ast.parse(PRETRAIN.read_text())) if isinstance(node, ast.Constant)}
    assert arguments <= written
    listed = PAGE.partition("## Arguments that forbid replay")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(--[a-z-]+)", listed, re.MULTILINE)) == arguments
    named = DOCS.partition("No setting bypasses the hook")[2].partition("\n- ")[0]
    assert set(re.findall(r"`(\w+)`", named)) == settings


def megatron_lm_names() -> set[str]:
    """How Megatron-LM spells its arguments, of those that pages and examples use: read in its public repository.

    Most are made from the fields of dataclasses there: hyphens, "no" or "disable" before what is on; metadata goes
    first. Those of TransformerConfig are in the installed megatron-core and computed here.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = set(WRITTEN_BY_HAND)
    for field in dataclasses.fields(TransformerConfig):
        hyphens = field.name.replace("_", "-")
        plain = [f"--no-{hyphens}", f"--disable-{hyphens}"] if field.default is True else [f"--{hyphens}"]
        names |= set(field.metadata.get("argparse_meta", {}).get("arg_names", plain))
    return names - {"--num-moe-experts", "--params-dtype", "--virtual-pipeline-model-parallel-size"}


WRITTEN_BY_HAND = (
    *("--cuda-graph-scope", "--lr", "--moe-aux-loss-coeff", "--moe-layer-freq", "--moe-router-load-balancing-type"),
    *("--no-load-optim", "--no-load-rng", "--num-experts", "--num-layers-per-virtual-pipeline-stage"),
    *("--padded-vocab-size", "--seq-length", "--use-distributed-optimizer", "--vocab-file", "--vocab-size"),
    *("--ckpt-format", "--dist-ckpt-strictness", "--finetune", "--load", "--micro-batch-size", "--rerun-mode"),
    *("--train-iters", "--use-checkpoint-args"),
    *("--moe-router-force-biased", "--moe-expert-rank-capacity-factor", "--mlp-chunks-for-training"),  # from 0.17 on
)


def test_the_page_uses_arguments_that_exist() -> None:
    commands = {"--nproc-per-node", "--model", "--layers", "--dtype", "--watch-routes"}  # of torchrun, convert, adapter
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGE))
    assert named - megatron_lm_names() - OWN == commands


def test_the_page_of_megatron_lm_shows_the_marked_lines() -> None:
    marked = [line.strip() for line in PRETRAIN.read_text().splitlines() if re.search(r"# megarl \d", line)]
    assert len(marked) == 5
    shown = [line[1:].strip() for line in PAGE.splitlines() if line.startswith("+")]
    for line in marked:
        assert line in shown
