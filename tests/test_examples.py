"""The examples run as they are written, their replay holds, and docs/plugin.md says the truth about them."""

from __future__ import annotations

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
DRIVER = Path(__file__).parent / "example_driver.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DOCS = (ROOT / "docs" / "plugin.md").read_text()


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


def test_without_replay_the_loop_routes_natively() -> None:
    found = ran(PLUGGED, "--replay", "none")
    assert found.status == 0, found.output
    assert len(found.steps) == 4
    for choice in (ROLLOUT, OLD_PASS):
        sent, alone = found.shares(choice)
        assert sent == alone < 95


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


@pytest.mark.parametrize("mode", ["r3", pytest.param("r2", marks=pytest.mark.slow)])
def test_one_altered_row_is_noticed(mode: str) -> None:
    found = ran(DRIVER, PLUGGED, "--replay", mode, "--steps", "1")
    assert "order of rows verified" in found.output, found.output
    assert re.search(rf"^{mode} DID NOT HOLD for [2-4] pairs$", found.output, re.MULTILINE), found.output
    assert found.status == 1


@pytest.mark.multirank
def test_r3_on_sequence_parallel_ranks_with_recomputation_trains_as_one_rank_does() -> None:
    found = ran(*TORCHRUN, PLUGGED, "--replay", "r3", "--tp", "2", "--recompute")
    assert found.status == 0, found.output
    assert "r3 held" in found.output
    assert found.steps == [pytest.approx(step, abs=5e-3) for step in ran(PLUGGED, "--replay", "r3").steps]


@pytest.mark.slow
@pytest.mark.multirank
def test_r2_on_expert_parallel_ranks() -> None:
    found = ran(*TORCHRUN, PLUGGED, "--replay", "r2", "--ep", "2")
    assert found.status == 0, found.output
    assert "r2 held" in found.output


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_replay_on_interleaved_pipeline_ranks_with_recomputation(mode: str) -> None:
    found = ran(*TORCHRUN, PLUGGED, "--replay", mode, "--pp", "2", "--vpp", "2", "--recompute")
    assert found.status == 0, found.output
    assert f"{mode} held" in found.output


@pytest.mark.slow
@pytest.mark.multirank
def test_without_replay_sequence_parallel_ranks_train_as_one_rank_does() -> None:
    found = ran(*TORCHRUN, PLUGGED, "--replay", "none", "--tp", "2")
    assert found.status == 0, found.output
    assert found.steps == [pytest.approx(step, abs=5e-3) for step in ran(PLUGGED, "--replay", "none").steps]


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


def test_the_page_names_every_setting_that_bypasses_replay() -> None:
    named = DOCS.partition("No setting bypasses the hook")[2].partition("\n- ")[0]
    assert set(re.findall(r"`(\w+)`", named)) == {blocker.setting for blocker in REPLAY_BLOCKERS}
