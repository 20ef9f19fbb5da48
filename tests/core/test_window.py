"""Which prompts train, and when, if responses may outlast a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.collector import Key
from megarl.core.sampling.window import WindowSamples

GROUP = 2


def run_steps(
    steps: int, size: int, staleness: int, most_passed: int, finishes: Callable[[int, Key], bool]
) -> list[tuple[list[int], int]]:
    """The prompts of each step and how many were passed over; ``finishes``: whether a response ends in a step.

    A response that the step cannot do without finishes anyway, as a step waits for it.
    """
    trained: set[int] = set()
    begun: dict[Key, int] = {}
    arrived: set[Key] = set()
    batches = []
    for step in range(steps):
        open_prompts = [p for p in range(10 * steps * size) if p not in trained][: (staleness + 1) * size]
        due = {p for (p, _), version in begun.items() if p not in trained and version <= step - staleness}
        options = {"most_passed": most_passed, "due": due, "arrived": arrived}
        asker = WindowSamples(open_prompts, GROUP, size, **options)
        flying = [(ask.prompt, i) for ask in asker.start() for i in ask.samples]
        while not asker.done:
            assert len(flying) <= size * GROUP
            begun |= {key: step for key in flying if key not in begun}
            ready = next((key for key in flying if finishes(step, key)), flying[0])
            flying.remove(ready)
            arrived.add(ready)
            flying += [(ask.prompt, i) for ask in asker.add(*ready, 1.0) for i in ask.samples]
        batch, passed = asker.choose()
        begun |= {key: step for key in flying if key not in begun}
        assert all(begun[p, i] >= step - staleness for p in batch for i in range(GROUP))
        assert passed <= most_passed
        assert passed == len([p for p in open_prompts if p < batch[-1] and p not in batch])
        trained |= set(batch)
        batches.append((batch, passed))
    return batches


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 5), staleness=st.integers(1, 3), window=st.integers(0, 5), slow=st.sets(st.integers(0, 200)),
)  # fmt: skip
def test_every_prompt_trains_once_in_time_and_few_are_passed_over(
    size: int, staleness: int, window: int, slow: set[int]
) -> None:
    """Slow responses end only when a step cannot go on without them."""
    most_passed = min(window, size)
    batches = run_steps(9, size, staleness, most_passed, lambda _, key: key[0] * GROUP + key[1] not in slow)
    counts = Counter(prompt for batch, _ in batches for prompt in batch)
    assert set(counts.values()) == {1}
    assert all(len(batch) == size for batch, _ in batches)
    missing = set(range(max(counts) + 1)) - set(counts)
    assert len(missing) == batches[-1][1]
    if most_passed == 0:
        assert [prompt for batch, _ in batches for prompt in batch] == list(range(9 * size))


@pytest.mark.parametrize(
    ("most_passed", "due", "arrived", "expected"),
    [
        (0, set(), {1, 2}, None),
        (1, set(), {1, 2}, ([1, 2], 1)),
        (1, {0}, {1, 2}, None),
        (1, {0}, {0, 1}, ([0, 1], 0)),
        (1, set(), {2, 3}, None),
        (2, set(), {2, 3}, ([2, 3], 2)),
        (3, set(), {2}, None),
    ],
)
def test_the_batch_is_the_first_complete_prompts(
    most_passed: int, due: set[int], arrived: set[int], expected: tuple[list[int], int] | None
) -> None:
    keys = {(prompt, i) for prompt in arrived for i in range(GROUP)} | {(0, 0)}
    asker = WindowSamples(range(4), GROUP, 2, most_passed=most_passed, due=due, arrived=keys)
    assert asker.choose() == expected
    assert asker.done == (expected is not None)
    asked = [(ask.prompt, i) for ask in asker.start() for i in ask.samples]
    assert asked == ([] if expected else sorted({(p, i) for p in range(4) for i in range(GROUP)} - keys)[:4])
