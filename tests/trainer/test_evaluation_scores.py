"""Figures of an evaluation, hand-computed; and what its options mean before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Config
from megarl.config.file import parse
from megarl.core.sampling.pass_at_k import wilson_interval
from megarl.errors import ConfigError
from megarl.ops.evaluate.evaluation import to_text
from megarl.ops.evaluate.request import eval_request
from megarl.trainer.sampling.evaluation import Samples, score, score_prompts

NAN = float("nan")


def samples(*rewards: list[float]) -> Samples:
    table = np.array(rewards)
    lengths = np.arange(table.size).reshape(table.shape)
    return Samples(table, lengths, lengths == 1)


def ends(interval: Any) -> list[float]:
    return [max(interval.low, 0.0), min(interval.high, 1.0)]


def test_responses_without_a_reward_do_not_pass_and_are_counted() -> None:
    nothing = score(samples([NAN, NAN]), (1,))
    assert (nothing["judged"], nothing["reward_mean"], nothing["avg"]["value"]) == (0, None, 0.0)
    made = samples([1, 1, 0, NAN], [0, 0, 0, 0], [NAN] * 4, [1, NAN, NAN, NAN])
    found, wrong = score(made, (1, 2, 4)), score(replace(made, rewards=np.nan_to_num(made.rewards)), (1, 2, 4))
    assert found["avg"]["value"] == 3 / 16
    assert (found["avg"], found["pass"]) == (wrong["avg"], wrong["pass"])
    assert (found["judged"], found["responses"], wrong["judged"]) == (8, 16, 16)
    assert score(replace(made, threshold=-1.0), ())["avg"]["value"] == 8 / 16
    assert found["reward_mean"] == 3 / 8
    assert found["length_mean"] == 7.5
    assert found["truncated"] == 1 / 16


def test_pass_at_k_is_unbiased_and_a_reward_at_the_threshold_is_no_pass() -> None:
    found = score(samples([1, 0.8, 0.7, 0], [0, 0, 0, 2]), (2, 3))
    assert found["pass"]["2"]["value"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert found["pass"]["3"]["value"] == pytest.approx((1 + 1 - 1 / 4) / 2)


def test_where_every_prompt_is_one_draw_the_interval_has_a_width() -> None:
    one = score(samples([1.0], [1.0], [1.0]), (1,))
    assert one["avg"]["other_prompts"] == one["pass"]["1"]["other_prompts"] == ends(wilson_interval(3, 3))
    any_of_two = score(samples([0.0, 0.0], [0.0, 0.0]), (1, 2))
    assert any_of_two["pass"]["2"]["other_prompts"] == ends(wilson_interval(0, 2))
    assert any_of_two["avg"]["other_prompts"] == [0.0, 0.0]
    assert score(samples([1.0, 0.0]), (1,))["avg"]["other_prompts"] is None  # one prompt says nothing about others


def test_nothing_judged_is_null_and_not_nan() -> None:
    found = score(samples([NAN, NAN]), (1,))
    assert (found["judged"], found["reward_mean"], found["avg"]["value"]) == (0, None, 0.0)


def test_prompts_have_counts_and_a_pass_rate() -> None:
    rows = score_prompts(samples([1, 0, NAN], [NAN, NAN, NAN]))
    assert rows == [
        {"judged": 2, "correct": 1, "pass_rate": 1 / 3},
        {"judged": 0, "correct": 0, "pass_rate": 0.0},
    ]


def test_the_table_fits_a_pipe_and_says_what_was_not_judged() -> None:
    result = {"figures": score(samples([1, 1, 0, NAN], [0, 0, 0, 0]), (1, 4)), "first_error": "[odd] one"}
    shown = to_text({"aime24": result})
    assert "avg@4" in shown
    assert "25.0%" in shown
    assert "7 of 8" in shown
    assert "aime24: 7 of 8 responses judged" in shown
    assert "first failure: [odd] one" in shown
    assert {len(line) for line in shown.splitlines()[:4]} == {58}


def config(**tables: Any) -> Config:
    table: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"},
        "rollout": {"prompts_per_step": 3, "group_size": 5, "max_response_tokens": 8},
        "optim": {"lr": 1e-3},
    }
    return parse(table | tables)


def test_samples_and_k_have_defaults() -> None:
    for count, ks in ((1, (1,)), (2, (1, 2)), (4, (1, 4)), (8, (1, 4, 8)), (16, (1, 4, 16)), (64, (1, 4, 16, 64))):
        found = eval_request(config(eval={"samples": count}))
        assert (found.samples, found.ks) == (count, ks)
        assert eval_request(config(), samples=count).ks == ks
        assert eval_request(config(), samples=count, ks=[count, 1, count]).ks == tuple(sorted({1, count}))


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
