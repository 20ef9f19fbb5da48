from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.packing import drop_routes
from megarl.core.rollout_codec import decode_rollouts, encode_rollouts, num_encoded_bytes
from megarl.core.types import Rollout
from megarl.errors import RolloutError


def rollout(length: int, seed: int, *, routed: bool = True, versions: bool = False, kept: bool = False) -> Rollout:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 4, length).astype(np.int32)
    return Rollout(
        group=seed,
        sample=seed % 7,
        tokens=random.integers(0, 150_000, length).astype(np.int32),
        loss_mask=random.random(length) < 0.5,
        rollout_logprobs=random.normal(size=length).astype(np.float32),
        routed_experts=random.integers(0, 8, (length, 2, 2)).astype(np.uint8) if routed else None,
        routed_mask=random.random(length) < 0.9 if routed else None,
        weight_versions=random.integers(0, 9, length).astype(np.int32),
        finish_reason=("stop", "length", "abort")[seed % 3],  # type: ignore[arg-type]
        route_versions=random.integers(0, 9, length).astype(np.int32) if versions else None,
        kept_counts=counts if kept else None,
        kept_ids=random.integers(0, 150_000, counts.sum()).astype(np.int32) if kept else None,
    )


def assert_equal(found: Rollout, expected: Rollout) -> None:
    for name in Rollout.__slots__:
        mine, theirs = getattr(found, name), getattr(expected, name)
        if isinstance(theirs, np.ndarray):
            assert mine.dtype == theirs.dtype, name
            np.testing.assert_array_equal(mine, theirs, err_msg=name)
        else:
            assert mine == theirs, name


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 99), *[st.booleans()] * 3), max_size=6),
)
def test_rollouts_come_back_as_they_were_but_for_their_routes(
    made: list[tuple[int, int, bool, bool, bool]],
) -> None:
    rollouts = [rollout(n, seed, routed=r, versions=v, kept=k) for n, seed, r, v, k in made]
    found = decode_rollouts(encode_rollouts(rollouts))
    assert len(found) == len(rollouts)
    for mine, theirs in zip(found, rollouts, strict=True):
        assert_equal(mine, drop_routes(theirs) if theirs.routed_experts is not None else theirs)


def test_a_token_costs_fourteen_bytes_and_a_sequence_forty_eight() -> None:
    data = encode_rollouts([rollout(100, 1), rollout(50, 2)])
    assert len(data) == 48 * 3 + 150 * (4 + 4 + 4 + 1 + 1) == num_encoded_bytes(2, 150, routed=True)
    assert len(encode_rollouts([rollout(9, 1, routed=False)])) == num_encoded_bytes(1, 9, routed=False)
    kept = rollout(9, 1, kept=True)
    assert kept.kept_ids is not None
    assert len(encode_rollouts([kept])) == num_encoded_bytes(1, 9, routed=True) + 4 * (9 + len(kept.kept_ids))


def test_bytes_that_were_cut_or_a_column_that_is_too_short_are_refused() -> None:
    data = encode_rollouts([rollout(10, 1)])
    for wrong in (data[:-1], np.concatenate([data, data[:1]]), data[:20]):
        with pytest.raises(RolloutError, match="are no rollouts"):
            decode_rollouts(wrong)
    with pytest.raises(RolloutError, match="group 1 sample 1: loss_mask has 9 entries, expected 10"):
        encode_rollouts([replace(rollout(10, 1), loss_mask=np.ones(9, bool))])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=3),
    st.lists(
        st.tuples(st.integers(0, 23), st.sampled_from([-(2**63), -2, -1, 0, 1, 3, 20, 2**40, 2**63 - 1])),
        min_size=1,
        max_size=3,
    ),
)
def test_a_header_that_lies_costs_an_error_and_no_memory(lengths: list[int], lies: list[tuple[int, int]]) -> None:
    data = encode_rollouts([rollout(length, seed) for seed, length in enumerate(lengths)])
    header = data[: 48 * (len(lengths) + 1)].view(np.int64)
    for place, value in lies:
        header[place % len(header)] = value
    tracemalloc.start()
    try:
        found = decode_rollouts(data)
        assert encode_rollouts(found).nbytes == len(data)
    except RolloutError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20


def test_sequences_of_negative_length_do_not_read_the_same_bytes_again() -> None:
    data = encode_rollouts([rollout(20, seed) for seed in range(3)])
    header = data[: 48 * 4].view(np.int64).reshape(4, 6)
    header[2, 2] = -20
    with pytest.raises(RolloutError, match="are no rollouts: sequence 1 has -20 tokens and finish reason 1"):
        decode_rollouts(data)
    header[2, 2:4] = (20, 3)
    with pytest.raises(RolloutError, match="sequence 1 has 20 tokens and finish reason 3"):
        decode_rollouts(data)
    header[2, 3:] = (1, 1 << 4, -1)
    with pytest.raises(RolloutError, match="are no rollouts: sequence 1"):
        decode_rollouts(data)
    header[0, 0] = -2
    with pytest.raises(RolloutError, match="their header says -2 sequences"):
        decode_rollouts(data)
