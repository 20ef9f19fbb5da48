"""Figures of an evaluation: hand-computed, with rewards that failed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.core.sampling.pass_at_k import wilson_interval
from megarl.ops.evaluate.evaluation import to_text
from megarl.trainer.sampling.evaluation import Samples, score, score_prompts

NAN = float("nan")


def samples(*rewards: list[float]) -> Samples:
    table = np.array(rewards)
    lengths = np.arange(table.size).reshape(table.shape)
    return Samples(table, lengths, lengths == 1)


def ends(interval: Any) -> list[float]:
    return [max(interval.low, 0.0), min(interval.high, 1.0)]


def test_responses_without_a_reward_do_not_pass_and_are_counted() -> None:
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


def test_what_counts_as_correct_can_be_set() -> None:
    rewards, one = np.array([[1, 0.8, 0.5, 0]]), np.ones((1, 4), dtype=np.int64)
    for threshold, correct in ((0.9, 1), (0.7, 2), (0.4, 3), (-1.0, 4)):
        made = Samples(rewards, one, one == 0, threshold)
        assert score(made, (1,))["avg"]["value"] == correct / 4
        assert score_prompts(made)[0]["correct"] == correct


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
    assert json.dumps(found, allow_nan=False)


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
