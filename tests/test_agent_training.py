"""`megarl train` with an agent: the program of the examples trains what the environment of tools trains, number for
number, because the tokens, log-probabilities and routes are those of the same rollouts."""

from __future__ import annotations

import copy
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tomli_w
from safetensors.torch import load_file, save_file

from megarl.data.tiny import CHARACTERS, write_tiny_model
from megarl.run.metrics_log import read_metrics

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from environments import openai_release  # noqa: E402
from tool_use import CONFIG, write_tool_task  # noqa: E402

OPENAI = "3.57.0"
TEMPLATE = (
    "{% for m in messages %}{{ ':' + m.content + ',' if m.role == 'tool' else m.content }}"
    "{{ '<eos>' if m.role == 'assistant' and m.content[-1:] not in '*)abcdefgh' }}{% endfor %}"
)
"""A turn ends with one of the stop tokens of ``train``, or with the end token."""
TOOL = """
import re
from megarl.engines.tools.protocol import ToolResult


class Multiplier:
    name = "multiply"

    async def __call__(self, argument):
        factors = re.fullmatch(r"(\\d+)\\*(\\d+)", argument)
        return ToolResult(str(int(factors[1]) * int(factors[2])) if factors else "?", "ok")
"""
"""What examples/calculator_agent.py does, as a tool."""
pytestmark = [pytest.mark.slow(minutes=2), pytest.mark.gate, pytest.mark.multirank]


def train(folder: Path, name: str, **environment: Any) -> list[dict[str, Any]]:
    tables = copy.deepcopy(tomllib.loads(CONFIG.replace("{out}", str(folder)).replace("{ep}", "1")))
    tables["run"] |= {"dir": str(folder / name), "steps": 2}
    tables["data"] |= {"max_prompt_tokens": 8}  # an agent has the tokens of prompt and response together
    tables["rollout"] |= {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 24}
    tables["eval"] = {"every": 0}
    del tables["sft"]
    tables["environment"] = {"stop": [*"*)abcdefgh"], "max_turns": 3} | environment
    (folder / f"{name}.toml").write_text(tomli_w.dumps(tables))
    paths = [str(ROOT / "tools"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "megarl.cli", "train", str(folder / f"{name}.toml")]
    done = preloaded.run(command, env=environ, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [record for record in read_metrics(folder / name / "metrics.jsonl") if record["kind"] == "step"]


def write_caller(folder: Path) -> None:
    """A model that calls often, and a chat template for its tokenizer."""
    model = write_tiny_model(folder, hidden_size=32, num_experts=8, expert_width=16, initializer_range=0.3)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][2 + CHARACTERS.index("(")] *= 8
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_a_program_with_openais_package_trains_as_the_environment_does(tmp_path: Path) -> None:
    write_caller(tmp_path / "model")
    write_tool_task(tmp_path / "task", num_train=64, num_heldout=4, num_demonstrations=4)
    marks = {"call_open": "(", "call_close": ")", "observation": ":{output},"}
    (tmp_path / "multiplier.py").write_text(TOOL)
    of_tools = train(tmp_path, "tools", function="tools", tools=["multiplier:Multiplier"], **marks)
    run = "import sys, runpy; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
    script, packages = str(ROOT / "examples" / "calculator_agent.py"), str(openai_release(OPENAI))
    options = {"command": [sys.executable, "-c", run, script, packages]}
    of_agent = train(tmp_path, "agent", function="agent_program:play", options=options)
    assert len(of_agent) == len(of_tools) == 2
    for record, other in zip(of_agent, of_tools, strict=True):
        same = [name for name in other if not name.startswith(("time/", "speed/", "memory/", "wall_s", "utc"))]
        assert {name: record[name] for name in same} == pytest.approx({name: other[name] for name in same})
        assert record["episode/turns_mean"] > 1.3
        assert record["router/flip"] == record["episode/dropped_tokens_mean"] == 0  # experts of all turns as sampled
