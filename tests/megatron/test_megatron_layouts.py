"""One model, one batch, many layouts: the numbers do not depend on how the model is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases_training
import pytest
import torch
from ranks import Case, case
from tiny_world import (
    batch_of,
    config,
    logits_of_transformers,
    oracle_loss_gradients,
    policy_of,
    rollouts,
    teacher_forced,
    with_kept_sets,
)

from megarl.errors import ConfigError
from megarl.megatron.model import transformer_config
from megarl.models.shapes import read_shape

LOGPROBS = "cases_training:logprobs"
GRADIENTS = "cases_training:gradients"
STEPS = "cases_training:fixed_batch_steps"

LAYOUTS_OF_2 = ["ep2", "tp2", "pp2", "pp2 vpp2", "tp2 ep2 etp1", "cp2"]
LAYOUTS_OF_4 = ["tp2 ep2 etp1 pp2", "pp2 vpp2 ep2", "cp2 tp2 ep2 etp1", "cp2 pp2 vpp2", "cp4"]


@pytest.fixture(scope="session")
def reference_gradients(models: dict[str, Path]) -> Callable[..., tuple[float, dict[str, torch.Tensor]]]:
    known: dict[tuple[str, bool], tuple[float, dict[str, torch.Tensor]]] = {}

    def of(model: str, kept: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
        if (model, kept) not in known:
            batch = with_kept_sets(batch_of(rollouts())) if kept else batch_of(rollouts())
            known[model, kept] = oracle_loss_gradients(models[model], batch, entropy=kept)
        return known[model, kept]

    return of


def assert_logprobs_of_transformers(found: dict[str, Any], model: Path, kept: bool = False) -> None:
    made = rollouts()
    assert len(found["logprobs"]) == len(made)
    for rollout, logits in zip(made, logits_of_transformers(model, [one.tokens for one in made]), strict=True):
        sets = with_kept_sets(batch_of([rollout])) if kept else None
        logprobs, entropies = teacher_forced(logits, rollout.tokens, sets)
        key = tuple(rollout.tokens.tolist())
        torch.testing.assert_close(found["logprobs"][key].double(), logprobs, rtol=0, atol=1e-5)
        assert found["logprobs"][key][0] == 0
        # entropy[t] is of the distribution that token t was drawn from
        torch.testing.assert_close(found["entropies"][key].double(), entropies, rtol=0, atol=1e-5)


def assert_gradients(found: dict[str, Any], expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    loss, gradients = expected
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert sorted(found["gradients"]) == sorted(gradients)
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        error = float((found["gradients"][name] - gradient).abs().max())
        assert error <= 1e-4 * scale + 2e-6, f"{name}: off by {error} on a scale of {scale}"


Reference = Callable[..., tuple[float, dict[str, torch.Tensor]]]


@pytest.mark.parametrize("model", ["base", "tied", "vocab31"])
def test_a_training_pass_on_one_rank_equals_transformers(
    model: str, models: dict[str, Path], in_model_folder: None, reference_gradients: Reference
) -> None:
    """Log-probabilities, entropies and the gradients of every parameter."""
    found = cases_training.gradients({}, model)
    assert found["num_micro_batches"] > 1
    assert_logprobs_of_transformers(found, models[model])
    assert_gradients(found, reference_gradients(model))
    used = [name for name, value in found["gradients"].items() if value.abs().max() > 0]
    assert len(used) > 0.9 * len(found["gradients"])


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(case(2, GRADIENTS, layout) for layout in LAYOUTS_OF_2),
        *(case(4, GRADIENTS, layout) for layout in LAYOUTS_OF_4),
        case(2, GRADIENTS, "pp2", model="tied"),
        case(2, GRADIENTS, "tp2", model="tied"),
        *(case(2, GRADIENTS, layout, kept=True) for layout in ("tp2", "cp2", "pp2")),
        *(case(4, GRADIENTS, layout, kept=True) for layout in ("cp2 tp2 ep2 etp1", "cp2 pp2 vpp2")),
        case(2, LOGPROBS, "pp2 vpp2"),  # of a pass without gradients
        case(2, LOGPROBS, "tp2", model="vocab31"),
        case(4, LOGPROBS, "tp4", model="vocab30"),
    ],
    ids=str,
)
def test_every_layout_equals_transformers(
    case: Case, outcome: dict[str, Any], models: dict[str, Path], reference_gradients: Reference
) -> None:
    """Also with kept sets and an entropy term."""
    arguments = dict(case.arguments)
    model, kept = arguments.get("model", "base"), arguments.get("kept", False)
    assert_logprobs_of_transformers(outcome, models[model], kept)
    if case.function == GRADIENTS:
        assert_gradients(outcome, reference_gradients(model, kept))


def test_kept_sets_and_an_entropy_term_equal_transformers_on_one_rank(
    in_model_folder: None, models: dict[str, Path], reference_gradients: Reference
) -> None:
    found, (loss, expected) = cases_training.gradients({}, kept=True), reference_gradients("base", kept=True)
    assert_logprobs_of_transformers(found, models["base"], kept=True)
    assert_gradients(found, (loss, expected))
    with pytest.raises(AssertionError, match="off by"):  # both matter here
        assert_gradients({**cases_training.gradients({}), "loss": loss}, (loss, expected))


def test_gradients_do_not_depend_on_how_the_batch_is_cut_into_micro_batches(in_model_folder: None) -> None:
    small = cases_training.gradients({}, micro_tokens=16, replay="r3")
    large = cases_training.gradients({}, micro_tokens=1024, replay="r3")
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-6)
    for name, gradient in large["gradients"].items():
        error = float((small["gradients"][name] - gradient).abs().max())
        assert error <= 1e-5 * float(gradient.abs().max()) + 1e-6, f"{name}: off by {error}"


@pytest.fixture(scope="session")
def single_rank_steps(models: dict[str, Path]) -> dict[str, Any]:
    from megarl.megatron import distributed

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models["base"].parent.parent)
        distributed.shutdown()
        found = cases_training.fixed_batch_steps({})
        distributed.shutdown()
    return found


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(case(2, STEPS, layout) for layout in LAYOUTS_OF_2),
        case(2, STEPS, "ep2", dispatcher="allgather"),
        *(case(4, STEPS, layout) for layout in LAYOUTS_OF_4),
    ],
    ids=str,
)
def test_a_fixed_batch_gives_the_same_losses_norms_and_weights_in_every_layout(
    case: Case, outcome: dict[str, Any], single_rank_steps: dict[str, Any]
) -> None:
    assert single_rank_steps["losses"][0] != single_rank_steps["losses"][1]
    assert outcome["losses"] == pytest.approx(single_rank_steps["losses"], rel=1e-5)
    assert outcome["norms"] == pytest.approx(single_rank_steps["norms"], rel=1e-5)
    assert sorted(outcome["weights"]) == sorted(single_rank_steps["weights"])
    lr = 1e-3
    for name, weight in single_rank_steps["weights"].items():
        # Adam divides by the gradient's size, so a gradient of rounding noise alone may move a weight by up to lr
        error = (outcome["weights"][name] - weight).abs()
        assert float(error.max()) <= 2e-2 * lr, f"{name}: off by {float(error.max())}"


def test_pipeline_messages_that_would_be_swapped_are_refused(models: dict[str, Path]) -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    with pytest.raises(ConfigError, match="swaps activations and gradients"):
        transformer_config(read_shape(models["base"]), {**sizes, "batch_p2p_comm": True}, torch.float32)


LR, DECAY, BETA1, BETA2, EPS = 1e-2, 0.1, 0.9, 0.95, 1e-8


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("distributed", [True, False])
def test_a_step_is_adam_with_decoupled_weight_decay(distributed: bool, models: dict[str, Path]) -> None:
    optim = {"lr": LR, "min_lr": LR, "weight_decay": DECAY, "clip_grad": 0.0, "decay_style": "constant"}
    adam = {"adam_beta1": BETA1, "adam_beta2": BETA2, "adam_eps": EPS}
    given = {f"optim__{name}": value for name, value in {**optim, **adam}.items()}
    policy = policy_of(config(models["base"], parallel__distributed_optimizer=distributed, **given))
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    wanted = [p.detach().double().clone() for p in parameters]
    moments = [(torch.zeros_like(value), torch.zeros_like(value)) for value in wanted]
    generator = torch.Generator().manual_seed(1)
    for step in (1, 2, 3):
        policy.zero_grad()
        for parameter, value, (first, second) in zip(parameters, wanted, moments, strict=True):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad.copy_(gradient)  # type: ignore[attr-defined]
            first.mul_(BETA1).add_((1 - BETA1) * gradient.double())
            second.mul_(BETA2).add_((1 - BETA2) * gradient.double() ** 2)
            value *= 1 - LR * (DECAY if parameter.dim() > 1 else 0.0)  # not of norms
            value -= LR * first / (1 - BETA1**step) / ((second / (1 - BETA2**step)).sqrt() + EPS)
        norm, lr = policy.optimizer_step()
        assert lr == pytest.approx(LR)
        squares = sum(float(p.main_grad.double().square().sum()) for p in parameters)  # type: ignore[attr-defined]
        assert norm == pytest.approx(squares**0.5, rel=1e-5)
        for parameter, value in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)
