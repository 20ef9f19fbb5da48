"""``megarl launch eval`` and ``megarl launch sft`` on real ranks: the figures of one process; a killed rank; a stop."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from launch_world import Launch, World, processes_of, read_json, until
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow(minutes=2), pytest.mark.multirank]
EVAL, SFT = (("-m", "megarl.cli", "launch", stage) for stage in ("eval", "sft"))
KILLED = """
import os
import signal
from pathlib import Path

from megarl.data.rewards import instantaneous


@instantaneous  # in the rank itself
def reward(prompt, response, answer, **rest):
    if os.environ["RANK"] == "1" and not Path("{flag}").exists():
        Path("{flag}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(response) % 2)
"""


def responses(out: Path) -> list[str]:
    return (out / "heldout" / "responses.jsonl").read_text().splitlines()


def test_an_evaluation_on_launched_ranks_has_the_responses_of_one_process_also_after_a_death(
    world: World, reference: Path
) -> None:
    asked = ["--checkpoint", str(reference), "--samples", "2", "--eval.max_prompts", "8", "--out"]
    (world.root / "killed.py").write_text(KILLED.format(flag=world.root / "killed.flag"))
    outs = [world.root / name for name in ("eval-ranks", "eval-killed", "eval-alone")]
    told = ["--reward.function", "killed:reward"]
    ranks = Launch(world, world.config("eval-of-ranks"), [*asked, str(outs[0])], command=EVAL)
    killed = Launch(world, world.config("eval-of-killed"), [*asked, str(outs[1]), *told], command=EVAL)
    alone = Launch(world, world.config("eval-alone"), [*asked, str(outs[2])], command=("-m", "megarl.cli", "eval"))
    assert [run.code() for run in (ranks, killed, alone)] == [0, 0, 0], killed.log.read_text()[-3000:]
    assert len(responses(outs[0])) == 16
    assert responses(outs[0]) == responses(outs[1]) == responses(outs[2])
    assert "avg@2" in ranks.log.read_text()
    assert 'one process loads the whole checkpoint, and leaves out parallel = {"ep" = 2}' in alone.log.read_text()
    assert "megarl: the evaluation died (rank 1 on " in killed.log.read_text()
    assert " was killed by SIGKILL); starting it again" in killed.log.read_text()
    assert read_json(ranks.folder / "eval" / "launch.json")["says"].startswith("finished, 1 starts of the evaluation")
    assert not (ranks.folder / "launch.json").exists()
    assert sorted(ranks.folder.glob("eval/logs/*/attempt1/node0/*/attempt_0/*/stdout.log"))


def test_a_cold_start_on_launched_ranks_writes_a_model_and_a_stopped_one_leaves_nobody(world: World) -> None:
    out = world.root / "taught"
    table = f'[sft]\ndata = "{world.root}/task/demonstrations.jsonl"\nout = "{out}"\nbatch_size = 8\nlr = 1e-3\n'
    config = world.config("cold")
    config.write_text(f"{config.read_text()}{table}steps = 2\n")
    run = Launch(world, config, command=SFT)
    assert run.code() == 0, run.log.read_text()[-3000:]
    assert "on 2 ranks" in run.log.read_text()
    assert AutoModelForCausalLM.from_pretrained(out).config.num_experts == 8
    long = world.config("cold-long")
    long.write_text(f"{long.read_text()}{table}steps = 100000\n")
    stopped = Launch(world, long, command=SFT)
    stopped.until(lambda: "cold start 10/100000" in stopped.log.read_text(), "ten steps")
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.code(timeout_s=120) == 75
    assert "asked to stop by SIGTERM; the cold start was killed" in stopped.log.read_text()
    until(lambda: not processes_of(long), "nobody is left", timeout_s=60)
    assert json.loads((stopped.folder / "sft" / "launch.json").read_text())["says"].startswith("stopped")
