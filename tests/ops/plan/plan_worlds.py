"""What the tests of `megarl plan` share: configurations of tiny models, which nothing ever runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from run_configs import parsed
from tiny_families import FAMILIES

from megarl.config import Config
from megarl.ops.shipped import MODELS as MODELS

ROOT = Path(__file__).parents[3]


def write_config(folder: Path, family: str, **changes: Any) -> Path:
    """A folder with the config.json of a tiny model and nothing else."""
    kind, config = FAMILIES[family]
    if "text_config" in config:
        config, changes = {**config, "text_config": {**config["text_config"], **changes}}, {}
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"n_shared_experts": 1} if family == "glm4_moe" else {}  # the default of transformers
    full = {"rms_norm_eps": 1e-6, "model_type": kind, **shared, **config, **changes}
    (folder / "config.json").write_text(json.dumps(full))
    return folder


def config(model: Path | str, **overrides: Any) -> Config:
    """A run on one rank; ``overrides`` are dotted keys with ``__`` for the dot."""
    sizes = {"run__steps": 4, "data__max_prompt_tokens": 8, "train__micro_batch_tokens": 64, "optim__lr": 1e-3}
    sizes |= {"rollout__prompts_per_step": 4, "rollout__group_size": 4, "rollout__max_response_tokens": 24}
    return parsed(**{"model__path": str(model), **sizes, **overrides})
