from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from megarl.core.choices.stopping import Allotted, Sequential, Uniform, ada_seq_balance, ada_seq_pos, pass_tiers
from megarl.errors import ConfigError


def test_uniform_and_allotted_ask_once():
    assert [Uniform(8).next_samples(0, asked, 0, 0) for asked in (0, 8)] == [8, 0]
    rule = Allotted((3, 0))
    assert [rule.next_samples(0, 0, 0, 0), rule.next_samples(0, 3, 0, 0), rule.next_samples(1, 0, 0, 0)] == [3, 0, 0]
    with pytest.raises(ValueError, match="prompt 2 has no count"):
        rule.next_samples(2, 0, 0, 0)


def test_tiers_reuse_samples_and_cost_what_the_oracle_says():
    rule, costs = pass_tiers(), []
    for solved_after in (4, 32, 256, 10**9):  # a prompt whose first success is the last sample of a tier, or never
        asked = 0
        while more := rule.next_samples(0, asked, int(asked >= solved_after), asked - int(asked >= solved_after)):
            asked += more
        costs.append(asked)
    assert costs == [4, 32, 256, 256]
    assert np.dot([0.627, 0.169, 0.017, 0.187], costs) == pytest.approx(60.14)
    assert rule.keeps(1, 3) == "balance"
    assert rule.keeps(0, 256) == "pos"
    for tiers in ((4, 4), (8, 4), (0, 4)):
        with pytest.raises(ConfigError, match="expected to rise"):
            pass_tiers(tiers=tiers)


def test_released_defaults():
    pos, balance = ada_seq_pos(), ada_seq_balance()
    assert (pos.positives, pos.negatives, pos.round_size, pos.max_samples, pos.fallback) == (1, 0, 8, 32, "pos")
    assert (balance.positives, balance.negatives, balance.fallback) == (2, 2, "balance")
    assert (pos.train_size, pos.threshold) == (4, 0.7)
    odd = ada_seq_balance(5)
    assert (odd.positives, odd.negatives) == (2, 3)


def test_rounds_until_both_classes_are_there():
    rule = ada_seq_balance()
    assert rule.next_samples(0, 0, 0, 0) == 8
    assert rule.next_samples(0, 8, 1, 7) == 8
    assert rule.next_samples(0, 8, 7, 1) == 8
    assert rule.next_samples(0, 8, 2, 6) == 0
    assert rule.next_samples(0, 32, 0, 32) == 0
    # one sample failed: it counts as drawn
    assert rule.next_samples(0, 32, 1, 30) == 0
    assert ada_seq_pos().next_samples(0, 8, 8, 0) == 0


def test_the_last_round_is_cut_at_the_cap():
    rule = Sequential(1, 1, round_size=5, max_samples=12)
    assert [rule.next_samples(0, asked, 0, asked) for asked in (0, 5, 10, 12)] == [5, 5, 2, 0]


def test_what_trains_after_an_exit_and_after_giving_up():
    rule = ada_seq_pos(positives=5)
    assert (rule.keeps(5, 3), rule.keeps(4, 28)) == ("balance", "pos")
    rule = ada_seq_balance()
    assert (rule.keeps(2, 6), rule.keeps(1, 31)) == ("balance", "balance")
    assert Sequential(2, 2, fallback="any").keeps(1, 31) == "any"
    assert Uniform(8, 2, "balance").keeps(0, 8) == "balance"
    assert Allotted((8,)).train_size is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0), "num_samples is 0"),
        (lambda: Uniform(4, train_size=5), "train_size is 5"),
        (lambda: Uniform(4, train_size=2, keep="best"), "'best'"),
        (lambda: Allotted((1, -1)), "-1"),
        (lambda: Sequential(0, 0), "0 positives and 0 negatives"),
        (lambda: Sequential(20, 20), "max_samples = 32"),
        (lambda: Sequential(1, -1), "-1 negatives"),
        (lambda: Sequential(1, 1, round_size=0), "round_size is 0"),
        (lambda: Sequential(1, 1, train_size=0), "train_size is 0"),
        (lambda: Sequential(1, 1, fallback="x"), "'x'"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_records_that_a_configuration_makes_load_nothing_heavy():
    code = (
        "import sys, megarl.core.choices.stopping, megarl.core.choices.credit\n"
        "sys.exit(any(name in sys.modules for name in ('numpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
