from __future__ import annotations

from megarl.core.sampling.collector import Pool


def test_a_pool_orders_by_sample_and_leaves_failures_out():
    pool = Pool(3, asked=[2, 3])
    assert pool.num_asked == 5
    assert pool.waits
    assert pool.drawn() == [0, 0]
    for sample, reward in ((4, 0.9), (0, None), (2, 0.2), (1, 0.7), (3, None)):
        assert pool.waits
        pool.rewards[sample] = reward
    assert not pool.waits
    assert pool.samples().tolist() == [1, 2, 4]
    assert pool.values().tolist() == [0.7, 0.2, 0.9]
    assert pool.drawn() == [1, 2]
    assert pool.classes(0.7) == (1, 2)
    assert pool.has_contrast()


def test_a_pool_that_holds_nothing():
    for pool in (Pool(0), Pool(0, asked=[2], rewards={0: None, 1: None})):
        assert not pool.waits
        assert pool.samples().tolist() == pool.values().tolist() == []
        assert pool.classes(0.7) == (0, 0)
        assert not pool.has_contrast()
    assert not Pool(0, asked=[2], rewards={0: 0.3, 1: 0.3}).has_contrast()
    assert Pool(0).drawn() == []
