"""Turns of a conversation become one sequence with a row for every token but the last; which weights chose the rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.core.metrics import finalize
from megarl.core.types import Rollout
from megarl.errors import RolloutError, TraceError
from megarl.routes.turns import join, known_rows, provenance_metrics, row_versions

ROUTES = np.arange(9 * 2 * 2, dtype=np.uint8).reshape(9, 2, 2)
"""The routes of nine tokens."""


def turn(prompt: int, size: int, version: int, rows: range) -> Rollout:
    """Tokens 0..size-1, of which the first ``prompt`` were given, with ``rows`` of ROUTES + version."""
    mask = np.isin(np.arange(size), rows)
    generated = np.arange(size) >= prompt
    return Rollout(
        group=1,
        sample=2,
        tokens=np.arange(size, dtype=np.int32),
        loss_mask=generated,
        rollout_logprobs=np.where(generated, -float(version), 0.0).astype(np.float32),
        routed_experts=np.where(mask[:, None, None], ROUTES[:size] + version, 0).astype(np.uint8),
        routed_mask=mask,
        weight_versions=np.full(size, version, np.int32),
        finish_reason="stop",
        gate_weights=np.where(mask[:, None, None], ROUTES[:size] / 9 + version, 0).astype(np.float32),
    )


FIRST, LATER = turn(prompt=2, size=4, version=1, rows=range(3)), turn(prompt=6, size=9, version=5, rows=range(3, 8))


def test_the_row_that_the_first_turn_lacks_is_the_first_one_to_ask_for() -> None:
    assert known_rows(FIRST) == 3
    assert known_rows(replace(FIRST, routed_mask=np.array([True, False, True, False]))) == 1
    assert known_rows(replace(FIRST, routed_mask=np.ones(4, bool))) == 4
    assert known_rows(replace(FIRST, routed_mask=np.zeros(4, bool))) == 0
    assert known_rows(replace(FIRST, routed_experts=None, routed_mask=None)) == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_tokens_that_were_read_again_stay_marked_and_dropped_rows_stay_missing(dropped: bool) -> None:
    marked = replace(FIRST, reread_mask=np.array([False, False, True, False]))
    if dropped:
        marked = replace(marked, routed_mask=np.array([True, True, False, False]))
    whole = join(marked, turn(prompt=6, size=9, version=5, rows=range(2, 8)))
    assert whole.reread_mask is not None
    assert whole.routed_mask is not None
    assert np.flatnonzero(whole.reread_mask).tolist() == [2]
    assert np.flatnonzero(~whole.routed_mask).tolist() == ([2, 8] if dropped else [8])
    later = replace(LATER, reread_mask=np.arange(9) > 6)
    both = join(FIRST, later).reread_mask
    assert both is not None
    assert np.flatnonzero(both).tolist() == [7, 8]
    assert join(FIRST, LATER).reread_mask is None
    share = finalize(provenance_metrics([whole, FIRST], trainer_version=5))["routes/reread_rows_fraction"]
    assert share == pytest.approx(1 / 13)


@pytest.mark.parametrize("begin", [0, 2, 3], ids=["everything", "more than is missing", "what is missing"])
def test_a_later_turn_brings_the_rows_that_were_missing(begin: int) -> None:
    whole = join(FIRST, turn(prompt=6, size=9, version=5, rows=range(begin, 8)))
    assert whole.tokens.tolist() == list(range(9))
    assert whole.loss_mask.tolist() == [False, False, True, True, False, False, True, True, True]
    assert whole.rollout_logprobs.tolist() == [0, 0, -1, -1, 0, 0, -5, -5, -5]
    assert whole.weight_versions.tolist() == [1] * 4 + [5] * 5
    assert whole.routed_mask is not None
    assert whole.routed_experts is not None
    assert whole.route_versions is not None
    assert whole.routed_mask.tolist() == [True] * 8 + [False]
    assert np.array_equal(whole.routed_experts[:8], np.concatenate([ROUTES[:3] + 1, ROUTES[3:8] + 5]))
    expected = np.concatenate([ROUTES[:3] / 9 + 1, ROUTES[3:8] / 9 + 5]).astype(np.float32)
    assert np.array_equal(whole.gate_weights[:8], expected)  # type: ignore[index]
    assert whole.route_versions.tolist()[:8] == [1] * 3 + [5] * 5
    assert whole.prompt_length == 2
    bare = [replace(t, routed_experts=None, routed_mask=None, gate_weights=None) for t in (FIRST, LATER)]
    assert join(*bare).routed_experts is None
    assert join(*bare).loss_mask.sum() == 5


def test_each_turn_brings_the_sets_of_its_own_tokens() -> None:
    earlier = replace(FIRST, kept_counts=np.array([0, 0, 2, 1], np.int32), kept_ids=np.array([2, 9, 3], np.int32))
    sets = {"kept_counts": np.array([0] * 6 + [1, 2, 1], np.int32), "kept_ids": np.array([6, 7, 8, 8], np.int32)}
    whole = join(earlier, replace(LATER, **sets))
    assert whole.kept_counts is not None
    assert whole.kept_ids is not None
    assert whole.kept_counts.tolist() == [0, 0, 2, 1, 0, 0, 1, 2, 1]
    assert whole.kept_ids.tolist() == [2, 9, 3, 6, 7, 8, 8]
    assert join(FIRST, LATER).kept_counts is None
    for one, two in ((FIRST, replace(LATER, **sets)), (earlier, LATER)):
        with pytest.raises(RolloutError, match="group 1 sample 2: one turn has kept sets and the other has none"):
            join(one, two)


def test_rows_that_neither_turn_has_stay_missing() -> None:
    holed = replace(FIRST, routed_mask=np.array([True, False, True, False]))
    whole = join(holed, LATER)
    assert whole.routed_mask is not None
    assert np.flatnonzero(~whole.routed_mask).tolist() == [1, 8]
    filled = join(holed, turn(prompt=6, size=9, version=5, rows=range(1, 8)))
    assert filled.routed_experts is not None
    assert np.array_equal(filled.routed_experts[1], ROUTES[1] + 5)


def test_turns_that_do_not_go_together_are_errors() -> None:
    with pytest.raises(TraceError, match="group 1 sample 2: the prompt of 6 tokens does not begin with the 4 tokens"):
        join(FIRST, replace(LATER, tokens=LATER.tokens + (np.arange(9) == 1)))
    with pytest.raises(TraceError, match="the prompt of 3 tokens does not begin with the 4 tokens"):
        join(FIRST, turn(prompt=3, size=9, version=5, rows=range(8)))
    with pytest.raises(TraceError, match="one turn has routed_experts here and the other has none"):
        join(FIRST, replace(LATER, routed_experts=None, routed_mask=None))
    with pytest.raises(TraceError, match=r"routed_experts of \[2, 2\] and \[1, 2\] layers"):
        join(FIRST, replace(LATER, routed_experts=LATER.routed_experts[:, :1]))  # type: ignore[index]
    with pytest.raises(TraceError, match="one turn has gate_weights here and the other has none"):
        join(replace(FIRST, gate_weights=None), LATER)


def versions(of_tokens: list[int], present: list[bool]) -> Rollout:
    """A prompt of one token and a response, of these weights."""
    one = turn(1, len(of_tokens), 0, range(0))
    return replace(one, weight_versions=np.array(of_tokens, np.int32), routed_mask=np.array(present))


class TestProvenance:
    @pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
    def test_metrics_count_sources_mixtures_and_rows_of_other_weights(self, dtype: type) -> None:
        """Masks may be numbers, as an engine of one's own may return them."""
        plain, mixed = versions([1, 1, 1, 1], [True, True, True, False]), versions([1, 1, 2, 2], [True] * 4)
        again = replace(versions([2, 2], [True, True]), route_versions=np.array([3, 2], np.int32))
        assert row_versions(mixed).tolist() == [1, 1, 2, 2]
        given = [
            replace(one, **{name: getattr(one, name).astype(dtype) for name in ("loss_mask", "routed_mask")})
            for one in (plain, mixed, again)
        ]
        found = finalize(provenance_metrics(given, trainer_version=4))
        assert found["rollout/missing_rows_fraction"] == pytest.approx(0.1)
        assert found["routes/stale_rows_fraction"] == pytest.approx(0.1)
        assert found["rollout/mixed_versions_fraction"] == pytest.approx(1 / 3)
        tokens = [version for one in (plain, mixed, again) for version in one.weight_versions[one.loss_mask]]
        assert found["rollout/staleness_mean"] == pytest.approx(4 - np.mean(tokens))
        assert found["rollout/staleness_max"] == 3

    def test_a_missing_row_has_no_version_to_differ(self) -> None:
        gone = replace(versions([2, 2], [True, False]), route_versions=np.array([2, 9], np.int32))
        assert finalize(provenance_metrics([gone], trainer_version=2))["routes/stale_rows_fraction"] == 0
