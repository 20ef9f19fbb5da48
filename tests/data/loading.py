"""Prompts and demonstrations of a file, with settings of [data] and [rollout]."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.config.file import parse
from megarl.config.tables.data import DataConfig
from megarl.data.prompts import Demonstration, Prompt, load_demonstrations, load_prompts


def load(
    source: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    template: str | None = None,
    **data: Any,
) -> list[Prompt]:
    """The prompts of a source."""
    return load_prompts(DataConfig(train=str(source), **data), tokenizer, limit, template)


def load_shown(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_positions: int = 4096,
    max_response_tokens: int = 999,
    **data: Any,
) -> list[Demonstration]:
    """The demonstrations of a file."""
    settings = {
        **{"model.path": "absent", "run.steps": 1, "data.train": "p.jsonl", "optim.lr": 1e-6},
        **{"rollout.prompts_per_step": 1, "rollout.group_size": 2, "rollout.max_response_tokens": max_response_tokens},
        **{"train.micro_batch_tokens": 4096, "rollout.engine": "local"},
        **{"sft.data": str(path), "sft.steps": 1, "sft.batch_size": 1, "sft.lr": 1e-6},
        **{f"data.{key}": value for key, value in data.items()},
    }
    return load_demonstrations(parse({}, settings), tokenizer, max_positions)
