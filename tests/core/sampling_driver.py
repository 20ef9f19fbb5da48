"""A stand-in for an engine: hands rewards to a collector in any order, and plays rules for many prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megarl.core.sampling.collector import Ask, Collector, Selection


def drive(
    collector: Collector, reward: Callable[[int, int], float | None], order: np.random.Generator | None = None
) -> Selection:
    """Give the collector all it asks for, first asked first, or in a random order, and return what it selects."""
    waiting: list[tuple[int, int]] = []

    def ask(asks: list[Ask]) -> None:
        waiting.extend((a.prompt, i) for a in asks for i in a.samples)

    ask(collector.start())
    while not collector.done:
        place = 0 if order is None else int(order.integers(len(waiting)))
        prompt, sample = waiting.pop(place)
        ask(collector.add(prompt, sample, reward(prompt, sample)))
    assert sorted(waiting) == sorted(collector.outstanding())
    return collector.select()


def table(rates: float | np.ndarray, num_prompts: int, num_samples: int, seed: int) -> np.ndarray:
    """float64 [prompts, samples], rewards of 0 and 1."""
    draws = np.random.default_rng(seed).random((num_prompts, num_samples))
    return (draws < np.broadcast_to(np.asarray(rates, dtype=float).reshape(-1, 1), draws.shape)).astype(float)
