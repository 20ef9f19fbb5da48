from __future__ import annotations

import numpy as np
import pytest
from sampling_driver import drive, table

from megarl.core.choices.credit import Credit, parse_objective
from megarl.core.choices.stopping import Allotted, Sequential, Uniform, ada_seq_balance, ada_seq_pos
from megarl.core.sampling.allocation import objective_slope
from megarl.core.sampling.collector import Collector
from megarl.core.sampling.credit_assignment import assign
from megarl.errors import ConfigError

HARD = np.array([[0.0] * 30 + [1.0] * 2])
"""2 of 32 are correct, the last ones drawn."""


def collected(rule, rewards, **options):
    rewards = np.asarray(rewards, dtype=float)
    return drive(Collector(rule, len(rewards), **options), lambda p, s: float(rewards[p, s]))


@pytest.mark.parametrize(
    ("credit", "good", "bad"),
    [
        (Credit(), 0.9375, -0.0625),
        (Credit(statistics="trained"), 0.5, -0.5),
        (Credit(scale="std"), 0.9375 / 0.24593468841898236, -0.0625 / 0.24593468841898236),
        (Credit(scale="std", ddof=0), 0.9375 / (0.0625 * 0.9375) ** 0.5, -0.0625 / (0.0625 * 0.9375) ** 0.5),
        (Credit(scale="rate"), 15, -1),
        (Credit(scale="root_rate"), 3.75, -0.25),
        (Credit(scale="root_rate", rate_eps=1e-3), 0.9375 / 0.0635**0.5, -0.0625 / 0.0635**0.5),
        (Credit(scale="std", floor=2.0), 0.9375 / 2, -0.0625 / 2),
    ],
)
def test_hand_computed(credit, good, bad):
    found = collected(ada_seq_balance(), HARD)
    assert found.rewards.tolist() == [0, 0, 1, 1]
    advantages, weights = assign(credit, found)
    np.testing.assert_allclose(advantages, [bad, bad, good, good], rtol=0, atol=1e-9)
    assert weights.tolist() == [1] * 4


@pytest.mark.parametrize("scale", ["none", "std", "rate", "root_rate"])
def test_pools_without_contrast_give_zero(scale):
    found = collected(ada_seq_balance(), [[0.0] * 32, [1.0] * 32])
    advantages, _ = assign(Credit(scale=scale), found)
    assert len(advantages) == 8
    assert (advantages == 0).all()
    single = collected(Allotted((1, 2)), [[1.0, 0], [1, 0]])
    assert assign(Credit(scale=scale), single)[0][0] == 0


def test_rewards_that_are_not_binary():
    """Classes only decide what is drawn and chosen; mean and deviation are those of the rewards."""
    rewards = [[0.1, 0.9, 2.0, -0.4]]
    found = collected(Sequential(1, 1, 4, 4, train_size=2), rewards)
    assert found.rewards.tolist() == [0.1, 0.9]
    pool = np.array(rewards[0])
    np.testing.assert_allclose(assign(Credit(), found)[0], [0.1 - 0.65, 0.9 - 0.65])
    np.testing.assert_allclose(assign(Credit(scale="std"), found)[0], ([0.1, 0.9] - pool.mean()) / pool.std(ddof=1))


@pytest.mark.parametrize("objective", ["log", "raft", "linear", "power:0.5", "arcsin"])
def test_weights_of_a_nonlinear_objective(objective):
    rewards = [[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0] * 8, [1] * 8]
    found = collected(Uniform(8), rewards)
    _, weights = assign(Credit(objective=objective), found)
    expected = objective_slope([1 / 8, 1 / 2, 1 / 16, 15 / 16], objective)
    np.testing.assert_allclose(weights.reshape(4, 8), np.repeat(expected[:, None], 8, axis=1))


def test_prompts_can_count_alike():
    rewards = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    found = collected(Allotted((6, 2, 0)), rewards)
    _, weights = assign(Credit(weigh="prompt"), found)
    np.testing.assert_allclose(weights, [4 / 6] * 6 + [2] * 2)
    assert assign(Credit(weigh="prompt"), collected(Allotted((3,)), rewards[:1]))[1].tolist() == [1] * 3
    _, both = assign(Credit(weigh="prompt", objective="log"), found)
    np.testing.assert_allclose(both, [4 / 6 * 6] * 6 + [2 / 0.75] * 2)


def test_prompts_count_alike_by_what_an_objective_leaves_in():
    """GVM-RAFT: each prompt's accepted responses by their mean, so 1 / (prompts x accepted) of the sum each."""
    found = collected(Allotted((2, 4)), [[1, 0, 0, 0], [1, 1, 1, 0]])
    accepted = found.rewards > 0.5
    _, weights = assign(Credit(weigh="prompt"), found, accepted)
    np.testing.assert_allclose(weights[accepted] / accepted.sum(), [1 / 2, 1 / 6, 1 / 6, 1 / 6])


@pytest.mark.parametrize("credit", [Credit(), Credit(statistics="trained"), Credit(weigh="prompt")])
def test_nothing_selected(credit):
    found = drive(Collector(ada_seq_pos(), 2), lambda p, s: None)
    advantages, weights = assign(credit, found)
    assert advantages.shape == weights.shape == (0,)


@pytest.mark.parametrize("credit", [Credit(), Credit(objective="log", weigh="prompt")])
def test_numbers_of_prompts_need_not_ascend(credit):
    rewards, numbers = table(0.5, 4, 6, seed=2), [5, 9, 2, 7]
    plain = collected(Uniform(6, 4, "balance"), rewards)
    place = {number: index for index, number in enumerate(numbers)}
    named = drive(Collector(Uniform(6, 4, "balance"), 4, numbers=numbers), lambda p, s: float(rewards[place[p], s]))
    assert named.prompts.tolist() == [numbers[p] for p in plain.prompts]
    found, expected = assign(credit, named), assign(credit, plain)
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected[0] * expected[1])) > 2


@pytest.mark.parametrize(
    "name", ["", "cubic", "power", "power:", "power:x", "power:0", "power:-1", "power:nan", "power:inf", "log:2", "Log"]
)
def test_unknown_objectives(name):
    with pytest.raises(ConfigError, match="is unknown"):
        parse_objective(name)


def test_a_credit_that_does_not_fit():
    with pytest.raises(ConfigError):
        Credit(objective="cubic")
