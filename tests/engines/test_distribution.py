"""The sampling distribution against brute force, and the draw against the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.engines.local.decode import Noise, draw, sampling_logprobs
from megarl.errors import NumericsError, RolloutError


def nucleus_by_brute_force(logits: list[float], temperature: float, top_p: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    probabilities = [w / sum(weights) for w in weights]
    kept: list[int] = []
    for token in sorted(range(len(logits)), key=lambda i: (-probabilities[i], i)):
        kept.append(token)
        if sum(probabilities[i] for i in kept) >= top_p:
            break
    mass = sum(probabilities[i] for i in kept)
    return [math.log(p / mass) if i in kept else -math.inf for i, p in enumerate(probabilities)]


@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=9, unique=True),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.03, 0.35, 0.71, 0.93, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_nucleus_is_renormalised(logits: list[int], temperature: float, top_p: float) -> None:
    scaled = [x / 10 for x in logits]
    found = sampling_logprobs(torch.tensor([scaled], dtype=torch.float64), temperature, top_p)[0]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(nucleus_by_brute_force(scaled, temperature, top_p), abs=1e-12)
    assert found.exp().sum().item() == pytest.approx(1.0)


def test_hand_computed_nucleus() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    assert sampling_logprobs(logits, 1.0, 0.6)[0].exp().tolist() == pytest.approx([0.0, 0.625, 0.375])
    assert sampling_logprobs(logits, 1.0, 0.4)[0].exp().tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert sampling_logprobs(torch.zeros(1, 4), 1.0, 0.49)[0].exp().tolist() == pytest.approx(
        [0.5, 0.5, 0.0, 0.0]
    )  # ties: the lower id


@pytest.mark.parametrize(("bad", "place"), [(math.nan, 2), (math.inf, slice(None))])
def test_logits_that_are_not_finite_are_an_error(bad: float, place: int | slice) -> None:
    logits = torch.zeros(3, 4)
    logits[1, place] = bad
    with pytest.raises(NumericsError, match="1 of 3"):
        sampling_logprobs(logits, 1.0, 1.0)
    logits[1] = -math.inf
    with pytest.raises(NumericsError, match="1 of 3"):
        sampling_logprobs(logits, 1.0, 1.0)
    assert sampling_logprobs(torch.tensor([[0.0, -math.inf]]), 1.0, 1.0)[0].tolist() == [0.0, -math.inf]


def test_draw_inverts_the_cumulative_distribution() -> None:
    logprobs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log().expand(7, -1)
    edges = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.9999, np.nextafter(1.0, 0.0)]
    uniforms = torch.tensor(edges, dtype=torch.float64)
    assert draw(logprobs, uniforms).tolist() == [1, 1, 3, 3, 4, 4, 4]


def test_draw_never_leaves_the_support_when_the_sum_is_not_one() -> None:
    logprobs = torch.full((1, 3), -math.inf)
    logprobs[0, 1] = math.log(0.999999)
    for u in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        assert draw(logprobs, torch.tensor([u], dtype=torch.float64)).tolist() == [1]
    totals = np.concatenate([[0.5, 1.0, 2.0], np.nextafter([0.5, 1.0, 2.0], 0.0), np.nextafter([0.5, 1.0, 2.0], 3.0)])
    totals = torch.from_numpy(np.concatenate([totals, np.linspace(0.5, 2.0, 1001)]))
    logprobs = torch.stack([totals, torch.zeros_like(totals)], 1).log()  # float64; the second has probability 0
    assert not draw(logprobs, torch.full_like(totals, np.nextafter(1.0, 0.0))).any()


def test_noise_is_a_function_of_seed_and_step() -> None:
    alone = Noise([5], 300)
    column = [alone.at(step, np.array([0])).item() for step in range(300)]
    batch = Noise([9, 5, 6], 300)
    for step in range(300):
        rows = np.array([1, 2]) if step % 2 else np.array([2, 1, 0])
        assert batch.at(step, rows)[list(rows).index(1)].item() == column[step]
    for bad in (-1, 2**128):
        with pytest.raises(RolloutError, match=f"seed of a request is {bad},"):
            Noise([0, bad, 1], 4)


@pytest.mark.parametrize("steps", [1, 4, 7, 600])
def test_noise_is_that_of_numpys_philox(steps: int) -> None:
    seeds = [0, 1, 2**64 - 1, 2**64, 2**128 - 1, 0x0123456789ABCDEF_FEDCBA9876543210]
    noise, rows = Noise(seeds, steps), np.arange(len(seeds))
    found = np.stack([noise.at(step, rows).numpy() for step in range(steps)], axis=1)
    assert np.array_equal(found, [np.random.Generator(np.random.Philox(key=seed)).random(steps) for seed in seeds])
