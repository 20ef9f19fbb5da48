"""A response that is paused and goes on equals the response without a pause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megarl.core.sampling.collector import Key
from megarl.core.sampling.window import WindowSamples
from megarl.core.types import Rollout, SampleRequest
from megarl.data.judge import Judge
from megarl.data.prompts import Prompt
from megarl.engines.local.engine import LocalEngine
from megarl.engines.player import Draw, EpisodeLimits, Player, Sample
from megarl.engines.protocol import SamplingParams

PROMPTS = [np.array(tokens, np.int32) for tokens in ([3], [5, 4], [6, 7, 8], [3, 3], [9])]
LONGEST, STOPS = 24, (1, 5)


def request_of(prompt: int, sample: int) -> tuple[SampleRequest, Prompt]:
    tokens = PROMPTS[prompt]
    return SampleRequest(tokens, prompt, sample, seed=100 + 10 * prompt + sample), Prompt(0, tokens, "1", "1", "here")


def draw(
    engine: LocalEngine, player: Player, params: SamplingParams, unfinished: Mapping[Key, Rollout],
    arrived: Mapping[Key, Sample], size: int = 2,
) -> Draw:  # fmt: skip
    asker = WindowSamples(range(len(PROMPTS)), 2, size, most_passed=1, arrived=arrived)
    drawn = Draw(asker, request_of, player, unfinished)
    drawn.run(engine, params)
    return drawn


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("routes", [True, False])
def test_a_paused_response_goes_on_as_if_nothing_had_happened(
    engine: LocalEngine, model_path: Path, routes: bool, top_p: float
) -> None:
    """Under the same weights: equal tokens and routes; log-probabilities but for the noise of other batches."""
    whole = SamplingParams(1.0, top_p, LONGEST, STOPS, routes, 10**6 if top_p < 1 else None)
    params = replace(whole, segment_tokens=3)
    keys = [(prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(2)]
    expected = dict(zip(keys, engine.generate([request_of(*key)[0] for key in keys], whole), strict=True))
    complete: dict[Key, Sample] = {}
    unfinished: dict[Key, Rollout] = {}
    num_paused = 0
    with Judge("test_draw:says_one") as judge:
        player = Player(AutoTokenizer.from_pretrained(model_path), judge, EpisodeLimits(LONGEST))
        for size in range(2, len(PROMPTS) + 1):
            drawn = draw(engine, player, params, unfinished, complete, size)
            complete |= drawn.samples
            unfinished = drawn.unfinished
            num_paused += len(unfinished)
            assert not unfinished.keys() & complete.keys()
            for key, part in unfinished.items():
                assert part.tokens.tolist() == expected[key].tokens[: part.num_tokens].tolist()
                assert part.num_tokens < expected[key].num_tokens
    assert num_paused > 0
    assert sorted(complete) == keys
    for key, sample in complete.items():
        check_equal(sample.rollout, expected[key])


def check_equal(found: Rollout | None, expected: Rollout) -> None:
    assert found is not None
    assert found.finish_reason == expected.finish_reason
    for name in ("tokens", "loss_mask", "routed_experts", "routed_mask", "weight_versions", "kept_counts", "kept_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.rollout_logprobs, expected.rollout_logprobs, atol=2e-5)


def test_each_part_has_the_version_of_its_weights(engine: LocalEngine, model_path: Path) -> None:
    """And its routes and log-probabilities, while the last row of a part, read with it, is of the part."""
    params = SamplingParams(1.0, 1.0, LONGEST, STOPS, True, segment_tokens=2)
    version = engine.weight_version
    with Judge("test_draw:says_one") as judge:
        player = Player(AutoTokenizer.from_pretrained(model_path), judge, EpisodeLimits(LONGEST))
        first = draw(engine, player, params, {}, {}, 1)
        assert first.unfinished
        engine.weight_version = version + 1
        try:
            second = draw(engine, player, params, first.unfinished, first.samples, 5)
        finally:
            engine.weight_version = version
    for key, part in first.unfinished.items():
        rollout = second.samples[key].rollout
        assert rollout is not None
        size = part.num_tokens
        assert (rollout.weight_versions[:size] == version).all()
        assert (rollout.weight_versions[size:] == version + 1).all()
        np.testing.assert_array_equal(rollout.route_versions, rollout.weight_versions)
        np.testing.assert_array_equal(rollout.rollout_logprobs[:size], part.rollout_logprobs)
        np.testing.assert_array_equal(rollout.routed_experts[:size], part.routed_experts)


def test_what_is_paused_before_it_begins_has_no_token(engine: LocalEngine, model_path: Path) -> None:
    with Judge("test_draw:says_one") as judge:
        player = Player(AutoTokenizer.from_pretrained(model_path), judge, EpisodeLimits(LONGEST))
        drawn = Draw(WindowSamples(range(3), 2, 2), request_of, player, {})
        drawn.pause()
        drawn.run(engine, SamplingParams(max_response_tokens=LONGEST, segment_tokens=3))
    assert (drawn.samples, drawn.unfinished) == ({}, {})
