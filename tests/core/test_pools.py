from __future__ import annotations

from megarl.core.sampling.collector import Pool, PoolRows


def test_a_pool_orders_by_sample_and_leaves_failures_out():
    pool = Pool(3, asked=[2, 3])
    assert pool.num_asked == 5
    assert pool.waits
    assert pool.drawn() == [0, 0]
    for sample, reward in ((4, 0.9), (0, None), (2, 0.2), (1, 0.7), (3, None)):
        assert pool.waits
        pool.rewards[sample] = reward
    assert not pool.waits
    assert pool.drawn() == [1, 2]
    assert pool.classes(0.7) == (1, 2)
    assert pool.has_contrast()


def test_a_pool_that_holds_nothing():
    for pool in (Pool(0), Pool(0, asked=[2], rewards={0: None, 1: None})):
        assert not pool.waits
        assert pool.classes(0.7) == (0, 0)
        assert not pool.has_contrast()
    assert not Pool(0, asked=[2], rewards={0: 0.3, 1: 0.3}).has_contrast()
    assert Pool(0).drawn() == []


def test_the_rows_of_pools_are_in_the_order_of_pool_and_sample():
    first = Pool(7, asked=[3], rewards={2: 0.9, 0: None, 1: 0.2})
    empty = Pool(2, asked=[1], rewards={0: None})
    last = Pool(4, asked=[2], rewards={1: 1.0, 0: 0.5})
    rows = PoolRows.of([first, empty, last])
    assert rows.pool.tolist() == [0, 0, 2, 2]
    assert rows.sample.tolist() == [1, 2, 0, 1]
    assert rows.value.tolist() == [0.2, 0.9, 0.5, 1.0]
    assert rows.bounds.tolist() == [0, 2, 2, 4]
