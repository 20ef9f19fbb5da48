"""What a configuration says of the servers that are started, on their command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import file as config_file
from megarl.rollout.sglang.spec import command
from megarl.train.engines import server_specs


def words(tmp_path: Path, sglang: dict[str, Any]) -> list[str]:
    settings = {
        "run": {"steps": 1},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
        "rollout": {"engine": "sglang", "prompts_per_step": 1, "group_size": 2, "max_response_tokens": 8},
        "sglang": sglang,
        "optim": {"lr": 1e-4},
    }
    spec = server_specs(config_file.parse(settings, {}), "127.0.0.1", None, tmp_path)[0]
    return command(spec)


@pytest.mark.parametrize(
    ("sglang", "share"),
    [({}, "0.1"), ({"mem_fraction": 0.3}, "0.3"), ({"gpus": [0]}, None), ({"gpus": [0], "mem_fraction": 0.7}, "0.7")],
)
def test_a_server_on_a_cpu_leaves_the_trainer_its_memory(tmp_path: Path, sglang: dict[str, Any], share: str | None):
    """SGLang's cache on a CPU is a share of the machine, taken at the start; on a GPU it chooses by itself."""
    found = words(tmp_path, sglang)
    assert ("--mem-fraction-static" in found) == (share is not None)
    if share is not None:
        assert found[found.index("--mem-fraction-static") + 1] == share
