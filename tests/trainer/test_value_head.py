"""The value head: its features against transformers, what it learns, and that every layout learns the same."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from forks import Job, run_jobs
from model_jobs import NUM_UPDATES, Case, case_training, heads, learn, prompts_and_rates, tied_model
from test_step_oracle import model_at
from train_world import World

from megarl.errors import CheckpointError, NumericsError
from megarl.trainer.sampling.value_head import ValueHead, prompt_features

ALONE = Case({}, ())
LAYOUTS = {
    "tp2": Case({"parallel__tp": 2}, ()),
    "pp2": Case({"parallel__pp": 2}, ()),
    "cp2": Case({"parallel__cp": 2}, ()),
    "ep2": Case({"parallel__ep": 2}, ()),
    "ep2 allgather": Case({"parallel__ep": 2, "parallel__dispatcher": "allgather"}, ()),
    "vpp": Case({"parallel__pp": 2, "parallel__vpp": 2}, ()),
    "tied pp2": Case({"parallel__pp": 2}, (), tied=True),
}


@pytest.fixture(scope="module")
def on_two_ranks(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tied_model(world)
    job = Job("heads", 2, "model_jobs:heads", {"world": world, "cases": LAYOUTS})
    return run_jobs([job], tmp_path_factory.mktemp("heads"))["heads"].checked()


@pytest.fixture(scope="module")
def alone(world: World) -> dict[str, Any]:
    return heads(world, {"alone": ALONE, "tied": Case({}, (), tied=True)})


def _last_hidden_states(world: World, tied: bool) -> np.ndarray:
    model = model_at(tied_model(world) if tied else world.model).model
    prompts, _ = prompts_and_rates(0, 7)
    with torch.no_grad():
        rows = [model(torch.from_numpy(prompt).long()[None]).last_hidden_state[0, -1] for prompt in prompts]
    return torch.stack(rows).numpy()


def _cross_entropy(rates: np.ndarray, truth: np.ndarray) -> float:
    return float(-(truth * np.log(rates) + (1 - truth) * np.log(1 - rates)).mean())


def test_features_are_the_last_hidden_states_of_transformers(world: World, alone: dict[str, Any]) -> None:
    expected = _last_hidden_states(world, tied=False)
    np.testing.assert_allclose(alone["alone"]["features"], expected, atol=1e-4)
    np.testing.assert_allclose(alone["alone"]["one"], expected[:1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("name", LAYOUTS)
def test_acceptance_features_and_head_are_the_same_in_every_layout(
    world: World, on_two_ranks: dict[str, Any], alone: dict[str, Any], name: str
) -> None:
    found, tied = on_two_ranks[name], LAYOUTS[name].tied
    expected = _last_hidden_states(world, tied)
    np.testing.assert_allclose(found["features"], expected, atol=1e-4)
    np.testing.assert_allclose(found["one"], expected[:1], atol=1e-4)
    single = alone["tied" if tied else "alone"]
    np.testing.assert_allclose(found["losses"], single["losses"], atol=1e-5)
    np.testing.assert_allclose(found["rates"], single["rates"], atol=1e-5)


def test_head_learns_rates_that_hang_on_the_first_token(alone: dict[str, Any]) -> None:
    _, truth = prompts_and_rates(1, 64)
    learned = _cross_entropy(alone["alone"]["rates"], truth)
    best_constant, best = (_cross_entropy(np.full(64, truth.mean()), truth), _cross_entropy(truth, truth))
    assert learned < best + 0.4 * (best_constant - best)
    assert alone["alone"]["losses"][-1] < alone["alone"]["losses"][0] - 0.1


@pytest.mark.parametrize("prior", [0.5, 0.2])
def test_first_estimate_is_the_prior(world: World, prior: float) -> None:
    prompts, _ = prompts_and_rates(0, 7)
    with case_training(world, ALONE) as step:
        head = ValueHead(step.policy, micro_batch_tokens=64, prior=prior)
        np.testing.assert_allclose(head.rates(prompts), prior, rtol=1e-12)
        assert head.rates([]).shape == (0,)


def test_a_head_goes_on_from_its_state_as_if_nothing_had_happened(world: World) -> None:
    prompts, _ = prompts_and_rates(1, 9)
    with case_training(world, ALONE) as step:
        straight, resumed = (ValueHead(step.policy, micro_batch_tokens=64) for _ in range(2))
        learn(straight, range(3))
        resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
        assert resumed.state_dict() == straight.state_dict()
        assert learn(straight, range(3, 6)) == learn(resumed, range(3, 6))
        assert np.array_equal(straight.rates(prompts), resumed.rates(prompts))


def test_state_is_a_copy(world: World) -> None:
    with case_training(world, ALONE) as step:
        head = ValueHead(step.policy, micro_batch_tokens=64)
        before = head.state_dict()
        learn(head, range(1))
        assert before == ValueHead(step.policy, micro_batch_tokens=64).state_dict() != head.state_dict()


def test_scale_and_common_shift_of_hidden_states_are_no_change_of_rates(world: World) -> None:
    """The final norm's weight scales every hidden state; half the prompts' statistics fade within an update here."""
    prompts, truth = prompts_and_rates(1, 64)
    with case_training(world, ALONE) as step:
        norm = step.policy.chunks[0].module.decoder.final_layernorm.weight
        head, scaled = (ValueHead(step.policy, micro_batch_tokens=256, decay=0.5) for _ in range(2))
        learn(head, range(NUM_UPDATES))
        rates = head.rates(prompts)
        with torch.no_grad():
            norm.mul_(3.0)
        learn(scaled, range(NUM_UPDATES))
        np.testing.assert_allclose(scaled.rates(prompts), rates, atol=1e-4)
        learn(head, range(NUM_UPDATES, NUM_UPDATES + 6))  # drifted under it
        assert _cross_entropy(head.rates(prompts), truth) < _cross_entropy(rates, truth) + 0.02


def test_one_update_moves_estimates_towards_the_pools(world: World) -> None:
    prompts, _ = prompts_and_rates(2, 5)
    with case_training(world, ALONE) as step:
        head = ValueHead(step.policy, micro_batch_tokens=64)
        loss = head.update(prompts, [4] * 5, [4] * 5)
        assert loss == pytest.approx(np.log(2), rel=1e-12)
        assert (head.rates(prompts) > 0.6).all()
        before = head.state_dict()
        assert head.update(prompts, [0] * 5, [0] * 5) == 0.0
        assert head.update([], [], []) == 0.0
        assert head.state_dict() == before


def test_a_state_of_another_head_is_refused(world: World) -> None:
    with case_training(world, ALONE) as step:
        head = ValueHead(step.policy, micro_batch_tokens=64)
        state = head.state_dict()
        with pytest.raises(CheckpointError, match="sums missing"):
            head.load_state_dict({name: value for name, value in state.items() if name != "sums"})
        with pytest.raises(CheckpointError, match="another model"):
            head.load_state_dict({**state, "weights": state["weights"][:-1]})


def test_hidden_state_that_is_not_finite_names_the_prompt(world: World) -> None:
    prompts, _ = prompts_and_rates(2, 4)
    prompts[2][1] = 17
    assert all(17 not in prompt for index, prompt in enumerate(prompts) if index != 2)
    with case_training(world, ALONE) as step:
        with torch.no_grad():
            step.policy.chunks[0].module.embedding.word_embeddings.weight[17] = float("nan")
        with pytest.raises(NumericsError, match="prompt 2 is not finite"):
            prompt_features(step.policy, prompts, 64)
