"""What ``megarl eval`` makes of its options before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config
from megarl.config.file import parse
from megarl.errors import ConfigError
from megarl.ops.evaluate.request import eval_request


def config(**tables: Any) -> Config:
    table: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"},
        "rollout": {"prompts_per_step": 3, "group_size": 5, "max_response_tokens": 8},
        "optim": {"lr": 1e-3},
    }
    return parse(table | tables)


@pytest.mark.parametrize(
    ("samples", "ks"), [(1, (1,)), (2, (1, 2)), (4, (1, 4)), (8, (1, 4, 8)), (16, (1, 4, 16)), (64, (1, 4, 16, 64))]
)
def test_samples_and_k_have_defaults(samples: int, ks: tuple[int, ...]) -> None:
    assert eval_request(config(), samples=samples).ks == ks
    found = eval_request(config(eval={"samples": samples}))
    assert (found.samples, found.ks) == (samples, ks)
    assert eval_request(config(), samples=samples, ks=[samples, 1, samples]).ks == tuple(sorted({1, samples}))


def test_without_a_checkpoint_any_number_of_ranks_will_do() -> None:
    """Neither the layout nor the batches of training divide 7 ranks."""
    table = {"parallel": {"tp": 2}, "train": {"mini_batches": 5}}
    found = eval_request(config(**table)).layout(7)
    assert (found.parallel.tp, found.parallel.ep) == (1, 1)
    request = eval_request(config(**table), checkpoint=Path("run"))
    assert request.layout(6).parallel.tp == 2
    with pytest.raises(ConfigError, match="parallel: found 7 ranks, expected a multiple of tp"):
        request.layout(7)
    assert request.config == config(**table)


def test_a_wrong_option_is_found_before_anything_heavy_is_imported() -> None:
    code = "import sys, megarl.ops.evaluate.request; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert told.stdout.strip() == "[]"
