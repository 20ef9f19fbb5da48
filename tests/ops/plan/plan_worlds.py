"""What the tests of `megarl plan` share: configurations of tiny models, which nothing ever runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_families import FAMILIES

from megarl.config import Config
from megarl.config.file import parse
from megarl.ops.shipped import MODELS as MODELS

ROOT = Path(__file__).parents[3]


def write_config(folder: Path, family: str, **changes: Any) -> Path:
    """A folder with the config.json of a tiny model and nothing else."""
    kind, config = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"n_shared_experts": 1} if family == "glm4_moe" else {}  # the default of transformers
    full = {"rms_norm_eps": 1e-6, "model_type": kind, **shared, **config, **changes}
    (folder / "config.json").write_text(json.dumps(full))
    return folder


def config(model: Path | str, **overrides: Any) -> Config:
    """A run on one rank; ``overrides`` are dotted keys with ``__`` for the dot."""
    table = {
        "run": {"steps": 4},
        "model": {"path": str(model)},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 24},
        "train": {"micro_batch_tokens": 64},
        "optim": {"lr": 1e-3},
    }
    return parse(table, {key.replace("__", "."): value for key, value in overrides.items()})
