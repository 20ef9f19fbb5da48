from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.sampling.pass_at_k import mean_interval, pass_at_k, wilson_interval


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 8), data=st.data())
def test_is_the_share_of_subsets(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [1] * c + [0] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    assert abs(pass_at_k([n], [c], k)[0] - sum(map(any, subsets)) / len(subsets)) < 1e-12


def test_unbiased_and_stable():
    n, k, p = 12, 5, 0.2
    law = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    assert abs(np.dot(law, pass_at_k([n] * (n + 1), range(n + 1), k)) - (1 - (1 - p) ** k)) < 1e-12
    np.testing.assert_allclose(pass_at_k([4, 7], [1, 7], 1), [0.25, 1])
    # C(100000, 256) is far beyond a float
    assert abs(pass_at_k([100_000], [1], 256)[0] - 256 / 100_000) < 1e-9


def test_mean_interval():
    found = mean_interval([0.0, 0.5, 1.0, 0.5])
    half = 1.959963984540054 * math.sqrt(0.5 / 3) / 2
    np.testing.assert_allclose([found.value, found.low, found.high], [0.5, 0.5 - half, 0.5 + half], atol=1e-12)
    assert mean_interval([0.0, 1.0], 0.5).high < mean_interval([0.0, 1.0], 0.9).high


def test_wilson():
    found = wilson_interval(2, 10)
    # the ends solve (x - p)^2 = z^2 x (1 - x) / n
    for end in (found.low, found.high):
        assert abs((end - 0.2) ** 2 - 1.959963984540054**2 * end * (1 - end) / 10) < 1e-12
    assert found.low < 0.2 < found.high
    assert wilson_interval(0, 10).low == 0
    assert wilson_interval(0, 10).high > 0.2
    assert wilson_interval(10, 10).high == 1
