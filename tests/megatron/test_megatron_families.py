"""Every family of models: what Megatron computes from its checkpoints, in every layout, against transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases_training
import pytest
import torch
from ranks import Case, case, slow
from saves import save
from test_megatron_layouts import assert_gradients, assert_logprobs_of_transformers, reference_gradients
from tiny_families import FAMILIES, write_family
from tiny_world import MODELS, config, policy_of, safetensors_of
from torch_dist_weights import read_weights

from megarl.convert.conversion import to_hf, to_megatron
from megarl.convert.job import Options
from megarl.engines.weights import checkpoint_shapes
from megarl.files import hf_config
from megarl.files.hf_config import DENSE
from megarl.megatron.distributed import from_main_rank
from megarl.megatron.policy import Policy
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape

__all__ = ["reference_gradients"]  # a fixture

GRADIENTS = "cases_training:gradients"
ROUND_TRIP = "cases_training:round_trip"
CHAIN = "test_megatron_families:chain"
NEW = [name for name in FAMILIES if name != "qwen3_moe"]
EXPERT_LAYOUTS = {name: "tp2" if name in DENSE else "tp2 ep2 etp1" for name in FAMILIES}
Reference = Callable[[str], tuple[float, dict[str, torch.Tensor]]]


def one_of(one: Case) -> Any:
    """`make test` takes the family with the most kinds of parameters, `make test-all` every one."""
    return one if ("model", "deepseek_v3") in one.arguments else slow(one)


def gradients_of(found: dict[str, Any]) -> dict[str, Any]:
    """Without expert biases, which have no gradient and are exported as they are."""
    biases = ("e_score_correction_bias", "expert_bias")
    kept = {name: value for name, value in found["gradients"].items() if not name.endswith(biases)}
    return {**found, "gradients": kept}


@pytest.mark.parametrize("model", NEW)
def test_a_family_computes_what_transformers_computes_gradients_included(
    model: str, in_model_folder: None, models: dict[str, Path], reference_gradients: Reference
) -> None:
    found = cases_training.gradients({}, model)
    assert_logprobs_of_transformers(found, models[model])
    assert_gradients(gradients_of(found), reference_gradients(model))


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case",
    [
        *(one_of(case(2, GRADIENTS, EXPERT_LAYOUTS[name], model=name)) for name in NEW),
        *(slow(case(2, GRADIENTS, "pp2", model=name)) for name in NEW),
        *(slow(case(2, GRADIENTS, "cp2", model=name)) for name in ("olmoe", "deepseek_v3")),
        slow(case(4, GRADIENTS, "tp2 ep2 etp1 pp2", model="deepseek_v3")),
    ],
    ids=str,
)
def test_a_family_computes_the_same_in_every_layout(
    case: Case, outcome: dict[str, Any], models: dict[str, Path], reference_gradients: Reference
) -> None:
    model = dict(case.arguments)["model"]
    assert_logprobs_of_transformers(outcome, models[model])
    assert_gradients(gradients_of(outcome), reference_gradients(model))


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case", [one_of(case(2, ROUND_TRIP, EXPERT_LAYOUTS[name], model=name)) for name in NEW], ids=str
)
def test_live_weights_are_exported_bit_for_bit(case: Case, outcome: dict[str, Any]) -> None:
    assert outcome["different"] == []
    assert sorted(outcome["names"]) == outcome["stored"]


@pytest.mark.multirank
@pytest.mark.parametrize(
    "case", [one_of(case(2, CHAIN, EXPERT_LAYOUTS[name], model=name, then="pp2")) for name in FAMILIES], ids=str
)
def test_acceptance_a_chain_of_layouts_gives_back_every_bit(case: Case, outcome: dict[str, Any]) -> None:
    assert outcome == {"different": [], "extra": []}


@pytest.mark.parametrize("model", FAMILIES)
def test_the_map_knows_every_tensor_and_its_shape(model: str, models: dict[str, Path]) -> None:
    stored = {name: tuple(tensor.shape) for name, tensor in safetensors_of(models[model]).items()}
    assert hf_shapes(read_shape(models[model])) == stored


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "kimi", "kimi_k2")
    before = read_shape(folder)
    assert before.fields["rope_type"] == "yarn"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    assert read_shape(folder) == dataclasses.replace(before, family="kimi_k2")
    assert checkpoint_shapes(folder) == hf_shapes(before)


def test_every_reader_has_a_tiny_model() -> None:
    assert set(hf_config.FAMILIES) == {kind for kind, _ in FAMILIES.values()} | {"kimi_k2"}


def chain(layout: dict[str, int], model: str, then: str) -> dict[str, list[str]]:
    """HF -> torch_dist -> Megatron in ``layout``, saved by Megatron -> Megatron in ``then``, saved -> HF."""
    source, folder = MODELS / model, Path(f"{model}-chain")
    first, second, third, back = (folder / name for name in ("first", "second", "third", "back"))
    policy_of(config(source, layout))  # the ranks join
    from_main_rank(lambda: to_megatron(source, first, Options(layers="local")) and None)
    other = {part[:-1]: int(part[-1]) for part in then.split()}
    _through_megatron(policy_of(config(source, layout)), first, second)
    _through_megatron(policy_of(config(source, other)), second / "step_0000000", third)
    from_main_rank(lambda: to_hf(third, back, source, Options()) and None)
    stored, found = safetensors_of(source), safetensors_of(back)
    different = [name for name in stored if name not in found or not torch.equal(stored[name], found[name])]
    return {"different": different, "extra": sorted(set(found) - set(stored))}


def _through_megatron(policy: Policy, source: Path, target: Path) -> None:
    """Load into a model without weights and save, both by Megatron itself."""
    for chunk in policy.chunks:
        for tensor in (*chunk.parameters(), *dict(chunk.named_buffers()).values()):
            tensor.data.fill_(7.0)
    read_weights(source, policy.chunks)
    save(target, 0, policy, {}, keep=1)
