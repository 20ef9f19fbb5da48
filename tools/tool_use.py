"""Train a tiny MoE to use a calculator, with several objectives, and print the results.

    .venv/bin/python tools/tool_use.py OUT [--objectives ctpo grpo gspo] [--steps 40] [--ranks 2]

The calculator's output is part of the sequence, but not of the loss or of any ratio. ``OUT/tool_use.toml`` is an
ordinary configuration; docs/environments.md explains it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np

from megarl.config.file import parse
from megarl.data.records import write_jsonl
from megarl.data.rewards import instantaneous
from megarl.data.tiny import write_tiny_model
from megarl.engines.tools.calculator import CalculatorTool
from megarl.engines.tools.protocol import ToolResult
from megarl.errors import ConfigError
from megarl.files.writing import write_atomically
from megarl.run.metrics_log import read_metrics

CONFIG = """\
[run]
dir = "{out}/run"
steps = 40

[model]
path = "{out}/model"
dtype = "fp32"

[parallel]
ep = {ep}

[data]
train = "{out}/task/train.jsonl"
heldout = "{out}/task/heldout.jsonl"
max_prompt_tokens = 16

[reward]
function = "tool_use:last_number"

[environment]
function = "tools"
tools = ["tool_use:Calculator"]
call_open = "("
call_close = ")"
observation = ":{output},"   # as OBSERVATION below
stop = [")"]                # one token: a turn ends with a call
max_turns = 3

[rollout]
prompts_per_step = 32
group_size = 8
max_response_tokens = 40
fp8_rounding = true
dtype = "fp32"

[train]
objective = "ctpo"
mini_batches = 2
micro_batch_tokens = 4096
replay = "r3"

[optim]
lr = 1e-4

[eval]
every = 20
max_prompts = 256

[sft]
data = "{out}/task/demonstrations.jsonl"
out = "{out}/model"
steps = 250
batch_size = 256
lr = 2e-3
"""
OBSERVATION = ":%d,"
"""What the calculator appends to a call."""
ERROR = "?"
"""What the calculator says of a malformed call."""


def main() -> None:
    """Make model and task in OUT if they are not there, then train once with each objective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--objectives", nargs="+", default=["ctpo", "grpo", "gspo"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error(f"--ranks: found {options.ranks}, expected at least 1")
    out: Path = options.out.resolve()
    config = out / "tool_use.toml"
    text = CONFIG.replace("{out}", str(out)).replace("{ep}", str(2 if options.ranks % 2 == 0 else 1))
    for objective in options.objectives:
        try:
            overrides = {"train.objective": objective, "run.steps": options.steps}
            parse(tomllib.loads(text), overrides).check_world_size(options.ranks)
        except ConfigError as error:
            parser.error(str(error))
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(config, text.encode())
    if not (out / "model" / "config.json").exists():
        if not (out / "untrained").exists():  # written as a whole, perhaps by an earlier start
            write_tiny_model(out / "untrained")
        write_tool_task(out / "task")
        megarl(options.ranks, "sft", config, "--model.path", str(out / "untrained"))
    for objective in options.objectives:
        run = out / f"run-{objective}"
        overrides = ["--run.dir", run, "--run.steps", options.steps, "--train.objective", objective]
        if objective == "gspo":  # its windows are a thousandth of the others': it takes larger steps
            overrides += ["--optim.lr", "3e-4"]
        megarl(options.ranks, "train", config, *map(str, overrides))
    print(f"{'objective':<10} {'held out':>18} {'turns':>12} {'tokens of the environment':>26}")
    for objective in options.objectives:
        records = list(read_metrics(out / f"run-{objective}" / "metrics.jsonl"))
        rates = [record["eval/pass_rate"] for record in records if record["kind"] == "eval"]
        steps = [record for record in records if record["kind"] == "step"]
        turns = f"{steps[0]['episode/turns_mean']:.2f} -> {steps[-1]['episode/turns_mean']:.2f}"
        tokens = (
            f"{steps[0]['episode/environment_tokens_mean']:.2f} -> {steps[-1]['episode/environment_tokens_mean']:.2f}"
        )
        print(f"{objective:<10} {rates[0]:>8.1%} -> {rates[-1]:>6.1%} {turns:>12} {tokens:>26}")


def write_tool_task(
    folder: Path,
    *,
    seed: int = 0,
    num_train: int = 4096,
    num_heldout: int = 256,
    num_demonstrations: int = 38400,
    guess_share: float = 0.55,
) -> None:
    """Write train.jsonl, heldout.jsonl and demonstrations.jsonl: distinct products of two three-digit numbers.

    A model of this size cannot multiply, but it can copy. ``(123*456)`` is a call, the calculator appends ``:56088,``,
    and the answer is ``56088``. Exactly ``round(guess_share * num_demonstrations)`` demonstrations guess five or six
    random digits instead, so a model that was trained on them does both. The reward selects the call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    num_problems = num_train + num_heldout
    chosen = rng.choice(900 * 900, size=num_problems + num_demonstrations, replace=False)
    pairs = [(100 + int(n) // 900, 100 + int(n) % 900) for n in chosen]
    guesses = np.arange(num_demonstrations) < round(guess_share * num_demonstrations)
    rng.shuffle(guesses)
    wrong = rng.integers(10_000, 1_000_000, size=num_demonstrations).tolist()
    problems = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs[:num_problems]]
    demonstrations = [
        {"prompt": f"{a}*{b}=", "response": str(guess) if guessed else f"({a}*{b}){OBSERVATION % (a * b)}{a * b}"}
        for (a, b), guess, guessed in zip(pairs[num_problems:], wrong, guesses, strict=True)
    ]
    write_jsonl(folder / "train.jsonl", problems[:num_train])
    write_jsonl(folder / "heldout.jsonl", problems[num_train:])
    write_jsonl(folder / "demonstrations.jsonl", demonstrations)


class Calculator(CalculatorTool):
    """megarl's calculator, whose errors are "?": its messages have letters that the tiny model's vocabulary lacks.

    An observation that the tokenizer cannot read would fail the episode, and a malformed call would have no reward in
    place of 0.
    """

    async def __call__(self, argument: str) -> ToolResult:
        result = await super().__call__(argument)
        return result if result.exit == "ok" else ToolResult(ERROR, result.exit)


@instantaneous
def last_number(*, prompt: str, response: str, answer: str) -> float:
    """Return 1 if the text after the last observation, or the whole response without one, is the answer, else 0."""
    return float(response.rpartition(OBSERVATION[-1])[2].strip() == answer)


def megarl(ranks: int, command: str, *words: object) -> None:
    """Run a command of megarl under torchrun; ends the script if it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])  # the reward function is in this file
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    code = subprocess.run(
        [*launcher, "-m", "megarl.cli", command, *map(str, words)], env=environment, check=False
    ).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
